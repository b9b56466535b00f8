"""Settings of an HTTP server: its address, its connections, and what surrounds its routes."""

import asyncio
import errno
import re
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zdc_jax.errors import PromptError, describe_error, foreign_errors_as

HOST, PORT = "127.0.0.1", 8000
KEEP_ALIVE = 75.0
"""Default seconds that an idle connection stays open, more than the 60 of common proxies and load balancers.

A proxy whose server closes first may send a request into a closed connection.
"""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
"""Scheme, host and optional port, as browsers send them."""

ROOT_PATH = re.compile(r"(/[^/?#\s]+)+")


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Settings of an HTTP server.

    Attributes:
      host: address to listen at. Only this machine can reach the default.
      port: port to listen at; 0 for any free port.
      uds: path of a Unix domain socket to listen at, instead of host and port.
      ssl_certfile: PEM file with the certificate for TLS, and with its key unless `ssl_keyfile` has it.
      ssl_keyfile: PEM file with the certificate's key, without a password.
      root_path: prefix that a proxy puts before all paths, such as /llm. Paths without the prefix stay valid.
      keep_alive: seconds that an idle connection stays open.
      allowed_origins: origins of web pages that may read answers; `*` for all.
      access_log: log one line per request.

    Raises:
      PromptError: a value is out of range, no browser sends such an origin, or settings exclude each other.
    """

    host: str = HOST
    port: int = PORT
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    keep_alive: float = KEEP_ALIVE
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # The system would use it modulo 65536.
            raise PromptError(f"port={self.port}: must be 0 to 65535")
        if self.uds is not None and (self.host, self.port) != (HOST, PORT):
            raise PromptError(
                f"uds={str(self.uds)!r}: not together with host={self.host!r} and port={self.port}; "
                "drop these or uds="
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise PromptError(
                f"ssl_keyfile={str(self.ssl_keyfile)!r}: needs a certificate, too; add ssl_certfile="
            )
        if self.root_path and ROOT_PATH.fullmatch(self.root_path) is None:
            raise PromptError(
                f"root_path={self.root_path!r}: must start with / and not end with it, such as /llm"
            )
        if not 0 < self.keep_alive < float("inf"):
            raise PromptError(f"keep_alive={self.keep_alive}: must be a finite number of seconds above 0")
        for origin in self.allowed_origins:
            if origin != "*" and ORIGIN.fullmatch(origin) is None:
                raise PromptError(
                    f"allowed_origin={origin!r}: must be * or an origin such as https://example.com:8080, "
                    "in lower case and without a path"
                )

    def check_files_and_address(self) -> None:
        """Raise `PromptError` if the certificate cannot be loaded, or no server can listen at the address."""
        if self.ssl_certfile is not None:
            names = [f"ssl_certfile={str(self.ssl_certfile)!r}"]
            names += [f"ssl_keyfile={str(self.ssl_keyfile)!r}"] if self.ssl_keyfile is not None else []
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            with foreign_errors_as(PromptError, f"{' '.join(names)}: cannot be loaded"):
                # An empty password, because OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        if self.uds is not None:
            check_socket(self.uds)
            return

        async def listen() -> None:
            server = await asyncio.get_running_loop().create_server(asyncio.Protocol, self.host, self.port)
            server.close()

        address = f"cannot listen on host={self.host!r} port={self.port}"
        with foreign_errors_as(PromptError, address):
            try:
                asyncio.run(listen())
            except OSError as error:
                raise PromptError(f"{address}: {_explain_refusal(error)}") from error


def _explain_refusal(error: OSError) -> str:
    """Return in words why the operating system refuses an address."""
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is already in use; choose another port=, or 0 for a free one"
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address; choose another host="
        case errno.EACCES:
            return "you have no permission for this port; choose a port= above 1023"
        case _:
            return describe_error(error)


def check_socket(path: Path) -> None:
    """Raise `PromptError` if no server can listen at a Unix domain socket.

    A socket of a server that has ended is replaced later, and does no harm.
    """
    with foreign_errors_as(PromptError, f"cannot listen on uds={str(path)!r}"):
        with socket.socket(socket.AF_UNIX) as other, suppress(FileNotFoundError, ConnectionRefusedError):
            other.connect(str(path))
            raise OSError("another server listens there")
        if path.exists() and not path.is_socket():
            raise OSError("it is a file, not a socket")
        if not path.exists():
            with socket.socket(socket.AF_UNIX) as own:
                own.bind(str(path))
            path.unlink()
