"""Abstract GPU for kernels whose lowering asks the device."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def on_abstract_h200() -> AbstractContextManager[Any]:
    """Return a context in which the device is an H200."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=_H200))
