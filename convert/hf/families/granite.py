"""Granite: Llama with factors on embeddings, attention scores, residual branches and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from zdc_jax.config import ModelConfig


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    config = llama.FAMILY.parse(raw, **common)
    layer = replace(config.layers[0], scale=raw.get("attention_multiplier", 1.0))
    return replace(
        config,
        layers=layer.repeated(config.num_layers),
        embed_scale=raw.get("embedding_multiplier", 1.0),
        residual_scale=raw.get("residual_multiplier", 1.0),
        logit_divisor=raw.get("logits_scaling", 1.0),
    )


def _export_settings(config: ModelConfig) -> dict[str, Any]:
    return llama.FAMILY.settings(config) | {
        "attention_multiplier": config.layers[0].scale or config.head_dim**-0.5,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


FAMILY = replace(llama.FAMILY, architecture="GraniteForCausalLM", parse=_parse, settings=_export_settings)
