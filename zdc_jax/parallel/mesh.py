"""Device meshes, and the table that maps array axes to mesh axes."""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from zdc_jax.axes import Array
from zdc_jax.errors import MeshError
from zdc_jax.model.layers import Reduce, skip_reduction

DATA, SEQUENCE, MODEL = "data", "sequence", "model"
MESH_AXES: dict[str, tuple[str, ...]] = {
    "B": (DATA,),
    "T": (SEQUENCE,),
    "N": (MODEL, SEQUENCE),
    "K": (MODEL, SEQUENCE),
    "F": (MODEL, SEQUENCE),
}
"""Mesh axes that divide each array axis (letters of `zdc_jax.axes`), major first; other axes are not divided.

Prompt tokens lie along `sequence`. Heads and F lie along `model` and then `sequence`, in caches and in decode
weights: a prefill's exchange leaves its heads in this order.
"""
BY_TOKEN, BY_HEAD = (MODEL,), (MODEL, SEQUENCE)
"""Mesh axes that divide prefill weights (tokens lie along `sequence`) and decode weights."""


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis.

    Attributes:
      data: devices that divide the batch.
      sequence: devices that divide prompt tokens.
      model: devices that divide heads and F.

    Raises:
      MeshError: a size is not an integer >= 1.
    """

    data: int = 1
    sequence: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(size := getattr(self, field.name)) is not int or size < 1:
                raise MeshError(f"{field.name}={size}: must be a number of devices, an integer >= 1")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a mesh such as `data=1,sequence=4,model=2`; omitted axes have one device.

        Raises:
          MeshError: the text is malformed.
        """
        allowed = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for item in text.split(","):
            name, _, size = (part.strip() for part in item.partition("="))
            if name not in allowed or name in sizes or not size.isdecimal() or not int(size):
                raise MeshError(
                    f"mesh={text!r}: {item!r} is not AXIS=SIZE; allowed axes are {allowed}, each at most "
                    "once, and sizes from 1"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def size(self) -> int:
        """Total number of devices."""
        return self.data * self.sequence * self.model

    def check_devices(self) -> None:
        """Raise `MeshError` if there are fewer devices than `size`, or several processes have more."""
        if self.size > (count := jax.device_count()):
            raise MeshError(f"mesh={self}: needs {self.size} devices, there are {count}; use smaller axes")
        if self.size < count and jax.process_count() > 1:
            raise MeshError(
                f"mesh={self}: uses {self.size} of the {count} devices of {jax.process_count()} processes; "
                "must use all of them"
            )

    def create(self) -> Mesh:
        """Create the mesh on the first devices, with neighbours along `sequence` as close as possible.

        Raises:
          MeshError: as in `check_devices`.
        """
        self.check_devices()
        names = tuple(field.name for field in fields(self))
        devices = jax.devices()[: self.size]
        return jax.make_mesh(astuple(self), names, (AxisType.Auto,) * len(names), devices=devices)


def layout(axes: str, among: tuple[str, ...] = (DATA, SEQUENCE, MODEL)) -> PartitionSpec:
    """Return how an array with these axes, such as `B T D`, is divided over the mesh axes `among`.

    Axes that are not in `MESH_AXES`, such as `1`, are not divided.
    """
    names = [tuple(name for name in MESH_AXES.get(axis, ()) if name in among) for axis in axes.split()]
    return PartitionSpec(*(name or None for name in names))


def whole_on(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def degree(mesh: Mesh, among: tuple[str, ...]) -> int:
    """Return the number of devices along the mesh axes `among` together."""
    return math.prod(mesh.shape[name] for name in among)


def on_mesh(mesh: Mesh, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Wrap `local`, a function of each device's shards, as a function of whole arrays."""
    # Replication is not checked: kernels do not declare along which axes their results vary.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def positions_of(x: Array) -> Int[Array, "B t"]:
    """Return the positions of this device's tokens, for x [B, t, ...]; inside `on_mesh`."""
    B, t = x.shape[:2]
    return jnp.broadcast_to(jax.lax.axis_index(SEQUENCE) * t + jnp.arange(t), (B, t))


def sum_over(mesh: Mesh, among: tuple[str, ...]) -> Reduce:
    """Return the `Reduce` over the mesh axes `among`, whose devices share each product of a layer."""
    return skip_reduction if degree(mesh, among) == 1 else partial(jax.lax.psum, axis_name=among)
