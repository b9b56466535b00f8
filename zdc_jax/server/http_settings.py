"""Settings of an HTTP server: its address, its connections, and what surrounds its routes."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from zdc_jax.errors import PromptError, foreign_errors_as

KEEP_ALIVE = 75.0
"""Default seconds that an idle connection stays open, more than the 60 of common proxies and load balancers.

A proxy whose server closes first may send a request into a closed connection.
"""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
"""Scheme, host and optional port, as browsers send them."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Settings of an HTTP server.

    Attributes:
      host: address to listen at. Only this machine can reach the default.
      port: port to listen at; 0 for any free port.
      keep_alive: seconds that an idle connection stays open.
      allowed_origins: origins of web pages that may read answers; `*` for all.
      access_log: log one line per request.

    Raises:
      PromptError: a value is out of range, or no browser sends such an origin.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keep_alive: float = KEEP_ALIVE
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # The system would use it modulo 65536.
            raise PromptError(f"port={self.port}: must be 0 to 65535")
        if not 0 < self.keep_alive < float("inf"):
            raise PromptError(f"keep_alive={self.keep_alive}: must be a finite number of seconds above 0")
        for origin in self.allowed_origins:
            if origin != "*" and ORIGIN.fullmatch(origin) is None:
                raise PromptError(
                    f"allowed_origin={origin!r}: must be * or an origin such as https://example.com:8080, "
                    "in lower case and without a path"
                )

    def check_address(self) -> None:
        """Raise `PromptError` if the port is taken, or the host belongs to another machine."""

        async def listen() -> None:
            server = await asyncio.get_running_loop().create_server(asyncio.Protocol, self.host, self.port)
            server.close()

        with foreign_errors_as(PromptError, f"cannot listen on host={self.host!r} port={self.port}"):
            asyncio.run(listen())

    def to_uvicorn(self) -> dict[str, Any]:
        """Return address and connections in the words of `uvicorn.Config`."""
        return {"host": self.host, "port": self.port, "timeout_keep_alive": self.keep_alive}
