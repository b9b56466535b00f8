"""`zdc serve`: an HTTP server with OpenAI's API."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

from convert.cli.flags import (
    DtypeFlag,
    MaxPositionsFlag,
    ModelFolder,
    PlanFlag,
    call_with_flags,
    show_default,
)
from convert.cli.http_flags import HttpFlags
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.errors import PromptError
from zdc_jax.generation.grammar import warm_up
from zdc_jax.loading import TextSide, load
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan
from zdc_jax.server.http_settings import HttpSettings

logger = logging.getLogger("zdc_jax.server")

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")
"""Packages of the extra `serve`."""


@dataclass
class Serve:
    """Serve a model over HTTP with OpenAI's API: completions, chat completions and metrics.

    If the environment variable ZDC_API_KEY is set, clients must send its value as their API key.

    Attributes:
      path: Converted folder.
      name: Model name that clients send. Repeat the flag for further names.
      max_sequences: Most requests to run at once.
      max_model_len: Most tokens in a prompt and its answer together.
      cache_tokens: Tokens that the KV cache has room for. Not for methods that evict tokens, such as h2o, nor
        for plans with token classes.
      chunk: Prompt tokens to read in one step while other requests run, a power of two. A large chunk delays
        their tokens.
      decode_steps: Tokens per request that one program decodes while no request waits and no prompt is read.
        Values above 1 are faster, and send tokens in bursts.
      max_waiting: Longest request queue. Further requests get HTTP 429.
      replicas: Engines to run on this machine, each on its own GPU if there are any. Requests survive the
        loss of an engine. Needs the extra `ray`.
      drain_seconds: Seconds that running requests get to finish when the server is stopped.
      mesh: Devices to use, such as sequence=2,model=4. Long prompts are divided over both axes, all other
        work by heads.
      dtype: Dtype to run in.
      max_positions: Longest context in tokens. More than the config has needs yarn or dynamic rotary scaling.
      reproducible: Give a request the same answer whatever else runs and whatever is cached. Slow.
    """

    path: ModelFolder
    flags: Annotated[PlanFlag, tyro.conf.arg(name="")] = field(default_factory=PlanFlag)
    http: Annotated[HttpFlags, tyro.conf.arg(name="")] = field(default_factory=HttpFlags)
    name: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, show_default("name of the folder")] = ()
    max_sequences: int = 8
    max_model_len: Annotated[int | None, show_default("the model's positions")] = None
    cache_tokens: Annotated[int | None, show_default("room for all requests, or what fits")] = None
    chunk: Annotated[int | None, show_default("2,048 to 8,192 on GPUs, by the model; else 512")] = None
    decode_steps: Annotated[int | None, show_default("2 or 4 on GPUs, 4 on a mesh, else 1")] = None
    max_waiting: int = 256
    replicas: Annotated[int | None, show_default("one engine in this process")] = None
    drain_seconds: float = 30.0
    mesh: Annotated[str | None, show_default("one device")] = None
    dtype: DtypeFlag = None
    max_positions: MaxPositionsFlag = None
    reproducible: bool = False

    def run(self, console: Console) -> None:
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            raise PromptError(f"zdc serve needs {', '.join(missing)}; run: pip install 'zdc-jax[serve]'")
        from zdc_jax.server.api_keys import collect_keys

        self._check()
        http, keys = self.http.build(), collect_keys(self.http.api_key_file)
        config = call_with_flags(EngineConfig, self)
        _log_with_times()
        plan = self.flags.build(self.path)
        positions = self.max_positions or Checkpoint.open(self.path).config.max_positions
        config.served_length(positions)
        names = self.name or (self.path.resolve().name,)
        if self.replicas is None:
            self._serve_alone(config, plan, names, http, keys)
        else:
            self._serve_replicas(self.replicas, config, plan, names, http)

    def _serve_alone(
        self,
        config: EngineConfig,
        plan: CompressionPlan | None,
        names: tuple[str, ...],
        http: HttpSettings,
        keys: Sequence[str],
    ) -> None:
        # What costs nothing is checked before the GPU reserves memory.
        http.check_files_and_address()
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh)
        _begin(_start_device)
        if mesh is not None:
            mesh.check_devices()
        from zdc_jax.server.run import serve

        side = TextSide.load(self.path, self.max_positions)
        _begin(warm_up, side)
        logger.info("loading %s with plan %s", self.path, self.flags.plan or ("small" if plan else "none"))
        model = call_with_flags(load, self, plan=plan, mesh=mesh)
        with Engine(model, config) as engine:
            serve(
                engine,
                name=names[0],
                aliases=names[1:],
                api_keys=keys,
                settings=http,
                drain_seconds=self.drain_seconds,
            )

    def _serve_replicas(
        self,
        replicas: int,
        config: EngineConfig,
        plan: CompressionPlan | None,
        names: tuple[str, ...],
        http: HttpSettings,
    ) -> None:
        if self.mesh is not None:
            raise PromptError(
                f"--mesh {self.mesh}: not with --replicas {replicas}, as each has one device; drop one flag"
            )
        self.http.check_replicas(replicas)
        if find_spec("ray") is None:
            raise PromptError(f"--replicas {replicas}: needs ray; run: pip install 'zdc-jax[ray]'")
        from zdc_jax.replicas.run import serve_replicas
        from zdc_jax.replicas.settings import ReplicaSettings

        key_file = self.http.api_key_file
        settings = call_with_flags(
            ReplicaSettings,
            self,
            path=str(self.path.resolve()),
            name=names[0],
            aliases=names[1:],
            plan=plan,
            engine=asdict(config),
            api_key_file=None if key_file is None else str(key_file.resolve()),
            allowed_origins=http.allowed_origins,
        )
        http.check_files_and_address()
        serve_replicas(settings, host=http.host, port=http.port)

    def _check(self) -> None:
        """Raise `PromptError` for values that would fail only after the model is loaded, or never."""
        if self.replicas is not None and self.replicas < 1:
            raise PromptError(f"--replicas {self.replicas}: must be at least 1")
        if not all(map(str.strip, self.name)):
            raise PromptError("--name '': must not be empty; give the name that clients send")
        if not 0 <= self.drain_seconds < float("inf"):
            raise PromptError(f"--drain-seconds {self.drain_seconds}: must be a finite number, at least 0")


def _begin(work: Callable[..., object], *arguments: Any) -> None:
    """Begin work that takes seconds, and that others wait for, while weights are read."""
    threading.Thread(target=work, args=arguments).start()  # The process waits for it before it ends.


def _start_device() -> None:
    """Start the device. A GPU reserves its memory at the first array, which takes seconds."""
    with suppress(RuntimeError):  # The model's loading reports it.
        jax.device_put(0).block_until_ready()


def _log_with_times() -> None:
    """Log the start, requests and the end, each line with its time."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("zdc_jax.engine", "zdc_jax.server"):
        logging.getLogger(name).setLevel(logging.INFO)
