"""Hugging Face `config.json` → `ModelConfig`, and back; every unsupported setting is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zdc_jax.config import Activation, LayerSpec, ModelConfig, RopeConfig
from zdc_jax.errors import ConversionError
from zdc_jax.files import load_json

ARCHITECTURES = {"LlamaForCausalLM": "llama", "OPTForCausalLM": "opt"}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
DTYPES = ("float32", "bfloat16", "float16")
OPT_POSITION_OFFSET = 2
"""OPT's position table starts with two rows that no token uses."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `ConversionError` naming the file."""
    try:
        value = load_json(path)
    except FileNotFoundError:
        raise ConversionError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def parse_config(folder: Path, dtype: str) -> ModelConfig:
    """The architecture of a Hugging Face folder; `dtype` is that the weights will be stored in.

    Raises:
      ConversionError: no config, a missing or malformed setting, or one that is not supported (with what is).
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder; give one with config.json and *.safetensors")
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConversionError(f"architectures={names!r:.200} must be a list of names")
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        raise ConversionError(
            f"architectures={names} is not supported; supported are {sorted(ARCHITECTURES)}"
        )
    if quantization := raw.get("quantization_config"):
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConversionError(
            f"quantization_config (quant_method={kind!r:.80}) is not supported; convert the unquantised "
            f"model, whose weights are one of {DTYPES}"
        )
    try:
        return _parse(family, raw, dtype=dtype, eos_ids=_eos(raw, folder))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConversionError):
            raise
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ConversionError(f"{folder / 'config.json'}: {what}") from error


def _eos(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of the config and of generation_config.json (chat models list more there)."""
    ids: list[int] = []
    path = folder / "generation_config.json"
    for source in (raw, read_json(path) if path.exists() else {}):
        value = source.get("eos_token_id")
        ids += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids))


def _parse(family: str, raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    parse = _parse_llama if family == "llama" else _parse_opt
    return parse(raw, bos_id=raw.get("bos_token_id"), **common)


def _flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConversionError(f"{name}={value!r:.80} must be true or false")
    return value


def _activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConversionError(
            f"activation {name!r:.80} is not supported; supported are {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _parse_llama(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    N, D = raw["num_attention_heads"], raw["hidden_size"]
    attention_bias = _flag(raw, "attention_bias", False)
    return ModelConfig(
        family="llama",
        layers=LayerSpec(rope=_parse_rope(raw)).repeated(raw["num_hidden_layers"]),
        norm="rms",
        embed_dim=D,
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        num_heads=N,
        num_kv_heads=raw.get("num_key_value_heads") or N,
        head_dim=raw.get("head_dim") or D // N,
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        activation=_activation(raw.get("hidden_act", "silu")),
        tie_embeddings=_flag(raw, "tie_word_embeddings", False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=_flag(raw, "mlp_bias", False),
        **common,
    )


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both the old form (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`)."""
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_scaling") or {}),
    }
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    raise ConversionError(
        f"rope type {kind!r:.80} is not supported; supported are ['default', 'linear', 'llama3']"
    )


def _parse_opt(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    if not _flag(raw, "layer_norm_elementwise_affine", True):
        raise ConversionError("layer_norm_elementwise_affine=False is not supported; only True is")
    N, D = raw["num_attention_heads"], raw["hidden_size"]
    pre_norm = _flag(raw, "do_layer_norm_before", True)
    bias = _flag(raw, "enable_bias", True)
    token_dim = raw.get("word_embed_proj_dim") or D
    layer = LayerSpec(norms="pre" if pre_norm else "post", mlp="plain")
    return ModelConfig(
        family="opt",
        layers=layer.repeated(raw["num_hidden_layers"]),
        norm="layer",
        embed_dim=D,
        ffn_dim=raw["ffn_dim"],
        vocab_size=raw["vocab_size"],
        num_heads=N,
        num_kv_heads=N,
        head_dim=D // N,
        max_positions=raw["max_position_embeddings"],
        norm_eps=1e-5,
        activation=_activation(raw.get("activation_function", "relu")),
        tie_embeddings=_flag(raw, "tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=OPT_POSITION_OFFSET,
        final_norm=pre_norm and not _flag(raw, "_remove_final_layer_norm", False),
        token_embed_dim=None if token_dim == D else token_dim,
        **common,
    )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a model of ours; inverse of `parse_config`.

    Raises:
      ConversionError: a model that Hugging Face's configuration of the family cannot describe.
    """
    raw = {
        "bos_token_id": config.bos_id,
        "dtype": config.dtype,
        "eos_token_id": list(config.eos_ids),
        "hidden_size": config.embed_dim,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    } | (_llama_settings(config) if config.family == "llama" else _opt_settings(config))
    ours = config.to_json()
    described = _parse(config.family, raw, dtype=config.dtype, eos_ids=config.eos_ids).to_json()
    if lost := {name: value for name, value in ours.items() if described[name] != value}:
        raise ConversionError(f"{config.family} models of Hugging Face have no setting for {lost}")
    return raw


def _llama_settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_dim,
        "hidden_act": HF_ACTIVATIONS[config.activation],
        "intermediate_size": config.ffn_dim,
        "mlp_bias": config.mlp_bias,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _rope_settings(config.layers[0].rope),
    }


def _rope_settings(rope: RopeConfig | None) -> dict[str, Any]:
    if rope is None:
        return {}
    settings: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        settings["factor"] = rope.factor
    if rope.kind == "llama3":
        settings |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return settings


def _opt_settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": HF_ACTIVATIONS[config.activation],
        "do_layer_norm_before": config.layers[0].norms == "pre",
        "enable_bias": config.qkv_bias,
        "ffn_dim": config.ffn_dim,
        "_remove_final_layer_norm": config.layers[0].norms == "pre" and not config.final_norm,
        "word_embed_proj_dim": config.token_embed_dim or config.embed_dim,
    }
