"""Mistral: Llama with a sliding window in all layers, unless `sliding_window` is null."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from convert.hf.settings import parse_rope
from zdc_jax.config import LayerSpec, ModelConfig


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    layer = LayerSpec(rope=parse_rope(raw), window=raw.get("sliding_window", 4096))
    layers = layer.repeated(raw["num_hidden_layers"])
    return llama.parse_shared(raw, layers=layers, num_kv_heads=raw["num_key_value_heads"], **common)


FAMILY = replace(llama.FAMILY, architecture="MistralForCausalLM", parse=_parse)
