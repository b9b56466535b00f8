"""Settings of `config.json` that several families share, read and written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zdc_jax.config import Activation, LayerSpec, ModelConfig, RopeConfig
from zdc_jax.errors import ConversionError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"
HF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean setting, `default` where it is absent or null; raises `ConversionError` for another type."""
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConversionError(f"{name}={value!r:.80} must be true or false")
    return value


def activation(name: Any) -> Activation:
    """Our name of an activation; raises `ConversionError` for an unsupported one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConversionError(
            f"activation {name!r:.80} is not supported; supported are {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both the old form (`rope_theta`, `rope_scaling`, which goes first) and the new one (`rope_parameters`).

    What follows from other settings (attention factors, original positions) is resolved as in transformers.
    A missing setting raises `KeyError`, an unsupported one `ConversionError`.
    """
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    share = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ConversionError(f"partial_rotary_factor={share!r:.80} is not supported; only 1 is")
    if kind not in _ROPE:
        raise ConversionError(f"rope type {kind!r:.80} is not supported; supported are {sorted(_ROPE)}")
    return RopeConfig(theta=theta, kind=kind, **_ROPE[kind](settings, raw))


def _factor(settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": float(settings["factor"])}


def _llama3(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return _factor(settings, raw) | {
        "low_freq_factor": float(settings["low_freq_factor"]),
        "high_freq_factor": float(settings["high_freq_factor"]),
        "original_max_positions": _original(settings, raw),
    }


def _dynamic(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return _factor(settings, raw) | {"original_max_positions": int(raw["max_position_embeddings"])}


def _original(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Beside the rotary settings (Phi-3), among them, or, where neither says, all positions."""
    name = "original_max_position_embeddings"
    return int(raw.get(name) or settings.get(name) or raw["max_position_embeddings"])


def _yarn(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    original = _original(settings, raw)
    factor = float(settings.get("factor") or raw["max_position_embeddings"] / original)
    attention = settings.get("attention_factor")
    if attention is None:

        def length(by):
            return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1

        by, by_all = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = length(by) / length(by_all) if by and by_all else length(1)
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": float(attention),
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        "truncate": flag(settings, "truncate", True),
    }


def _longrope(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    original = _original(settings, raw)
    factor = float(settings.get("factor") or raw["max_position_embeddings"] / original)
    attention = settings.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
    return {
        "original_max_positions": original,
        "attention_factor": float(attention),
        "short_factors": tuple(settings["short_factor"]),
        "long_factors": tuple(settings["long_factor"]),
    }


_ROPE: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "default": lambda settings, raw: {},
    "linear": _factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}

_HF_ROPE = {
    "original_max_positions": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Hugging Face's names of fields whose names differ from ours."""
_WRITTEN = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    "yarn": ("factor", "original_max_positions", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_max_positions", "attention_factor", "short_factors", "long_factors"),
    "dynamic": ("factor",),
}


def rope_settings(rope: RopeConfig | None) -> dict[str, Any]:
    """`rope_parameters`; inverse of `parse_rope`."""
    if rope is None:
        return {}
    settings: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    for name in _WRITTEN[rope.kind]:
        value = getattr(rope, name)
        settings[_HF_ROPE.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return settings


def with_windows(
    layers: tuple[LayerSpec, ...], raw: Mapping[str, Any], slides: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """Layers with windows of `sliding_window` tokens where `layer_types` says so; without it, where `slides`.

    Raises `ConversionError` for types that are not supported.
    """
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if slides(index) else FULL for index in range(len(layers))]
    if not isinstance(types, list) or len(types) != len(layers):
        raise ConversionError(f"layer_types={types!r:.80} must be a list of {len(layers)}")
    if others := [kind for kind in types if kind not in (SLIDING, FULL)]:
        raise ConversionError(f"layer type {others[0]!r:.80} must be one of {[SLIDING, FULL]}")
    if SLIDING not in types:
        return layers
    window = raw["sliding_window"]
    if window is None:
        raise ConversionError("sliding_window=null must be an integer where layers slide")
    return tuple(
        replace(layer, window=window) if kind == SLIDING else layer
        for layer, kind in zip(layers, types, strict=True)
    )


def window_settings(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`; inverse of `with_windows` for windows alike."""
    windows = [layer.window for layer in config.layers]
    return {
        "sliding_window": max((window for window in windows if window is not None), default=None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
