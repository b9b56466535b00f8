"""Conversion of a GGUF file's metadata to the settings in the `config.json` of the same model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from convert.gguf.end_tokens import get_token_id, list_end_tokens
from convert.gguf.reader import GGUF, to_shortest_decimals
from convert.gguf.tensors import read_tensor
from zdc_jax.errors import ConversionError

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
"""Rotary settings that GGUF stores as tensors."""
IGNORED_VALUES = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Values without effect, or that the tensors imply."""
GEMMA3_27B_LAYERS = 62
"""Layers of Gemma 3 27B, which alone scales scores by another width than the head's; no value says so."""


class Values:
    """Metadata of a file's architecture, with a record of the values read, so that others can be refused."""

    def __init__(self, file: GGUF):
        self.file = file
        self.architecture = file.metadata["general.architecture"]
        self._read = {f"{self.architecture}.{name}" for name in IGNORED_VALUES}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` where it is absent."""
        key = f"{self.architecture}.{name}"
        self._read.add(key)
        return self.file.metadata.get(key, default)

    def get_count(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0.

        Raises:
          ConversionError: the value is of another kind, or is absent and has no default.
        """
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise ConversionError(f"{self.architecture}.{name}={value!r:.80} must be a whole number > 0")
        return value

    def get_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0; raise as `get_count`."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConversionError(f"{self.architecture}.{name}={value!r:.80} must be a number > 0")
        return value

    def check_rest(self) -> None:
        """Raise `ConversionError` for values that were not read, unless they are zero, false or empty."""
        metadata, prefix = self.file.metadata, f"{self.architecture}."
        rest = [key for key in metadata if key.startswith(prefix) and key not in self._read and metadata[key]]
        if rest:
            shown = ", ".join(f"{key}={metadata[key]!r:.40}" for key in rest[:5])
            raise ConversionError(f"{shown}: not supported for the architecture {self.architecture!r}")

    def has_tensor(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""
        return tensor in self.file.tensors

    @property
    def head_dim(self) -> int:
        """Head dimension."""
        default = self.get_count("embedding_length") // self.get_count("attention.head_count")
        return self.get_count("attention.key_length", default)


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
      hf_name: name in `architectures` of `config.json`.
      more: returns the settings besides those that all architectures have.
    """

    hf_name: str
    more: Callable[[Values], dict[str, Any]]


def derive_settings(file: GGUF) -> dict[str, Any]:
    """Return the settings under the names of `config.json`, for `convert.hf.config.parse_settings`.

    Raises:
      ConversionError: the architecture or a value is not supported, or a value is missing or malformed.
    """
    name = file.metadata.get("general.architecture")
    if file.metadata.get("general.type") == "adapter":
        kind = file.metadata.get("adapter.type")
        raise ConversionError(
            f"{file.path} is an adapter (adapter.type={kind!r:.80}), not a model; "
            "merge it with llama.cpp's llama-export-lora, then convert the merged file"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path}: general.architecture={name!r:.80} is not supported; supported are "
            f"{sorted(ARCHITECTURES)}"
        )
    values = Values(file)
    if not values.has_tensor("token_embd.weight"):
        raise ConversionError(f"{file.path} has no tensor token_embd.weight, so it is not a language model")
    heads, head_dim = values.get_count("attention.head_count"), values.head_dim
    if (value_dim := values.get_count("attention.value_length", head_dim)) != head_dim:
        raise ConversionError(
            f"{name}.attention.value_length={value_dim} is not supported; only that of keys, {head_dim}, is"
        )
    if values.get("attention.causal", True) is not True:
        raise ConversionError(f"{name}.attention.causal=False is not supported; only True is")
    settings = {
        "architectures": [ARCHITECTURES[name].hf_name],
        "hidden_size": values.get_count("embedding_length"),
        "intermediate_size": values.get_count("feed_forward_length"),
        "num_hidden_layers": values.get_count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get_count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.get_count("context_length"),
        "rms_norm_eps": values.get_number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not values.has_tensor("output.weight"),
        "bos_token_id": get_token_id(file, "bos"),
        "eos_token_id": list_end_tokens(file),
        "rope_parameters": _derive_rope(values),
    }
    settings |= ARCHITECTURES[name].more(values)
    values.check_rest()
    return settings


# --- Rotary embedding ------------------------------------------------------------------------------------


def _derive_rope(values: Values) -> dict[str, Any]:
    """Return the settings `rope_parameters`."""
    dim, head_dim = values.get_count("rope.dimension_count", values.head_dim), values.head_dim
    settings: dict[str, Any] = {"rope_theta": values.get_number("rope.freq_base", 10_000.0)}
    if dim != head_dim:
        settings["partial_rotary_factor"] = dim / head_dim
    factor = values.get_number("rope.scaling.factor", values.get_number("rope.scale_linear", 1.0))
    original = values.get("rope.scaling.original_context_length")
    kind = values.get("rope.scaling.type", "none" if factor == 1 else "linear")
    tensors = [name for name in ROPE_TENSORS if values.has_tensor(name)]
    if tensors and kind not in ("none", "longrope"):
        raise ConversionError(
            f"{values.architecture}.rope.scaling.type={kind!r:.80} with factor {factor} is not supported "
            f"together with the tensors {tensors}"
        )
    if kind == "longrope" or ROPE_LONG in tensors or ROPE_SHORT in tensors:
        return settings | _derive_longrope(values)
    if tensors:
        return settings | derive_llama3_rope(_read_factors(values, ROPE_FREQS), settings["rope_theta"])
    if kind == "yarn":
        return settings | {"original_max_position_embeddings": original} | _derive_yarn(values)
    if kind == "linear":
        return settings | {"rope_type": "linear", "factor": factor}
    return settings | {"rope_type": "default" if kind == "none" else kind}


def _read_factors(values: Values, name: str) -> list[float]:
    """Return the divisors of the rotary frequencies."""
    if not values.has_tensor(name):
        raise ConversionError(f"{values.file.path} has no tensor {name!r}, which longrope needs")
    tensor, pairs = values.file.tensors[name], values.get_count("rope.dimension_count", values.head_dim) // 2
    if tensor.shape != (pairs,) or tensor.kind is not GGMLQuantizationType.F32:
        raise ConversionError(
            f"{tensor.path}: {name!r} is {tensor.kind.name} {tensor.shape}, expected F32 {(pairs,)}"
        )
    factors = to_shortest_decimals(read_tensor(tensor))
    if not all(0 < factor < math.inf for factor in factors):
        raise ConversionError(f"{tensor.path}: {name!r} must have finite numbers > 0 only")
    return factors


def _derive_longrope(values: Values) -> dict[str, Any]:
    """Return the rotary settings of Phi-3, with different factors for short and long contexts."""
    return {
        "rope_type": "longrope",
        "short_factor": _read_factors(values, ROPE_SHORT),
        "long_factor": _read_factors(values, ROPE_LONG),
        "attention_factor": values.get("rope.scaling.attn_factor"),
        "original_max_position_embeddings": values.get_count("rope.scaling.original_context_length"),
    }


def _derive_yarn(values: Values) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": values.get_number("rope.scaling.factor"),
        "attention_factor": values.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }


def derive_llama3_rope(factors: list[float], theta: float) -> dict[str, Any]:
    """Return Llama 3's rotary settings that lead to the given factors, which are all that a file has.

    Llama 3 divides the frequencies of long waves by `factor` and those of short waves by 1. Between one and
    four waves per original context, it interpolates. So any interpolated frequency determines the original
    context.

    Raises:
      ConversionError: no such settings lead to these factors.
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


def _derive_llama(values: Values) -> dict[str, Any]:
    return {
        "attention_bias": values.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": values.has_tensor("blk.0.ffn_up.bias"),
    }


def _derive_granite(values: Values) -> dict[str, Any]:
    return _derive_llama(values) | {
        "attention_multiplier": values.get_number("attention.scale"),
        "embedding_multiplier": values.get_number("embedding_scale"),
        "residual_multiplier": values.get_number("residual_scale"),
        "logits_scaling": values.get_number("logit_scale"),
    }


def _derive_phi3(values: Values) -> dict[str, Any]:
    context, layers = values.get_count("context_length"), values.get_count("block_count")
    original = values.get_count("rope.scaling.original_context_length", context)
    # Early files of the 4K models lack the value, but the models have this window (as in llama.cpp).
    default = 2047 if context == 4096 and layers in (32, 40) else None
    return {
        "sliding_window": values.get("attention.sliding_window", default) or None,
        "original_max_position_embeddings": original,
    }


def _derive_gemma3(values: Values) -> dict[str, Any]:
    layers, window = values.get_count("block_count"), values.get_count("attention.sliding_window")
    pattern = values.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        period = pattern if type(pattern) is int and pattern > 0 else 1
        pattern = [(index + 1) % period > 0 for index in range(min(layers, 1 << 12))]
    layer_types = ["sliding_attention" if each else "full_attention" for each in pattern]
    full = _derive_rope(values) | {"rope_theta": values.get_number("rope.freq_base", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": values.get_number("rope.freq_base_swa", 10_000.0)}
    scalar = values.head_dim
    if layers == GEMMA3_27B_LAYERS:
        scalar = values.get_count("embedding_length") // values.get_count("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": layer_types,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": values.get("final_logit_softcapping") or None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _derive_llama),
    "gemma3": Architecture("Gemma3ForCausalLM", _derive_gemma3),
    "granite": Architecture("GraniteForCausalLM", _derive_granite),
    "phi3": Architecture("Phi3ForCausalLM", _derive_phi3),
    "qwen2": Architecture("Qwen2ForCausalLM", lambda values: {}),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda values: {}),
}
"""Architectures by their names in GGUF. GGUF names Mistral `llama` and does not store its window."""
