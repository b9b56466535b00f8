"""Names and shapes of all parameters, shared by conversion, checkpoints and models.

Per layer (`layer_shapes`); `?` marks parameters that depend on the config:

    attention/{q,k,v}    [D, N|K|K, H]      attention/{q,k,v}_bias?  [N|K|K, H]
    attention/o          [N, H, D]          attention/o_bias?        [D]
    attention/{q,k}_norm? [H]
    mlp/gate?            [D, F]             mlp/{gate,up}_bias?      [F]
    mlp/up               [D, F]             mlp/down                 [F, D]      mlp/down_bias?  [D]
    attention_norm/scale [D]                attention_norm/bias?     [D]         mlp_norm likewise
    attention_output_norm?, mlp_output_norm? likewise (`sandwich` norms)

Outside the layers (`embedding_shapes`):

    tokens [V, E]   positions? [P, D]   project_in? [E, D]   project_out? [D, E]
    final_norm/scale? [D]   final_norm/bias? [D]   lm_head? [V, E] (absent when tied)
"""

import math
from typing import Any

import jax

from zdc_jax.config import ModelConfig

Shape = tuple[int, ...]


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, dict[str, Shape]]:
    """Return the shapes of one layer's parameters, nested as they are stored."""
    spec = config.layers[layer]
    D, F, H = config.embed_dim, config.ffn_dim, config.head_dim
    N, K = config.num_heads, config.num_kv_heads
    attention: dict[str, Shape] = {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}
    if config.qkv_bias:
        attention |= {"q_bias": (N, H), "k_bias": (K, H), "v_bias": (K, H)}
    if config.out_bias:
        attention["o_bias"] = (D,)
    if spec.qk_norm:
        attention |= {"q_norm": (H,), "k_norm": (H,)}
    mlp: dict[str, Shape] = {"up": (D, F), "down": (F, D)}
    if spec.mlp == "gated":
        mlp["gate"] = (D, F)
    if config.mlp_bias:
        mlp |= {f"{name}_bias": (F,) for name in mlp if name != "down"} | {"down_bias": (D,)}
    norms = ["attention_norm", "mlp_norm"]
    if spec.norms == "sandwich":
        norms += ["attention_output_norm", "mlp_output_norm"]
    return {"attention": attention, "mlp": mlp} | {name: _norm_shapes(config) for name in norms}


def embedding_shapes(config: ModelConfig) -> dict[str, Any]:
    """Return the shapes of the parameters outside the layers."""
    D, V = config.embed_dim, config.vocab_size
    E = config.token_embed_dim or D
    shapes: dict[str, Any] = {"tokens": (V, E)}
    if config.position_offset is not None:
        shapes["positions"] = (config.num_position_rows, D)
    if E != D:
        shapes |= {"project_in": (E, D), "project_out": (D, E)}
    if config.final_norm:
        shapes["final_norm"] = _norm_shapes(config)
    if not config.tie_embeddings:
        shapes["lm_head"] = (V, E)
    return shapes


def _norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    D = config.embed_dim
    return {"scale": (D,)} if config.norm == "rms" else {"scale": (D,), "bias": (D,)}


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def num_params(config: ModelConfig) -> int:
    """Count the parameters of the unmodified model."""

    def count(tree: Any) -> int:
        return sum(math.prod(shape) for shape in jax.tree.leaves(tree, is_leaf=is_shape))

    layers = sum(count(layer_shapes(config, layer)) for layer in range(config.num_layers))
    return layers + count(embedding_shapes(config))
