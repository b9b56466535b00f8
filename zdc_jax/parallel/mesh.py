"""Device meshes, and the one table that says which axis of an array lies along which axis of a mesh."""

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
"""Axis letter (`zdc_jax.axes`) → mesh axes that divide it, major first; other letters are not divided.

Tokens of a prompt lie along `sequence`. What is divided by head (or by F), the cache and the weights of
decode, lies along `model` and `sequence` together: the order in which a prefill's exchange leaves its heads.
"""
BY_TOKEN, BY_HEAD = (MODEL,), (MODEL, SEQUENCE)
"""Mesh axes that divide the weights for prompts, whose tokens lie along `sequence`, and for single tokens."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis: `data` divides the batch, `sequence` the tokens, `model` heads and F.

    Raises:
      MeshError: a size that is not a whole number above 0.
    """

    data: int = 1
    sequence: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(size := getattr(self, field.name)) is not int or size < 1:
                raise MeshError(f"{field.name}={size} must be a whole number >= 1 of devices")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`data=1,sequence=4,model=2`; axes that are not named have 1 device. Raises `MeshError`."""
        allowed = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for item in text.split(","):
            name, _, size = (part.strip() for part in item.partition("="))
            if name not in allowed or name in sizes or not size.isdecimal():
                raise MeshError(
                    f"mesh={text!r}: {item!r} must be AXIS=SIZE, each axis of {allowed} at most once"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.data * self.sequence * self.model

    def create(self) -> Mesh:
        """The mesh on the first devices, neighbours along `sequence` as near as `jax.make_mesh` finds them.

        Raises:
          MeshError: there are fewer devices than `size`; or more, and those of several processes.
        """
        if self.size > (count := jax.device_count()):
            raise MeshError(f"{self} needs {self.size} devices, there are {count}")
        if self.size < count and jax.process_count() > 1:
            raise MeshError(f"{self} has {self.size} devices; {jax.process_count()} processes have {count}")
        names = tuple(field.name for field in fields(self))
        devices = jax.devices()[: self.size]
        return jax.make_mesh(astuple(self), names, (AxisType.Auto,) * len(names), devices=devices)


def layout(axes: str, among: tuple[str, ...] = (DATA, SEQUENCE, MODEL)) -> PartitionSpec:
    """How an array with these axes, such as `B T D`, is divided over the mesh axes `among`.

    Axes that are not in the table (or `1`) are whole.
    """
    names = [tuple(name for name in MESH_AXES.get(axis, ()) if name in among) for axis in axes.split()]
    return PartitionSpec(*(name or None for name in names))


def whole_on(mesh: Mesh) -> NamedSharding:
    """Of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def degree(mesh: Mesh, among: tuple[str, ...]) -> int:
    """Devices along these axes together."""
    return math.prod(mesh.shape[name] for name in among)


def on_mesh(mesh: Mesh, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` on each device's share of the arguments."""
    # Replication is not checked: kernels do not say along which axes their results vary.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def positions_of(x: Array) -> Int[Array, "B t"]:
    """Of this device's tokens, for x [B, t, ...]; inside `on_mesh`."""
    B, t = x.shape[:2]
    return jnp.broadcast_to(jax.lax.axis_index(SEQUENCE) * t + jnp.arange(t), (B, t))


def sum_over(mesh: Mesh, among: tuple[str, ...]) -> Reduce:
    """Over the devices that share each product of a layer, those of the mesh axes `among`."""
    return skip_reduction if degree(mesh, among) == 1 else partial(jax.lax.psum, axis_name=among)
