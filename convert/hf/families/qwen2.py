"""Qwen2: Llama with biases of q, k and v; the last layers may slide."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from convert.hf.settings import flag, parse_rope, window_settings, with_windows
from zdc_jax.config import LayerSpec, ModelConfig


def layers(raw: Mapping[str, Any], layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """The layers of Qwen2 and Qwen3, which slide from `max_window_layers` on if `use_sliding_window`."""
    alike = layer.repeated(raw["num_hidden_layers"])
    if not flag(raw, "use_sliding_window", False):
        return with_windows(alike, {**raw, "sliding_window": None}, lambda index: False)
    first = raw.get("max_window_layers", 28)
    return with_windows(alike, raw, lambda index: index >= first)


def windows(config: ModelConfig) -> dict[str, Any]:
    """Settings; inverse of `layers`."""
    settings = window_settings(config)
    return settings | {"use_sliding_window": settings["sliding_window"] is not None}


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    specs = layers(raw, LayerSpec(rope=parse_rope(raw)))
    kv_heads = raw["num_key_value_heads"]
    return llama.parse_alike(raw, layers=specs, num_kv_heads=kv_heads, qkv_bias=True, **common)


def _settings(config: ModelConfig) -> dict[str, Any]:
    return llama.settings_alike(config) | windows(config)


FAMILY = replace(llama.FAMILY, architecture="Qwen2ForCausalLM", parse=_parse, settings=_settings)
