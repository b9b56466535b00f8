"""`serve_replicas`: several engines and their door on this machine, until it is told to end."""

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace

# Before Ray is imported, for it and all that it starts.
os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")  # gRPC: tokens by Ray's objects take far longer.
os.environ.setdefault(
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2"
)  # No other machine has to notice.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.replicas.application import build
from zdc_jax.replicas.settings import ReplicaSettings


def serve_replicas(settings: ReplicaSettings, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves until SIGTERM or SIGINT; prints a line with the address when clients can come.

    Each replica has a GPU of its own, where there are any. After the signal requests under way have
    `settings.drain_seconds`. To be called on the main thread.

    Args:
      host: address to listen at.
      port: 0 for any that is free.

    Raises:
      CheckpointError, PromptError: as `ReplicaSettings.text_side`, before anything is started.
      PromptError: fewer GPUs than replicas, or replicas that do not start; the log says why.
    """
    settings.text_side()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with suppress(KeyboardInterrupt):
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
            for number in before:  # Behind Ray, which has handlers of its own.
                signal.signal(number, signal.default_int_handler)
            _serve(settings, host, port or _free_port(host))
    finally:
        serve.shutdown()
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(settings: ReplicaSettings, host: str, port: int) -> None:
    """Until a `KeyboardInterrupt`."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < gpus < settings.replicas:
        raise PromptError(f"replicas={settings.replicas} need a GPU each, and this machine has {gpus}")
    try:
        with foreign_errors_as(
            PromptError, "the replicas did not start; Ray's log folder, below serve, says why"
        ):
            serve.start(http_options={"host": host, "port": port})
            serve.run(build(replace(settings, gpus=min(gpus, 1))), name=settings.name)
        print(f"serving {settings.name} at http://{host}:{port}", flush=True)
        threading.Event().wait()
    finally:
        serve.delete(settings.name)  # Waits for requests under way.


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
