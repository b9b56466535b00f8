"""Processes that lower launches while this one goes on (ours).

Lowering a Mosaic kernel takes seconds of Python, and one process lowers one kernel at a time. These processes
need no GPU: a request tells what to lower for. They run `kernels_pallas.lower_requests`.
"""

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

MOST = 8
"""Most processes. There are at most half as many as CPU cores."""
LEAST_WAITING = 4
"""Waiting requests from which processes are started. One takes as long to start as a launch to lower."""
IDLE_SECONDS = 30.0
"""Seconds after which a process without requests ends."""


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
    """Up to `most` processes, each with a thread that waits for it."""

    def __init__(self, most: int):
        self.most, self._changed = most, threading.Condition()
        self._waiting: dict[Future[Any], Request] = {}
        self._threads: set[threading.Thread] = set()
        self._ready = 0  # Processes that have started.

    def submit(self, request: Request) -> Future[Any]:
        """Ask for a launch to be lowered. `take` returns the reply."""
        future: Future[Any] = Future()
        with self._changed:
            self._waiting[future] = request
            if len(self._waiting) >= LEAST_WAITING and len(self._threads) < self.most:
                # A daemon, so that Ctrl-C ends this process at once. The others then end, too.
                thread = threading.Thread(target=self._serve, daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify()
        return future

    def take(self, future: Future[Any]) -> Any | None:
        """Wait for the reply to a request.

        Returns:
          The lowered launch. It is None if a process failed, or if none has started yet, in which case the
          request is withdrawn: then it is faster not to wait.
        """
        with self._changed:
            if not self._ready and future in self._waiting:
                del self._waiting[future]
                return None
        return future.result()

    def _serve(self) -> None:
        """Send requests to one process until none came for some time."""
        process = self._begin()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_SECONDS):
                    self._end(process)
                    self._threads.remove(threading.current_thread())
                    return
                future = next(iter(self._waiting))
                request = self._waiting.pop(future)
            process = process or self._begin()
            try:
                future.set_result(process and _ask(process, request))
            except Exception:  # It may be out of memory, or killed. Who waits can lower the launch itself.
                future.set_result(None)
                self._end(process)
                process = None

    def _begin(self) -> subprocess.Popen[bytes] | None:
        """Start a process; return None if that fails."""
        try:
            process = _start()
        except Exception:
            return None
        with self._changed:
            self._ready += 1
        return process

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            with self._changed:
                self._ready -= 1
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    """Start a process that finds the modules of this one, and wait until it is ready."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "kernels_pallas.lower_requests"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    try:
        pickle.load(process.stdout)
    except Exception:
        process.kill()
        process.communicate()
        raise
    return process


def _ask(process: subprocess.Popen[bytes], request: Request) -> Any:
    """Send a request to a process, and wait for the reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


processes = Processes(min(MOST, (os.cpu_count() or 1) // 2))
"""Those of this process."""
