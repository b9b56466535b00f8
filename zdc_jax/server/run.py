"""HTTP server process: `serve` listens on a port until it receives a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from zdc_jax.engine.request import Serving
from zdc_jax.generation.grammar import warm_up
from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.middleware import wrap

logger = logging.getLogger("zdc_jax.server")

FLUSH_SECONDS = 5
"""Seconds that clients have to read the rest of their answers after the engine has ended."""


def serve(
    engine: Serving,
    *,
    name: str,
    aliases: Sequence[str] = (),
    api_keys: Collection[str] = (),
    settings: HttpSettings | None = None,
    drain_seconds: float = 30,
) -> None:
    """Serve until SIGTERM or SIGINT, and print a line with the address once the server is ready.

    After the signal new requests get status 503. Accepted requests have `drain_seconds` to finish; then the
    engine is closed. SIGINT after the first signal ends the process at once. Call this function on the main
    thread.

    Args:
      engine: engine that answers requests.
      name: name of the model in the API.
      aliases: further names of the model in the API.
      api_keys: keys of which clients must send one; none for no key.
      settings: address to listen at, by default port 8000 for this machine only, and more.
      drain_seconds: seconds that accepted requests have after the signal; then they are cancelled.

    Raises:
      ValueError: a key is empty.
      SystemExit: the server cannot listen at the address; the log says why.
    """
    app = make_app(engine, name=name, aliases=aliases, api_keys=api_keys)
    # uvicorn raises its signals again after it has ended. For the caller both should be a normal end.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            Server(app, engine, name, settings or HttpSettings(), drain_seconds).run()
    finally:
        signal.signal(signal.SIGTERM, before)


class Server(uvicorn.Server):
    """Server that reports its address, and drains the engine before it closes its sockets.

    Args:
      app: application from `make_app`.
      engine: engine of the application.
      name: name of the model in the API.
      settings: address to listen at, and more.
      drain_seconds: seconds that accepted requests have at shutdown.
    """

    def __init__(
        self, app: Starlette, engine: Serving, name: str, settings: HttpSettings, drain_seconds: float
    ):
        super().__init__(
            uvicorn.Config(
                wrap(app, settings),
                ws="none",
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=FLUSH_SECONDS,
                host=settings.host,
                port=settings.port,
                uds=None if settings.uds is None else str(settings.uds),
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]  # Fractions work, too.
            )
        )
        self._app, self._engine, self._name = app, engine, name
        self._settings, self._drain_seconds = settings, drain_seconds

    @property
    def address(self) -> str:
        """URL of the server, once it has started."""
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        if self._settings.uds is not None:
            return f"{scheme}+unix://{self._settings.uds.resolve()}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and print the address."""
        await asyncio.to_thread(warm_up, self._engine.model)
        await super().startup(sockets)
        print(f"serving {self._name} at {self.address}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle the first signal; from then on SIGINT ends the process."""
        super().handle_exit(sig, frame)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the engine, then the sockets; until then clients get status 503."""
        self._app.state.closing = True
        stats = self._engine.stats()
        if count := stats.running + stats.waiting:
            logger.info(
                "ending: requests that may finish within %g s: %d; Ctrl-C ends at once",
                self._drain_seconds,
                count,
            )
        await asyncio.to_thread(self._engine.close, drain=True, timeout=self._drain_seconds)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # TLS clients may never confirm the end.
            connection.transport.abort()
        if self._settings.uds is not None:
            self._settings.uds.unlink(missing_ok=True)
