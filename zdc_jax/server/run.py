"""HTTP server process: `serve` listens on a port until it receives a signal."""

import asyncio
import signal
import socket
from collections.abc import Collection
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from zdc_jax.engine.request import Serving
from zdc_jax.server.app import make_app
from zdc_jax.server.listening import Listening
from zdc_jax.server.middleware import wrap

FLUSH_SECONDS = 5
"""Seconds that clients have to read the rest of their answers after the engine has ended."""


def serve(
    engine: Serving,
    *,
    name: str,
    api_key: str | None = None,
    listening: Listening | None = None,
    allowed_origins: Collection[str] = (),
    drain_seconds: float = 30,
) -> None:
    """Serve until SIGTERM or SIGINT, and print a line with the address once the server is ready.

    After the signal new requests get status 503. Accepted requests have `drain_seconds` to finish; then the
    engine is closed. Call this function on the main thread.

    Args:
      engine: engine that answers requests.
      name: name of the model in the API.
      api_key: key that clients must send; None for no key.
      listening: address to listen at; by default port 8000, for this machine only.
      allowed_origins: origins of web pages that may read answers; `*` for all.
      drain_seconds: seconds that accepted requests have after the signal; then they are cancelled.

    Raises:
      ValueError: the key is empty.
      PromptError: no browser sends such an origin.
      SystemExit: the server cannot listen at the address; the log says why.
    """
    app = make_app(engine, name=name, api_key=api_key)
    # uvicorn raises its signals again after it has ended. For the caller both should be a normal end.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            Server(
                app,
                engine,
                name=name,
                listening=listening or Listening(),
                allowed_origins=allowed_origins,
                drain_seconds=drain_seconds,
            ).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Server(uvicorn.Server):
    """Server that reports its address, and drains the engine before it closes its sockets.

    Args:
      app: application from `make_app`.
      engine: engine of the application.
      name: name of the model in the API.
      listening: address to listen at.
      drain_seconds: seconds that accepted requests have at shutdown.
      allowed_origins: origins of web pages that may read answers.
    """

    def __init__(
        self,
        app: Starlette,
        engine: Serving,
        *,
        name: str,
        listening: Listening,
        drain_seconds: float,
        allowed_origins: Collection[str] = (),
    ):
        super().__init__(
            uvicorn.Config(
                wrap(app, allowed_origins=allowed_origins),
                ws="none",
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=FLUSH_SECONDS,
                **listening.to_uvicorn(),
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
        await super().startup(sockets)
        print(f"serving {self._name} at {self.address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the engine, then the sockets; until then clients get status 503."""
        self._app.state.closing = True
        await asyncio.to_thread(self._engine.close, drain=True, timeout=self._drain_seconds)
        await super().shutdown(sockets)
