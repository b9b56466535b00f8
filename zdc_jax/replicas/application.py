"""The Ray Serve application: engines, and a front with the HTTP server that asks them.

HAProxy → `Door` (the front: OpenAI's API, answers that outlive their replica) → `Replica` (an engine and its
GPU), in turn. Ray starts replicas anew where they die. To be imported where the extra `ray` is installed.
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette

from zdc_jax.engine.request import EngineRequest, EngineStats, Event, Serving
from zdc_jax.replicas.front import Front, Lost, stream
from zdc_jax.replicas.settings import ReplicaSettings
from zdc_jax.server.app import KEY, make_app

CPUS = 0.1
"""Of a replica, as Ray counts them: what limits replicas are GPUs."""
STATS_SECONDS = 5.0
"""What replicas have to say how they are."""


class Replica:
    """An engine in a process of its own."""

    def __init__(self, new_engine: Callable[[], Serving]):
        self._engine = new_engine()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """As `zdc_jax.replicas.front.stream`."""
        async with aclosing(stream(self._engine, request)) as events:
            async for event in events:
                yield event

    async def stats(self) -> EngineStats:
        """Numbers of now."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Ray ends a replica that cannot go on, and starts another."""
        if self._engine.closing:
            raise Lost("the engine cannot go on")


class RayFleet:
    """Replicas of a deployment (`Fleet`)."""

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas
        # The usual serialization takes longer than all else that a token costs here.
        self._asked = replicas.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        )

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """`Fleet.stream`."""
        events = self._asked.stream.remote(request)
        try:
            async for event in events:
                yield event
        except (RayActorError, DeploymentUnavailableError) as error:
            raise Lost(str(error).partition("\n")[0]) from error
        finally:
            events.cancel()  # Of one that has ended it changes nothing.

    def stats(self) -> list[EngineStats]:
        """`Fleet.stats`."""
        return self._replicas.broadcast("stats").results(timeout_s=STATS_SECONDS)


class Door:
    """The HTTP server; it needs the tokenizer of the model, and none of its weights."""

    def __init__(self, replicas: DeploymentHandle, settings: ReplicaSettings):
        model, max_model_len = settings.text_side()
        room = settings.replicas * settings.room
        self._front = Front(model, max_model_len, RayFleet(replicas), room)
        self._name = settings.name

    def __serve_build_asgi_app__(self) -> Starlette:
        """What Ray serves."""
        return make_app(self._front, name=self._name, api_key=os.environ.get(KEY) or None)


def build(settings: ReplicaSettings) -> serve.Application:
    """The application of some settings."""
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": settings.drain_seconds,
        "logging_config": LoggingConfig(enable_access_log=False),
    }
    replicas = serve.deployment(
        Replica,
        name="replica",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": CPUS, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.room,
        request_router_config=RequestRouterConfig(request_router_class=RoundRobinRouter),
        health_check_period_s=2,
        max_constructor_retry_count=2,
        **common,
    )
    door = serve.deployment(
        serve.ingress()(Door),
        name="door",
        num_replicas=1,
        ray_actor_options={"num_cpus": CPUS},
        # The front refuses what is too much itself, in words that clients know.
        max_ongoing_requests=2 * settings.replicas * settings.room,
        **common,
    )
    return door.bind(replicas.bind(settings.new_engine), settings)


def application(args: dict[str, Any]) -> serve.Application:
    """What a config file of Ray Serve names as `import_path`; args: fields of `ReplicaSettings`."""
    return build(ReplicaSettings(**args))
