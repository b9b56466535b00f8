"""HTTP server process: `serve` listens on a port until it receives a signal."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from zdc_jax.engine.request import Serving
from zdc_jax.generation.grammar import warm_up
from zdc_jax.server.app import make_app

FLUSH_SECONDS = 5
"""Seconds that clients have to read the rest of their answers after the engine has ended."""


def serve(
    engine: Serving,
    *,
    name: str,
    aliases: Sequence[str] = (),
    api_key: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_seconds: float = 30,
) -> None:
    """Serve until SIGTERM or SIGINT, and print a line with the address once the server is ready.

    After the signal new requests get status 503. Accepted requests have `drain_seconds` to finish; then the
    engine is closed. Call this function on the main thread.

    Args:
      engine: engine that answers requests.
      name: name of the model in the API.
      aliases: further names of the model in the API.
      api_key: key that clients must send; None for no key.
      host: address to listen at. Only this machine can reach the default.
      port: port to listen at; 0 for any free port.
      drain_seconds: seconds that accepted requests have after the signal; then they are cancelled.

    Raises:
      ValueError: the key is empty.
      SystemExit: the server cannot listen at the address; the log says why.
    """
    app = make_app(engine, name=name, aliases=aliases, api_key=api_key)
    # uvicorn raises its signals again after it has ended. For the caller both should be a normal end.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            Server(app, engine, name, host, port, drain_seconds).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Server(uvicorn.Server):
    """Server that reports its address, and drains the engine before it closes its sockets.

    Args:
      app: application from `make_app`.
      engine: engine of the application.
      name: name of the model in the API.
      host: address to listen at.
      port: port to listen at; 0 for any free port.
      drain_seconds: seconds that accepted requests have at shutdown.
    """

    def __init__(
        self, app: Starlette, engine: Serving, name: str, host: str, port: int, drain_seconds: float
    ):
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                ws="none",
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self._app, self._engine, self._name, self._drain_seconds = app, engine, name, drain_seconds

    @property
    def address(self) -> str:
        """URL of the server, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and print the address."""
        await asyncio.to_thread(warm_up, self._engine.model)
        await super().startup(sockets)
        print(f"serving {self._name} at {self.address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the engine, then the sockets; until then clients get status 503."""
        self._app.state.closing = True
        await asyncio.to_thread(self._engine.close, drain=True, timeout=self._drain_seconds)
        await super().shutdown(sockets)
