"""Ray Serve application: replicas with one engine each, and an HTTP server in front of them.

Requests pass through HAProxy, `FrontServer` (the HTTP API, which resumes answers of lost replicas) and a
`Replica` (an engine and its GPU). Replicas are chosen in turn, and Ray restarts those that die. Importing
this module needs the extra `ray`.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from zdc_jax.engine.request import EngineRequest, EngineStats, Event, Serving
from zdc_jax.replicas.front import Front, ReplicaLostError, stream
from zdc_jax.replicas.settings import ReplicaSettings
from zdc_jax.server.api_keys import collect_keys
from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.middleware import wrap

CPUS = 0.1
"""CPUs that Ray reserves for a replica, few because GPUs limit the number of replicas."""
STATS_SECONDS = 5.0
"""Seconds that replicas have to report statistics."""


class Replica:
    """Engine in its own process.

    Args:
      new_engine: function that creates the engine.
    """

    def __init__(self, new_engine: Callable[[], Serving]):
        self._engine = new_engine()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a request (`zdc_jax.replicas.front.stream`)."""
        async with aclosing(stream(self._engine, request)) as events:
            async for event in events:
                yield event

    async def stats(self) -> EngineStats:
        """Return current statistics."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Raise an error if the engine accepts no more requests; Ray then replaces the replica."""
        if self._engine.closing:
            raise ReplicaLostError("the engine accepts no more requests")


class RayFleet:
    """Replicas of a Ray deployment (`Fleet`).

    Args:
      replicas: handle of the deployment.
    """

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas
        # Ray's default serialization takes longer than everything else that a token costs here.
        self._streaming = replicas.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        )

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        events = self._streaming.stream.remote(request)
        try:
            async for event in events:
                yield event
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLostError(str(error).partition("\n")[0]) from error
        finally:
            events.cancel()  # No effect on a request that has ended.

    def stats(self) -> list[EngineStats]:
        return self._replicas.broadcast("stats").results(timeout_s=STATS_SECONDS)


class FrontServer:
    """HTTP server; it loads the model's tokenizer but not its weights.

    Args:
      replicas: handle of the deployment with the replicas.
      settings: settings of the application.
    """

    def __init__(self, replicas: DeploymentHandle, settings: ReplicaSettings):
        model, max_model_len = settings.text_side()
        max_requests = settings.replicas * settings.max_requests
        self._front = Front(model, max_model_len, RayFleet(replicas), max_requests)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application for Ray Serve."""
        settings = self._settings
        keys = collect_keys(Path(settings.api_key_file) if settings.api_key_file else None)
        app = make_app(self._front, name=settings.name, aliases=settings.aliases, api_keys=keys)
        return wrap(app, HttpSettings(allowed_origins=tuple(settings.allowed_origins), access_log=False))


def build(settings: ReplicaSettings) -> serve.Application:
    """Build the application."""
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": settings.drain_seconds,
        "logging_config": LoggingConfig(enable_access_log=False),
    }
    replicas = serve.deployment(
        Replica,
        name="replica",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": CPUS, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.max_requests,
        request_router_config=RequestRouterConfig(request_router_class=RoundRobinRouter),
        health_check_period_s=2,
        max_constructor_retry_count=2,
        **common,
    )
    front = serve.deployment(
        serve.ingress()(FrontServer),
        name="door",
        num_replicas=1,
        ray_actor_options={"num_cpus": CPUS},
        # Above the front's own limit, so that the front refuses requests with an error that clients know.
        max_ongoing_requests=2 * settings.replicas * settings.max_requests,
        **common,
    )
    return front.bind(replicas.bind(settings.new_engine), settings)


def application(args: dict[str, Any]) -> serve.Application:
    """Build the application from the fields of `ReplicaSettings`.

    Config files of Ray Serve name this function as `import_path`.
    """
    return build(ReplicaSettings(**args))
