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


FAMILY = replace(llama.FAMILY, architecture="GraniteForCausalLM", parse=_parse)
