"""`zdc serve`: a model behind OpenAI's API."""

import asyncio
import os
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import PlanFlags
from zdc_jax.config import Dtype
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.loading import TextSide, load
from zdc_jax.plan import CompressionPlan

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")
"""Of the extra `serve`."""


@dataclass
class Serve:
    """Serve a model to many clients at once, by OpenAI's API: completions, chat, metrics.

    Clients must show the key in the environment variable ZDC_API_KEY, if it is set.
    """

    path: Positional[Path]
    """Converted folder."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    host: str = "127.0.0.1"
    """Address to listen at; only this machine reaches the default. 0.0.0.0 is for everyone."""
    port: int = 8000
    """Port to listen at; 0 for any that is free."""
    name: str | None = None
    """What clients call the model; default the folder's name."""
    max_sequences: int = 8
    """Requests that are answered at once."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer together; default the model's positions."""
    cache_tokens: int | None = None
    """Tokens that the cache has room for; default as many as all rows of the longest take, or as fit. Not for
    methods that keep whole rows, h2o and its like."""
    chunk: int = 2048
    """Prompt tokens read between two tokens of other answers, a power of two."""
    decode_steps: int | None = None
    """Tokens of each answer that come at once where nobody waits and no prompt is read; default 4 on a mesh,
    1 elsewhere. Four are faster than one on a mesh and on a CPU."""
    max_waiting: int = 256
    """Requests that may wait; more are told to come again."""
    replicas: int | None = None
    """Engines on this machine, each on its own GPU if there are any; answers outlive the death of one. Needs
    the extra `ray`."""
    drain_seconds: float = 30.0
    """What requests under way have to end in, once the server is told to."""
    mesh: str | None = None
    """Devices, such as sequence=2,model=4: long prompts are divided over both, all else by heads."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""
    max_positions: int | None = None
    """Tokens of the longest context; default the config's, more with rotary scaling yarn or dynamic alone."""

    def run(self, console: Console) -> None:
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            raise PromptError(f"serving needs {', '.join(missing)}; run: pip install 'zdc-jax[serve]'")
        self._check()
        config = self._config()
        plan = self.flags.build(self.path)
        name = self.name or self.path.resolve().name
        if self.replicas is None:
            self._serve_alone(config, plan, name)
        else:
            self._serve_replicas(self.replicas, config, plan, name)

    def _serve_alone(self, config: EngineConfig, plan: CompressionPlan | None, name: str) -> None:
        from zdc_jax.server.app import KEY
        from zdc_jax.server.run import serve

        config.served_length(TextSide.load(self.path, self.max_positions).config.max_positions)
        check_address(self.host, self.port)
        model = load(self.path, plan, dtype=self.dtype, max_positions=self.max_positions, mesh=self.mesh)
        with Engine(model, config) as engine:
            serve(
                engine,
                name=name,
                api_key=os.environ.get(KEY) or None,
                host=self.host,
                port=self.port,
                drain_seconds=self.drain_seconds,
            )

    def _serve_replicas(
        self, replicas: int, config: EngineConfig, plan: CompressionPlan | None, name: str
    ) -> None:
        if self.mesh is not None:
            raise PromptError(f"mesh={self.mesh!r} and replicas={replicas}: a replica has one device")
        if find_spec("ray") is None:
            raise PromptError("--replicas needs ray; run: pip install 'zdc-jax[ray]'")
        from zdc_jax.replicas.run import serve_replicas
        from zdc_jax.replicas.settings import ReplicaSettings

        settings = ReplicaSettings(
            path=str(self.path.resolve()),
            name=name,
            plan=plan,
            replicas=replicas,
            engine=asdict(config),
            dtype=self.dtype,
            max_positions=self.max_positions,
            drain_seconds=self.drain_seconds,
        )
        check_address(self.host, self.port)
        serve_replicas(settings, host=self.host, port=self.port)

    def _check(self) -> None:
        """Raises `PromptError` for numbers that would show only once the model is loaded, or not at all."""
        if not 0 <= self.port <= 65535:  # The system takes it modulo 65536.
            raise PromptError(f"port={self.port} must be 0 to 65535")
        if self.replicas is not None and self.replicas < 1:
            raise PromptError(f"replicas={self.replicas} must be at least 1")
        if not 0 <= self.drain_seconds < float("inf"):
            raise PromptError(f"drain_seconds={self.drain_seconds} must be a finite number >= 0")

    def _config(self) -> EngineConfig:
        return EngineConfig(
            max_sequences=self.max_sequences,
            max_model_len=self.max_model_len,
            cache_tokens=self.cache_tokens,
            chunk=self.chunk,
            decode_steps=self.decode_steps,
            max_waiting=self.max_waiting,
        )


def check_address(host: str, port: int) -> None:
    """Raises `PromptError` where no server can listen now: the port is taken, or no such host is here."""

    async def listen() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
        server.close()

    with foreign_errors_as(PromptError, f"cannot listen at host={host!r}, port={port}"):
        asyncio.run(listen())
