"""Llama: RMS norms, rotary positions, gated feed-forward. Most other families build on this one."""

from collections.abc import Mapping
from typing import Any

from convert.hf.families import Family
from convert.hf.settings import parse_activation, parse_flag, parse_rope
from zdc_jax.config import LayerSpec, ModelConfig


def parse_shared(raw: Mapping[str, Any], **own: Any) -> ModelConfig:
    """Parse the settings that Llama shares with related families.

    Args:
      raw: settings of config.json.
      **own: other fields of `ModelConfig`, and fields to override.
    """
    N, D = raw["num_attention_heads"], raw["hidden_size"]
    shared = {
        "norm": "rms",
        "embed_dim": D,
        "ffn_dim": raw["intermediate_size"],
        "vocab_size": raw["vocab_size"],
        "num_heads": N,
        "num_kv_heads": raw.get("num_key_value_heads") or N,
        "head_dim": raw.get("head_dim") or D // N,
        "max_positions": raw["max_position_embeddings"],
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": parse_activation(raw.get("hidden_act", "silu")),
        "tie_embeddings": parse_flag(raw, "tie_word_embeddings", False),
    }
    return ModelConfig(**(shared | own))


def parse_attention_biases(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Parse the flag that all biases of attention share."""
    return dict.fromkeys(("qkv_bias", "out_bias"), parse_flag(raw, "attention_bias", False))


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    return parse_shared(
        raw,
        layers=LayerSpec(rope=parse_rope(raw)).repeated(raw["num_hidden_layers"]),
        **parse_attention_biases(raw),
        mlp_bias=parse_flag(raw, "mlp_bias", False),
        **common,
    )


QK_NORMS = {"attention/q_norm": "self_attn.q_norm.weight", "attention/k_norm": "self_attn.k_norm.weight"}
"""Keys of the norms of q and k, for families that have them."""

FAMILY = Family(
    architecture="LlamaForCausalLM",
    parse=_parse,
    prefixes=("model.",),
    embeddings={
        "tokens": "embed_tokens.weight",
        "final_norm/scale": "norm.weight",
        "lm_head": "lm_head.weight",
    },
    layer={
        "attention_norm/scale": "input_layernorm.weight",
        "attention/q": "self_attn.q_proj.weight",
        "attention/k": "self_attn.k_proj.weight",
        "attention/v": "self_attn.v_proj.weight",
        "attention/o": "self_attn.o_proj.weight",
        "mlp_norm/scale": "post_attention_layernorm.weight",
        "mlp/gate": "mlp.gate_proj.weight",
        "mlp/up": "mlp.up_proj.weight",
        "mlp/down": "mlp.down_proj.weight",
    },
)
