"""`serve`: the server on a port, until it is told to end."""

import asyncio
import signal
import socket
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from zdc_jax.engine.request import Serving
from zdc_jax.server.app import make_app

FLUSH_SECONDS = 5
"""What clients have to read the rest of their answers, once the engine has given it."""


def serve(
    engine: Serving,
    *,
    name: str,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_seconds: float = 30,
) -> None:
    """Serves until SIGTERM or SIGINT; prints a line with the address when clients can come.

    After the signal new requests get 503, those under way may end, and the engine is closed. To be called on
    the main thread.

    Args:
      name, api_key: as `make_app` takes them.
      host: address to listen at; default one that only this machine reaches.
      port: 0 for any that is free.
      drain_seconds: for requests under way after the signal; then they are cancelled.

    Raises:
      ValueError: an empty key.
      SystemExit: the address cannot be listened at; the log says why.
    """
    app = make_app(engine, name=name, api_key=api_key)
    # uvicorn raises its signals again when it has ended. For the caller both are to be a usual end.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            Server(app, engine, name, host, port, drain_seconds).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Server(uvicorn.Server):
    """Says when it is ready, and lets an engine end its requests before its own sockets close."""

    def __init__(
        self, app: Starlette, engine: Serving, name: str, host: str, port: int, drain_seconds: float
    ):
        """Arguments as `serve` takes them; app: of `make_app`."""
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
        """Where a server that has started can be reached, as a URL."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and tells."""
        await super().startup(sockets)
        print(f"serving {self._name} at {self.address}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, when the engine has ended; until then clients are told that it does."""
        self._app.state.closing = True
        await asyncio.to_thread(self._engine.close, drain=True, timeout=self._drain_seconds)
        await super().shutdown(sockets)
