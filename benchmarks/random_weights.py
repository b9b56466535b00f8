"""Random weights in a model's shape, for benchmarks and tests."""

from typing import Any

import jax
import jax.numpy as jnp

from zdc_jax.config import ModelConfig
from zdc_jax.model.params import Shape, embedding_shapes, is_shape, layer_shapes


def random_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Create random parameters `{"embeddings": …, "layers": [...]}` in `config.dtype`.

    Matrices are N(0, 0.02²), as in GPT-2. The two matrices that write to the residual stream are also scaled
    by 1/√(2L). Norm scales are 1 and biases are 0.
    """
    return {
        "embeddings": random_tree(embedding_shapes(config), config, jax.random.fold_in(key, 0)),
        "layers": [
            random_tree(layer_shapes(config, i), config, jax.random.fold_in(key, 1 + i))
            for i in range(config.num_layers)
        ],
    }


def random_tree(shapes: Any, config: ModelConfig, key: jax.Array) -> Any:
    """Create random parameters for `layer_shapes` or `embedding_shapes`, as in `random_params`."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_shape)
    leaves = [
        _random_leaf(path[-1].key, shape, config, jax.random.fold_in(key, i))
        for i, (path, shape) in enumerate(flat)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _random_leaf(name: str, shape: Shape, config: ModelConfig, key: jax.Array) -> jax.Array:
    dtype = jnp.dtype(config.dtype)
    if name in ("scale", "q_norm", "k_norm"):
        return jnp.full(shape, 1 - config.norm_offset, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    std = 0.02 / (2 * config.num_layers) ** 0.5 if name in ("o", "down") else 0.02
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
