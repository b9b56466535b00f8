"""Server process with replicas: `serve_replicas` runs engines and their HTTP server until a signal."""

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace

# Set before Ray is imported, for Ray and all processes that it starts.
os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
# Sends tokens by gRPC; Ray's object store takes far longer.
os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
# A short drain suffices, because no other machine must notice the end.
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.replicas.application import build
from zdc_jax.replicas.settings import ReplicaSettings


def serve_replicas(settings: ReplicaSettings, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGTERM or SIGINT, and print a line with the address once the server is ready.

    Each replica has its own GPU, if the machine has any. After the signal accepted requests have
    `settings.drain_seconds` to finish. Call this function on the main thread.

    Args:
      settings: settings of the replicas.
      host: address to listen at.
      port: port to listen at; 0 for any free port.

    Raises:
      CheckpointError: there is no converted folder at the path.
      PromptError: `max_model_len` exceeds the model's positions, there are fewer GPUs than replicas, or the
        replicas do not start; Ray's log says why.
    """
    settings.text_side()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with suppress(KeyboardInterrupt):
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
            for number in before:  # After Ray has installed its own handlers.
                signal.signal(number, signal.default_int_handler)
            _serve_until_interrupt(settings, host, port or _find_free_port(host))
    finally:
        serve.shutdown()
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve_until_interrupt(settings: ReplicaSettings, host: str, port: int) -> None:
    """Serve until a `KeyboardInterrupt`."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < gpus < settings.replicas:
        raise PromptError(
            f"replicas={settings.replicas}: each replica needs a GPU, and this machine has {gpus}; "
            f"use at most {gpus} replicas"
        )
    try:
        with foreign_errors_as(PromptError, "the replicas did not start; see the folder serve in Ray's logs"):
            serve.start(http_options={"host": host, "port": port})
            serve.run(build(replace(settings, gpus=min(gpus, 1))), name=settings.name)
        print(f"serving {settings.name} at http://{host}:{port}", flush=True)
        threading.Event().wait()
    finally:
        serve.delete(settings.name)  # Waits for accepted requests.


def _find_free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
