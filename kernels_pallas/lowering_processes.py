"""Processes that lower launches beside this one (ours).

Lowering a Mosaic kernel takes seconds of Python, and one process lowers one kernel at a time. These processes
need no GPU: a request tells what to lower for. They run `kernels_pallas.lower_requests`.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A launch to lower.

    Attributes:
      device_kind: kind of GPU to lower for.
      cores: its number of multiprocessors.
      platform: JAX's platform to lower for.
      module: module of the launch.
      name: name of the launch there.
      arguments: further arguments of `kernels_pallas.lowering.lower`.
    """

    device_kind: str
    cores: int
    platform: str
    module: str
    name: str
    arguments: tuple[Any, ...]


class Processes:
    """Up to `most` processes. Each is started when it is first needed."""

    def __init__(self, most: int):
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        for _ in range(most):
            self._free.put(None)

    def ask(self, request: Request) -> Any | None:
        """Wait for a free process, and return its reply; None if it cannot lower the launch.

        Raises:
          CancelledError: the processes were ended meanwhile.
        """
        process = self._free.get()
        try:
            process = process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except Exception:  # It may be out of memory, or killed. The caller can lower the launch itself.
            if self._is_closed:
                raise CancelledError from None
            if process is not None:
                process.kill()
            process = None
            return None
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for process in self._started:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process that finds the modules of this one."""
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "kernels_pallas.lower_requests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._started.append(process)
        return process


current: Processes | None = None
"""Processes that lower launches now; None if this process lowers them."""


@contextmanager
def lower_in_processes(most: int) -> Iterator[None]:
    """Lower launches in up to `most` processes, which end with the context.

    Only programs that several threads lower gain by it. Without a process, with `most=0`, nothing changes.
    """
    global current
    if not most:
        yield
        return
    current = Processes(most)
    try:
        yield
    finally:
        current.close()
        current = None
