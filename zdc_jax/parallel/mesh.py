"""Device meshes, and the one table that says which axis of an array lies along which axis of a mesh."""

import math
from dataclasses import astuple, dataclass, fields
from typing import Self

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zdc_jax.errors import MeshError

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


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis: `data` divides the batch, `sequence` the tokens, `model` heads and F.

    Raises:
      MeshError: a size below 1.
    """

    data: int = 1
    sequence: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if (size := getattr(self, field.name)) < 1:
                raise MeshError(f"{field.name}={size} must be >= 1 device")

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


def spec(axes: str, among: tuple[str, ...] = (DATA, SEQUENCE, MODEL)) -> PartitionSpec:
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
