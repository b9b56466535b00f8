"""Weights of a layer on a mesh: whole, or divided by head and feed-forward column (tensor parallelism)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zdc_jax.axes import Array
from zdc_jax.model.block import Block
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.mesh import degree, spec, whole_on

_AXES = {
    "q": "D N H",
    "q_bias": "N H",
    "k": "D K H",
    "k_bias": "K H",
    "v": "D K H",
    "v_bias": "K H",
    "o": "N H D",
    "q_rotation": "K H R",
    "k_rotation": "K H R",
    "k_shift": "K R",
    "frequencies": "K R",
    "q_scale": "K R",
    "k_scale": "K R",
    "v_scale": "K R",
    "gate": "D F",
    "gate_bias": "F",
    "up": "D F",
    "up_bias": "F",
    "down": "F D",
}
"""Axes of the weights that can be divided; all others are vectors of D."""


def weight_specs(block: Block, among: tuple[str, ...]) -> Block:
    """How each weight of a layer is divided over the mesh axes `among`; a tree of the layer's own form."""
    return jax.tree_util.tree_map_with_path(lambda path, _: spec(_axes(path), among), block)


def placed(block: Block, mesh: Mesh, among: tuple[str, ...]) -> Block:
    """A layer with its heads and feed-forward columns divided over the mesh axes `among`, whole on others.

    KV heads are repeated (`kv_copies`) where the devices of `among` do not divide them. Weights are numpy's,
    of which a device gets its share only, or on devices already.
    """

    def put(path: Any, weight: Array | np.ndarray) -> Array:
        axes = _axes(path)
        if "K" in axes.split():
            axis = axes.split().index("K")
            copies = kv_copies(weight.shape[axis], degree(mesh, among))
            repeat = jnp.repeat if isinstance(weight, jax.Array) else np.repeat
            weight = weight if copies == 1 else repeat(weight, copies, axis=axis)
        return _put(weight, NamedSharding(mesh, spec(axes, among)))

    return jax.tree_util.tree_map_with_path(put, block)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Every array of a tree, numpy's or on devices, on every device."""
    return jax.tree.map(lambda x: _put(x, whole_on(mesh)), tree)


def _put(x: Array | np.ndarray, sharding: NamedSharding) -> Array:
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    # Of several processes each reads the same files: that they agree is not checked with every array.
    return jax.make_array_from_callback(x.shape, sharding, lambda share: x[share])


def _axes(path: Any) -> str:
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return next((_AXES[name] for name in names if name in _AXES), "D")
