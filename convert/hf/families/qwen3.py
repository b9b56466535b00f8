"""Qwen3: Qwen2 with norms of q and k, and biases only where the config asks for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama, qwen2
from convert.hf.settings import parse_rope
from zdc_jax.config import LayerSpec, ModelConfig


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    return llama.parse_shared(
        raw,
        layers=qwen2.parse_layers(raw, LayerSpec(rope=parse_rope(raw), qk_norm=True)),
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        **llama.parse_attention_biases(raw),
        **common,
    )


FAMILY = replace(
    llama.FAMILY,
    architecture="Qwen3ForCausalLM",
    parse=_parse,
    layer={**llama.FAMILY.layer, **llama.QK_NORMS},
)
