"""Process that lowers launches for another one: `python -m kernels_pallas.lower_requests`.

It says that it is ready. Then it reads requests from its standard input, and writes a reply to each
(`kernels_pallas.lowering_processes`).
"""

import importlib
import os
import pickle
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas import tuning
from kernels_pallas.lowering import lower, serialize
from kernels_pallas.lowering_processes import Request


def main() -> None:
    """Write a reply to each request until standard input ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What is printed must not mix with replies.
    message: Any = "ready"
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            pickle.dump(message, replies)
            replies.flush()
            message = reply(pickle.load(requests))


def reply(request: Request) -> Any | None:
    """Lower and serialize a launch; return None if that fails."""
    tuning.lowered_for = request.device_kind
    with suppress(Exception), describe_device(request):
        launch = getattr(importlib.import_module(request.module), request.name)
        return serialize(lower(launch.jitted, *request.arguments, platform=request.platform))
    return None


def describe_device(request: Request) -> AbstractContextManager[Any]:
    """Return a context in which kernels are lowered for the GPU of a request."""
    if request.platform != "cuda":
        return nullcontext()
    device = AbstractDevice(device_kind=request.device_kind, num_cores=request.cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


if __name__ == "__main__":
    main()
