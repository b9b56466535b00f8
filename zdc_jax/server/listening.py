"""Address that a server listens at, and the life of its connections."""

import asyncio
from dataclasses import dataclass
from typing import Any

from zdc_jax.errors import PromptError, foreign_errors_as

KEEP_ALIVE = 75.0
"""Default seconds that an idle connection stays open, more than the 60 of common proxies and load balancers.

A proxy whose server closes first may send a request into a closed connection.
"""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Address of a server, and the life of its connections.

    Attributes:
      host: address to listen at. Only this machine can reach the default.
      port: port to listen at; 0 for any free port.
      keep_alive: seconds that an idle connection stays open.

    Raises:
      PromptError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keep_alive: float = KEEP_ALIVE

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # The system would use it modulo 65536.
            raise PromptError(f"port={self.port}: must be 0 to 65535")
        if not 0 < self.keep_alive < float("inf"):
            raise PromptError(f"keep_alive={self.keep_alive}: must be a finite number of seconds above 0")

    def check(self) -> None:
        """Raise `PromptError` if no server can listen here."""

        async def listen() -> None:
            server = await asyncio.get_running_loop().create_server(asyncio.Protocol, self.host, self.port)
            server.close()

        with foreign_errors_as(PromptError, f"cannot listen on host={self.host!r} port={self.port}"):
            asyncio.run(listen())

    def to_uvicorn(self) -> dict[str, Any]:
        """Return the settings in the words of `uvicorn.Config`."""
        return {"host": self.host, "port": self.port, "timeout_keep_alive": self.keep_alive}
