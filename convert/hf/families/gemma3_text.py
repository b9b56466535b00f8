"""Gemma 3, text only: norms before and after each half of a layer, norms of q and k, two rotary settings.

Norms scale by 1 + w. Embeddings are multiplied by √D. Sliding layers have rotary settings of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from convert.hf.settings import (
    FULL,
    SLIDING,
    add_windows,
    parse_activation,
    parse_flag,
    parse_rope,
)
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.errors import ConversionError

THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _parse_ropes(raw: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary settings by type of layer; `rope_scaling` of the old form is of full layers only."""
    rest = {name: value for name, value in raw.items() if name not in ("rope_scaling", "rope_theta")}
    new = raw.get("rope_parameters") or {}
    if new and not new.keys() & THETA.keys():
        raise ConversionError(
            f"rope_parameters={new!r:.80} must have entries by type of layer, {list(THETA)}"
        )
    old = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    by_type = {kind: {"rope_theta": raw.get(old[kind], THETA[kind]), **(new.get(kind) or {})} for kind in old}
    by_type[FULL] |= raw.get("rope_scaling") or {}
    return {kind: parse_rope({**rest, "rope_parameters": value}) for kind, value in by_type.items()}


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    for name in UNSUPPORTED:
        if raw.get(name):
            raise ConversionError(f"{name}={raw[name]!r:.80} is not supported in Gemma 3; only null is")
    rope = _parse_ropes(raw)
    layer = LayerSpec(qk_norm=True, norms="sandwich", scale=raw.get("query_pre_attn_scalar", 256) ** -0.5)
    repeated = layer.repeated(raw["num_hidden_layers"])
    pattern = raw.get("sliding_window_pattern", 6)
    layers = add_windows(repeated, raw, lambda index: (index + 1) % pattern > 0)
    return llama.parse_shared(
        raw,
        layers=tuple(replace(each, rope=rope[SLIDING if each.window else FULL]) for each in layers),
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        activation=parse_activation(raw.get("hidden_activation", "gelu_pytorch_tanh")),
        tie_embeddings=parse_flag(raw, "tie_word_embeddings", True),
        norm_offset=1.0,
        embed_scale=raw["hidden_size"] ** 0.5,
        **llama.parse_attention_biases(raw),
        **common,
    )


FAMILY = replace(
    llama.FAMILY,
    architecture="Gemma3ForCausalLM",
    parse=_parse,
    layer={
        **llama.FAMILY.layer,
        **llama.QK_NORMS,
        "attention_output_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_output_norm/scale": "post_feedforward_layernorm.weight",
    },
)
