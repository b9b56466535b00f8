"""Weights of a layer on a mesh: whole, or divided by head and feed-forward column (tensor parallelism).

What that leaves whole along `data` and `sequence` may be divided once more and gathered layer by layer.
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
"""Axes of the weights that can be divided; all others are vectors, of D or of H."""
_ALONG_D = frozenset(name for name, axes in _AXES.items() if "D" in axes.split())

WeightPlacement = Literal["replicated", "gathered"]
WEIGHT_PLACEMENTS: tuple[WeightPlacement, ...] = get_args(WeightPlacement)
"""`replicated`: each device holds all weights of its share along `model`. `gathered`: the devices along
`data` and `sequence` together hold the matrices once, divided along D, and each layer begins with an
all-gather of its own, as in FSDP and ZeRO-3 (Rajbhandari et al., 2020)."""
GATHERED_OVER = (DATA, SEQUENCE)


def weight_specs(block: Block, among: tuple[str, ...], weights: WeightPlacement = "replicated") -> Block:
    """How each weight of a layer is divided over the mesh axes `among`; a tree of the layer's own form."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _spec(path, among, weights), block)


def whole_weights(block: Block, weights: WeightPlacement) -> Block:
    """A layer with the matrices of `gathered` whole again, from all devices' shares: in `jax.shard_map`."""
    if weights == "replicated":
        return block

    def gather(path: Any, weight: Array) -> Array:
        if _name(path) not in _ALONG_D:
            return weight
        axis = _axes(path).split().index("D")
        return moved(partial(jax.lax.all_gather, axis_name=GATHERED_OVER, axis=axis, tiled=True), weight)

    return jax.tree_util.tree_map_with_path(gather, block)


def gathered_bytes(block: Block, mesh: Mesh) -> int:
    """Bytes that leave a device when a layer that lies as `gathered` is gathered once, by rings."""
    flat, _ = jax.tree_util.tree_flatten_with_path(block)
    shares = [x.addressable_shards[0].data.nbytes for path, x in flat if _name(path) in _ALONG_D]
    return sum(shares) * (degree(mesh, GATHERED_OVER) - 1)


def placed(
    block: Block, mesh: Mesh, among: tuple[str, ...], weights: WeightPlacement = "replicated"
) -> Block:
    """A layer with its heads and feed-forward columns divided over the mesh axes `among`.

    On other axes it is as `weights` says. KV heads are repeated (`kv_copies`) where the devices of `among` do
    not divide them. Weights are numpy's, of which a device gets its share only, or on devices already.
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
    """Every array of a tree, numpy's or on devices, on every device."""
    return jax.tree.map(lambda x: _put(x, whole_on(mesh)), tree)


def _put(x: Array | np.ndarray, sharding: NamedSharding) -> Array:
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    # Of several processes each reads the same files: that they agree is not checked with every array.
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
    """Of a weight in `_AXES`; empty for others."""
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return next((name for name in names if name in _AXES), "")
