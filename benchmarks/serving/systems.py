"""Servers that the serving comparison starts: their command lines, and processes that end completely."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from benchmarks.serving.client import HOST, MODEL, get

Name = Literal["ours-16", "ours-plan", "vllm-16", "vllm-fp8"]
NAMES: tuple[Name, ...] = get_args(Name)
"""Systems to compare."""
LOG_LINES = 30
"""Last lines of a log that a result keeps."""
ENDING_SECONDS = 30.0
"""Time that a server has to end after SIGTERM."""
PAUSE_SECONDS = 0.1
"""Time between two looks at a server that starts or ends."""


@dataclass(frozen=True)
class Limits:
    """Limits that all systems share.

    Attributes:
      max_model_len: most tokens of a prompt and its answer.
      slots: most requests that run at once.
      memory: share of the GPU's memory for weights, cache and work space.
      queue: most requests that wait.
      dtype: dtype of weights and activations.
    """

    max_model_len: int
    slots: int
    memory: float
    queue: int
    dtype: str


@dataclass(frozen=True)
class System:
    """A server.

    Attributes:
      name: name in results.
      command: command line without the port.
      environment: variables in addition to those of this process.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def make_ours(name: str, model: Path, plan: str, limits: Limits) -> System:
    """Return `zdc serve` with a plan file or preset.

    It is the command `zdc`, which keeps compiled programs. JAX takes the share of memory at its start, before
    weights are loaded.
    """
    command = (
        *(sys.executable, "-m", "convert.cli.entry", "serve", str(model)),
        *("--name", MODEL, "--plan", plan, "--dtype", limits.dtype),
        *("--max-model-len", str(limits.max_model_len), "--max-sequences", str(limits.slots)),
        *("--max-waiting", str(limits.queue), "--no-access-log"),
    )
    return System(name, command, {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{limits.memory:g}"})


def make_vllm(name: str, model: Path, cache_dtype: str, limits: Limits, program: str) -> System:
    """Return `vllm serve` of vLLM 0.22.

    Prefix caching is on, as in `zdc serve`. A folder without weights is served with random ones.
    """
    command: tuple[str, ...] = (
        *(program, "serve", str(model), "--served-model-name", MODEL, "--dtype", limits.dtype),
        *("--max-model-len", str(limits.max_model_len), "--max-num-seqs", str(limits.slots)),
        *("--gpu-memory-utilization", f"{limits.memory:g}", "--kv-cache-dtype", cache_dtype),
        *("--enable-prefix-caching", "--disable-uvicorn-access-log", "--generation-config", "vllm"),
    )
    if not any(model.glob("*.safetensors")):
        command += ("--load-format", "dummy")
    if not any((model / file).exists() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        command += ("--skip-tokenizer-init",)
    return System(name, command, {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"})


def make_stub() -> System:
    """Return the server that answers at once, so that its times are those of the client."""
    return System("stub", (sys.executable, "-m", "benchmarks.serving.stub_server"))


class ServerFailed(Exception):
    """Server that did not start, or ended too early.

    Attributes:
      log: last lines of its log.
    """

    def __init__(self, reason: str, log: list[str]):
        super().__init__(reason)
        self.log = log


class ServerProcess:
    """Process of a server and all its children, which share one session.

    Attributes:
      port: port of the server.
    """

    def __init__(self, system: System, log: Path):
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self._log = log
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    [*system.command, "--port", str(self.port)],
                    env=os.environ | system.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"cannot start {system.command[0]}: {error}", []) from error

    def check(self) -> None:
        """Raise `ServerFailed` if the server has ended."""
        if (status := self._process.poll()) is not None:
            raise self._fail(f"the server ended with status {status}")

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers; raise `ServerFailed` if it ends before, or after `seconds`."""
        until = time.monotonic() + seconds
        while asyncio.run(get(self.port, "/health"))[0] != 200:
            self.check()
            if time.monotonic() > until:
                raise self._fail(f"the server did not answer within {seconds:g} s")
            time.sleep(PAUSE_SECONDS)

    def end(self) -> None:
        """End the server and all its children, and wait until they are gone.

        A child that outlives the server, such as vLLM's EngineCore, would keep the memory of the GPU.
        """
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        while members := list_session(self._process.pid):
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            self._process.poll()  # A process that ended stays a member until its parent reads its status.
            time.sleep(PAUSE_SECONDS)
        self._process.wait()

    def read_log(self) -> list[str]:
        """Return the last lines of the log."""
        return self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]

    def _fail(self, reason: str) -> ServerFailed:
        return ServerFailed(reason, self.read_log())


@contextmanager
def run_server(system: System, start_seconds: float) -> Iterator[ServerProcess]:
    """Yield a server that answers requests, and end it afterwards.

    Raises:
      ServerFailed: the server does not start, or does not answer within `start_seconds`.
    """
    with TemporaryDirectory() as folder:
        server = ServerProcess(system, Path(folder) / "log")
        try:
            server.wait_until_ready(start_seconds)
            yield server
        finally:
            server.end()


def list_session(session: int) -> list[int]:
    """Return ids of the running processes of a session, read from /proc."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # The process has ended.
            # Fields after the name in brackets: state, parent, process group, session.
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state not in "ZX":
                members.append(int(path.parent.name))
    return members
