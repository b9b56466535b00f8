"""Metadata of a GGUF file → the settings that `config.json` of the same model would have."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from convert.gguf.reader import GGUF, as_written
from convert.gguf.tensors import read_tensor
from zdc_jax.errors import ConversionError

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
"""Settings that files keep as tensors."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn or a message."""
OF_NO_MATTER = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Values that say nothing, or what tensors say too."""
GEMMA3_27B_LAYERS = 62
"""Only this Gemma 3 scales its scores by another width than that of a head, and files do not say so."""


class Values:
    """The metadata of a file's architecture; notes what was asked for, since the rest must not matter."""

    def __init__(self, file: GGUF):
        self.file = file
        self.architecture = file.metadata["general.architecture"]
        self._asked = {f"{self.architecture}.{name}" for name in OF_NO_MATTER}

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or `default` where there is none."""
        key = f"{self.architecture}.{name}"
        self._asked.add(key)
        return self.file.metadata.get(key, default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number > 0; raises `ConversionError` for others, and for a missing one without default."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise ConversionError(f"{self.architecture}.{name}={value!r:.80} must be a whole number > 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number > 0; raises as `count`."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConversionError(f"{self.architecture}.{name}={value!r:.80} must be a number > 0")
        return value

    def check_rest(self) -> None:
        """Refuses values that nobody asked for, unless they are zero, false or empty."""
        metadata, mine = self.file.metadata, f"{self.architecture}."
        rest = [key for key in metadata if key.startswith(mine) and key not in self._asked and metadata[key]]
        if rest:
            shown = ", ".join(f"{key}={metadata[key]!r:.40}" for key in rest[:5])
            raise ConversionError(f"{shown}: not supported for the architecture {self.architecture!r}")

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor."""
        return tensor in self.file.tensors

    @property
    def head_dim(self) -> int:
        """H."""
        default = self.count("embedding_length") // self.count("attention.head_count")
        return self.count("attention.key_length", default)


@dataclass(frozen=True)
class Architecture:
    """Its name in `architectures` of `config.json`, and settings beside those that all have."""

    hf_name: str
    more: Callable[[Values], dict[str, Any]]


def hf_settings(file: GGUF) -> dict[str, Any]:
    """Settings in the words of `config.json`, for `convert.hf.config.parse_settings`.

    Raises:
      ConversionError: an architecture or a value that is not supported, or a missing or malformed value.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path}: general.architecture={name!r:.80} is not supported; supported are "
            f"{sorted(ARCHITECTURES)}"
        )
    values = Values(file)
    if not values.has("token_embd.weight"):
        raise ConversionError(f"{file.path} has no token_embd.weight: not the weights of a language model")
    heads, head_dim = values.count("attention.head_count"), values.head_dim
    if (value_dim := values.count("attention.value_length", head_dim)) != head_dim:
        raise ConversionError(
            f"{name}.attention.value_length={value_dim} is not supported; only that of keys, {head_dim}, is"
        )
    if values.get("attention.causal", True) is not True:
        raise ConversionError(f"{name}.attention.causal=False is not supported; only True is")
    settings = {
        "architectures": [ARCHITECTURES[name].hf_name],
        "hidden_size": values.count("embedding_length"),
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not values.has("output.weight"),
        "bos_token_id": _token(file, "bos"),
        "eos_token_id": [token for name in ENDS if (token := _token(file, name)) is not None],
        "rope_parameters": _rope(values),
    }
    settings |= ARCHITECTURES[name].more(values)
    values.check_rest()
    return settings


def _token(file: GGUF, name: str) -> int | None:
    """The id of a token that the metadata name; None where they do not."""
    key, size = f"tokenizer.ggml.{name}_token_id", file.tensors["token_embd.weight"].shape[0]
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < size):
        raise ConversionError(f"{key}={value!r:.80} must be an id below {size}")
    return value


# --- Rotary embedding ------------------------------------------------------------------------------------


def _rope(values: Values) -> dict[str, Any]:
    """`rope_parameters`."""
    dim, head_dim = values.count("rope.dimension_count", values.head_dim), values.head_dim
    settings: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", 10_000.0)}
    if dim != head_dim:
        settings["partial_rotary_factor"] = dim / head_dim
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    original = values.get("rope.scaling.original_context_length")
    kind = values.get("rope.scaling.type", "none" if factor == 1 else "linear")
    known: dict[Any, dict[str, Any]] = {
        "none": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": factor},
    }
    tensors = [name for name in ROPE_TENSORS if values.has(name)]
    if tensors and kind not in ("none", "longrope"):
        raise ConversionError(
            f"{values.architecture}.rope.scaling.type={kind!r:.80} with factor {factor} is not supported "
            f"beside {tensors}"
        )
    if kind == "longrope" or ROPE_LONG in tensors or ROPE_SHORT in tensors:
        return settings | _longrope(values)
    if tensors:
        return settings | llama3_rope(_factors(values, ROPE_FREQS), settings["rope_theta"])
    if kind == "yarn":
        return settings | {"original_max_position_embeddings": original} | _yarn(values)
    return settings | (known[kind] if isinstance(kind, str) and kind in known else {"rope_type": kind})


def _factors(values: Values, name: str) -> list[float]:
    """What each frequency is divided by."""
    if not values.has(name):
        raise ConversionError(
            f"{values.file.path} has no {name!r}, which belongs to its other rotary factors"
        )
    tensor, pairs = values.file.tensors[name], values.count("rope.dimension_count", values.head_dim) // 2
    if tensor.shape != (pairs,) or tensor.kind is not GGMLQuantizationType.F32:
        raise ConversionError(
            f"{tensor.path}: {name!r} is {tensor.kind.name} {tensor.shape}, expected F32 {(pairs,)}"
        )
    factors = as_written(read_tensor(tensor))
    if not all(0 < factor < math.inf for factor in factors):
        raise ConversionError(f"{tensor.path}: {name!r} must hold finite numbers > 0")
    return factors


def _longrope(values: Values) -> dict[str, Any]:
    """Phi-3's: other factors for long contexts than for short ones."""
    return {
        "rope_type": "longrope",
        "short_factor": _factors(values, ROPE_SHORT),
        "long_factor": _factors(values, ROPE_LONG),
        "attention_factor": values.get("rope.scaling.attn_factor"),
        "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
    }


def _yarn(values: Values) -> dict[str, Any]:
    given = {
        "factor": values.number("rope.scaling.factor"),
        "attention_factor": values.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": "yarn"} | given


def llama3_rope(factors: list[float], theta: float) -> dict[str, Any]:
    """Llama 3's settings that give these factors; a file keeps the factors only.

    Frequencies of long waves are divided by `factor`, those of short ones by 1, and between one and four
    waves in the original context the two are mixed. So any frequency between tells the original context.

    Raises:
      ConversionError: no such settings give them.
    """
    dim, factor = 2 * len(factors), max(factors)
    waves = [2 * math.pi * theta ** (2 * index / dim) for index in range(len(factors))]
    if factor == 1:
        return {"rope_type": "default"}
    between = [(wave, each) for wave, each in zip(waves, factors, strict=True) if 1 < each < factor]
    shares = [(wave, (1 / each - 1 / factor) / (1 - 1 / factor)) for wave, each in between]
    for original in dict.fromkeys([8192, *(round(wave * (1 + 3 * share)) for wave, share in shares)]):
        smooth = [min(max((original / wave - 1) / 3, 0), 1) for wave in waves]
        expected = [1 / ((1 - share) / factor + share) for share in smooth]
        if np.allclose(expected, factors, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ConversionError(f"{ROPE_FREQS}: these are not the factors of Llama 3's rotary embedding: {factors}")


# --- Architectures ---------------------------------------------------------------------------------------


def _llama(values: Values) -> dict[str, Any]:
    return {
        "attention_bias": values.has("blk.0.attn_q.bias"),
        "mlp_bias": values.has("blk.0.ffn_up.bias"),
    }


def _granite(values: Values) -> dict[str, Any]:
    return _llama(values) | {
        "attention_multiplier": values.number("attention.scale"),
        "embedding_multiplier": values.number("embedding_scale"),
        "residual_multiplier": values.number("residual_scale"),
        "logits_scaling": values.number("logit_scale"),
    }


def _phi3(values: Values) -> dict[str, Any]:
    context, layers = values.count("context_length"), values.count("block_count")
    original = values.count("rope.scaling.original_context_length", context)
    # Early files of the 4K models do not say; the window is theirs all the same (as in llama.cpp).
    default = 2047 if context == 4096 and layers in (32, 40) else None
    return {
        "sliding_window": values.get("attention.sliding_window", default) or None,
        "original_max_position_embeddings": original,
    }


def _gemma3(values: Values) -> dict[str, Any]:
    layers, window = values.count("block_count"), values.count("attention.sliding_window")
    pattern = values.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        period = pattern if type(pattern) is int and pattern > 0 else 1
        pattern = [(index + 1) % period > 0 for index in range(min(layers, 1 << 12))]
    slides = ["sliding_attention" if each else "full_attention" for each in pattern]
    full = _rope(values) | {"rope_theta": values.number("rope.freq_base", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    scalar = values.head_dim
    if layers == GEMMA3_27B_LAYERS:
        scalar = values.count("embedding_length") // values.count("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": slides,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": values.get("final_logit_softcapping") or None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _llama),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3),
    "granite": Architecture("GraniteForCausalLM", _granite),
    "phi3": Architecture("Phi3ForCausalLM", _phi3),
    "qwen2": Architecture("Qwen2ForCausalLM", lambda values: {}),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda values: {}),
}
"""By the names of GGUF. Mistral is `llama` there; a window of its layers is not kept."""
