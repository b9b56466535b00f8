"""OPT: layer norms with biases, learned positions, plain feed-forward."""

from collections.abc import Mapping
from typing import Any

from convert.hf.families import Family
from convert.hf.settings import parse_activation, parse_flag
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.errors import ConversionError

POSITION_OFFSET = 2
"""Rows at the start of the position table that no token uses."""


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    if not parse_flag(raw, "layer_norm_elementwise_affine", True):
        raise ConversionError("layer_norm_elementwise_affine=False is not supported; only True is")
    N, D = raw["num_attention_heads"], raw["hidden_size"]
    pre_norm = parse_flag(raw, "do_layer_norm_before", True)
    bias = parse_flag(raw, "enable_bias", True)
    token_dim = raw.get("word_embed_proj_dim") or D
    layer = LayerSpec(norms="pre" if pre_norm else "post", mlp="plain")
    return ModelConfig(
        layers=layer.repeated(raw["num_hidden_layers"]),
        norm="layer",
        embed_dim=D,
        ffn_dim=raw["ffn_dim"],
        vocab_size=raw["vocab_size"],
        num_heads=N,
        num_kv_heads=N,
        head_dim=D // N,
        max_positions=raw["max_position_embeddings"],
        norm_eps=1e-5,
        activation=parse_activation(raw.get("activation_function", "relu")),
        tie_embeddings=parse_flag(raw, "tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=POSITION_OFFSET,
        final_norm=pre_norm and not parse_flag(raw, "_remove_final_layer_norm", False),
        token_embed_dim=None if token_dim == D else token_dim,
        **common,
    )


FAMILY = Family(
    architecture="OPTForCausalLM",
    parse=_parse,
    prefixes=("model.decoder.", "decoder."),  # Published checkpoints use either prefix.
    embeddings={
        "tokens": "embed_tokens.weight",
        "positions": "embed_positions.weight",
        "project_in": "project_in.weight",
        "project_out": "project_out.weight",
        "final_norm/scale": "final_layer_norm.weight",
        "final_norm/bias": "final_layer_norm.bias",
        "lm_head": "lm_head.weight",
    },
    layer={
        "attention_norm/scale": "self_attn_layer_norm.weight",
        "attention_norm/bias": "self_attn_layer_norm.bias",
        "attention/q": "self_attn.q_proj.weight",
        "attention/k": "self_attn.k_proj.weight",
        "attention/v": "self_attn.v_proj.weight",
        "attention/o": "self_attn.out_proj.weight",
        "mlp_norm/scale": "final_layer_norm.weight",
        "mlp_norm/bias": "final_layer_norm.bias",
        "mlp/up": "fc1.weight",
        "mlp/down": "fc2.weight",
    },
)
