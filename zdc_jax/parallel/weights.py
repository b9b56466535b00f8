"""Weights of a layer on a mesh: replicated, or divided by head and feed-forward column (tensor parallelism).

Weights that tensor parallelism replicates along `data` and `sequence` can be divided further and gathered
layer by layer.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zdc_jax.axes import Array
from zdc_jax.model.block import Block
from zdc_jax.parallel.exchange import kv_copies, moved
from zdc_jax.parallel.mesh import DATA, SEQUENCE, degree, layout, whole_on

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
    "k_mean": "K H",
    "k_block_means": "K blocks R",
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
"""Axes of the weights that can be divided; all other weights are vectors of D or of H."""
_ALONG_D = frozenset(name for name, axes in _AXES.items() if "D" in axes.split())

WeightPlacement = Literal["replicated", "gathered"]
WEIGHT_PLACEMENTS: tuple[WeightPlacement, ...] = get_args(WeightPlacement)
"""Placements of prefill weights.

`replicated`: each device stores all weights of its share along `model`. `gathered`: the devices along `data`
and `sequence` store the matrices once, divided along D. Each layer then begins with an all-gather, as in FSDP
and ZeRO-3 (Rajbhandari et al., 2020).
"""
GATHERED_OVER = (DATA, SEQUENCE)


def weight_specs(block: Block, among: tuple[str, ...], weights: WeightPlacement = "replicated") -> Block:
    """Return how each weight of a layer is divided over the mesh axes `among`, as a tree like the layer."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _spec(path, among, weights), block)


def whole_weights(block: Block, weights: WeightPlacement) -> Block:
    """Gather the matrices of a layer placed as `gathered`; inside `jax.shard_map`."""
    if weights == "replicated":
        return block

    def gather(path: Any, weight: Array) -> Array:
        if _name(path) not in _ALONG_D:
            return weight
        axis = _axes(path).split().index("D")
        return moved(partial(jax.lax.all_gather, axis_name=GATHERED_OVER, axis=axis, tiled=True), weight)

    return jax.tree_util.tree_map_with_path(gather, block)


def gathered_bytes(block: Block, mesh: Mesh) -> int:
    """Return the bytes that leave a device when a `gathered` layer is gathered once, by ring algorithms."""
    flat, _ = jax.tree_util.tree_flatten_with_path(block)
    shares = [x.addressable_shards[0].data.nbytes for path, x in flat if _name(path) in _ALONG_D]
    return sum(shares) * (degree(mesh, GATHERED_OVER) - 1)


def placed(
    block: Block, mesh: Mesh, among: tuple[str, ...], weights: WeightPlacement = "replicated"
) -> Block:
    """Put a layer on the mesh, its heads and feed-forward columns divided over the mesh axes `among`.

    `weights` decides the placement along other axes. KV heads are repeated (`kv_copies`) if the devices do
    not divide them. Weights may be NumPy arrays, of which a device reads only its share, or on devices
    already.
    """

    def put(path: Any, weight: Array | np.ndarray) -> Array:
        axes = _axes(path)
        if "K" in axes.split():
            axis = axes.split().index("K")
            copies = kv_copies(weight.shape[axis], degree(mesh, among))
            repeat = jnp.repeat if isinstance(weight, jax.Array) else np.repeat
            weight = weight if copies == 1 else repeat(weight, copies, axis=axis)
        return _put(weight, NamedSharding(mesh, _spec(path, among, weights)))

    return jax.tree_util.tree_map_with_path(put, block)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Put every array of a tree on every device."""
    return jax.tree.map(lambda x: _put(x, whole_on(mesh)), tree)


def _put(x: Array | np.ndarray, sharding: NamedSharding) -> Array:
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    # All processes read the same files, so do not verify that every array agrees across processes.
    return jax.make_array_from_callback(x.shape, sharding, lambda share: x[share])


def _spec(path: Any, among: tuple[str, ...], weights: WeightPlacement) -> PartitionSpec:
    axes = _axes(path)
    parts = layout(axes, among)
    if weights == "replicated" or _name(path) not in _ALONG_D:
        return parts
    divided = zip(axes.split(), parts, strict=True)
    return PartitionSpec(*(GATHERED_OVER if axis == "D" else part for axis, part in divided))


def _axes(path: Any) -> str:
    return _AXES.get(_name(path), "D")


def _name(path: Any) -> str:
    """Return the name of a weight in `_AXES`, or an empty string for other weights."""
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return next((name for name in names if name in _AXES), "")
