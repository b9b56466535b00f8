"""Parsing of the settings in `config.json` that several families share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zdc_jax.config import Activation, LayerSpec, RopeConfig
from zdc_jax.errors import ConversionError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


def parse_flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean setting, or `default` where it is absent or null.

    Raises:
      ConversionError: the setting has another type.
    """
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConversionError(f"{name}={value!r:.80} must be true or false")
    return value


def parse_activation(name: Any) -> Activation:
    """Return our name of an activation; raise `ConversionError` for an unsupported one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConversionError(
            f"activation {name!r:.80} is not supported; supported are {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Parse the rotary settings, in the old form or in the new.

    The old form has `rope_theta` and `rope_scaling`, the new one `rope_parameters`. Where both exist,
    `rope_scaling` wins. Values that follow from other settings (attention factors, original positions) are
    derived as in transformers.

    Raises:
      KeyError: a setting is missing.
      ConversionError: a setting is not supported.
    """
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "su":
        kind = "longrope"  # Renamed later.
    share = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ConversionError(f"partial_rotary_factor={share!r:.80} is not supported; only 1 is")
    if kind not in _ROPE_PARSERS:
        raise ConversionError(
            f"rope type {kind!r:.80} is not supported; supported are {sorted(_ROPE_PARSERS)}"
        )
    return RopeConfig(theta=theta, kind=kind, **_ROPE_PARSERS[kind](settings, raw))


def _parse_linear(settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": float(settings["factor"])}


def _parse_llama3(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return _parse_linear(settings, raw) | {
        "low_freq_factor": float(settings["low_freq_factor"]),
        "high_freq_factor": float(settings["high_freq_factor"]),
        "original_max_positions": _parse_original_positions(settings, raw),
    }


def _parse_dynamic(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return _parse_linear(settings, raw) | {"original_max_positions": int(raw["max_position_embeddings"])}


def _parse_original_positions(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Return the positions of the original training; all positions where no setting gives them."""
    name = "original_max_position_embeddings"  # Next to the rotary settings in Phi-3, else among them.
    return int(raw.get(name) or settings.get(name) or raw["max_position_embeddings"])


def _parse_yarn(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    original = _parse_original_positions(settings, raw)
    factor = float(settings.get("factor") or raw["max_position_embeddings"] / original)
    attention = settings.get("attention_factor")
    if attention is None:

        def compute_scale(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

        mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = compute_scale(mscale) / compute_scale(mscale_all)
        else:
            attention = compute_scale(1)
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": float(attention),
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        "truncate": parse_flag(settings, "truncate", True),
    }


def _parse_longrope(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    original = _parse_original_positions(settings, raw)
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


_ROPE_PARSERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "default": lambda settings, raw: {},
    "linear": _parse_linear,
    "llama3": _parse_llama3,
    "yarn": _parse_yarn,
    "longrope": _parse_longrope,
    "dynamic": _parse_dynamic,
}


def add_windows(
    layers: tuple[LayerSpec, ...], raw: Mapping[str, Any], is_sliding: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """Give sliding layers a window of `sliding_window` tokens.

    Args:
      layers: layers without windows.
      raw: settings. `layer_types` says which layers slide.
      is_sliding: decides by the layer's index where `layer_types` is absent.

    Raises:
      ConversionError: `layer_types` or `sliding_window` is malformed.
    """
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if is_sliding(index) else FULL for index in range(len(layers))]
    if not isinstance(types, list) or len(types) != len(layers):
        raise ConversionError(f"layer_types={types!r:.80} must be a list of {len(layers)} types")
    if others := [kind for kind in types if kind not in (SLIDING, FULL)]:
        raise ConversionError(
            f"layer_types: {others[0]!r:.80} is not supported; supported are {[SLIDING, FULL]}"
        )
    if SLIDING not in types:
        return layers
    window = raw["sliding_window"]
    if window is None:
        raise ConversionError("sliding_window=null must be an integer, because some layers are sliding")
    return tuple(
        replace(layer, window=window) if kind == SLIDING else layer
        for layer, kind in zip(layers, types, strict=True)
    )
