"""Qwen3: Qwen2 with norms of q and k instead of biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama, qwen2
from convert.hf.settings import flag, parse_rope
from zdc_jax.config import LayerSpec, ModelConfig


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    bias = flag(raw, "attention_bias", False)
    return llama.parse_alike(
        raw,
        layers=qwen2.layers(raw, LayerSpec(rope=parse_rope(raw), qk_norm=True)),
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        qkv_bias=bias,
        out_bias=bias,
        **common,
    )


def _settings(config: ModelConfig) -> dict[str, Any]:
    return llama.settings_alike(config) | qwen2.windows(config) | {"attention_bias": config.qkv_bias}


FAMILY = replace(
    llama.FAMILY,
    architecture="Qwen3ForCausalLM",
    parse=_parse,
    settings=_settings,
    layer={**llama.FAMILY.layer, **llama.QK_NORMS},
)
