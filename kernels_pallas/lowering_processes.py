"""Processes that lower launches while this one goes on (ours).

Lowering a Mosaic kernel takes seconds of Python, and one process lowers one kernel at a time. These processes
need no GPU: a request tells what to lower for. They run `kernels_pallas.lower_requests`.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

MOST = 8
"""Most processes. There are at most half as many as CPU cores."""
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
        self.most, self._lock = most, threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._waiting: queue.SimpleQueue[tuple[Request, Future[Any]]] = queue.SimpleQueue()

    def submit(self, request: Request) -> Future[Any]:
        """Let a process lower a launch. The result is its reply; None if it could not lower the launch."""
        future: Future[Any] = Future()
        self._waiting.put((request, future))
        with self._lock:
            if len(self._threads) < self.most:
                # A daemon, so that Ctrl-C ends this process at once. The others then end, too.
                thread = threading.Thread(target=self._serve, daemon=True)
                self._threads.add(thread)
                thread.start()
        return future

    def wait(self) -> None:
        """Wait until all processes have ended."""
        for thread in list(self._threads):
            thread.join()

    def _serve(self) -> None:
        """Send requests to one process until none came for some time."""
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                request, future = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        _end(process)
                        self._threads.remove(threading.current_thread())
                        return
                continue
            try:
                process = process or _start()
                future.set_result(_ask(process, request))
            except Exception:  # It may be out of memory, or killed. Who waits can lower the launch itself.
                future.set_result(None)
                _end(process)
                process = None


def _start() -> subprocess.Popen[bytes]:
    """Start a process that finds the modules of this one."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "kernels_pallas.lower_requests"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )


def _ask(process: subprocess.Popen[bytes], request: Request) -> Any:
    """Send a request to a process, and wait for the reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.communicate()


processes = Processes(min(MOST, (os.cpu_count() or 1) // 2))
"""Those of this process."""
