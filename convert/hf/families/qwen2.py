"""Qwen2: Llama with biases of q, k and v; the last layers may be sliding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from convert.hf.settings import add_windows, parse_flag, parse_rope
from zdc_jax.config import LayerSpec, ModelConfig


def parse_layers(raw: Mapping[str, Any], layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Parse the layers of Qwen2 or Qwen3: with `use_sliding_window`, sliding from `max_window_layers` on."""
    repeated = layer.repeated(raw["num_hidden_layers"])
    if not parse_flag(raw, "use_sliding_window", False):
        return add_windows(repeated, {**raw, "sliding_window": None}, lambda index: False)
    first = raw.get("max_window_layers", 28)
    return add_windows(repeated, raw, lambda index: index >= first)


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    specs = parse_layers(raw, LayerSpec(rope=parse_rope(raw)))
    kv_heads = raw["num_key_value_heads"]
    return llama.parse_shared(raw, layers=specs, num_kv_heads=kv_heads, qkv_bias=True, **common)


FAMILY = replace(llama.FAMILY, architecture="Qwen2ForCausalLM", parse=_parse)
