"""Flags of `zdc serve` about HTTP: its address, its connections and its API keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from convert.cli.flags import call_with_flags, show_default
from zdc_jax.errors import PromptError
from zdc_jax.server.http_settings import HOST, KEEP_ALIVE, PORT, HttpSettings

SINGLE = ("uds", "ssl_certfile", "ssl_keyfile", "root_path", "keep_alive")
"""Flags that replicas do not have, since HAProxy holds their connections."""


@dataclass(kw_only=True)
class HttpFlags:
    """Address, connections and API keys of a server.

    Attributes:
      host: Address to listen on. The default accepts connections from this machine only; 0.0.0.0 accepts
        connections from any machine.
      port: Port to listen on; 0 picks a free one.
      uds: Path of a Unix domain socket to listen on, instead of a host and port. All users of this machine
        can connect.
      ssl_certfile: PEM file with a certificate, to serve HTTPS.
      ssl_keyfile: PEM file with the certificate's key, without a password.
      root_path: Prefix that a proxy puts before all paths, such as /llm.
      api_key_file: File with API keys, one per line. Clients must send one of them, or the value of
        ZDC_API_KEY.
      keep_alive: Seconds that an idle connection stays open.
      allowed_origins: Origins of web pages that may use the server from a browser, such as
        https://example.com; * for all.
      access_log: Log one line per request.
    """

    host: str = HOST
    port: int = PORT
    uds: Annotated[Path | None, show_default("none")] = None
    ssl_certfile: Annotated[Path | None, show_default("none, plain HTTP")] = None
    ssl_keyfile: Annotated[Path | None, show_default("inside --ssl-certfile")] = None
    root_path: Annotated[str, show_default("none")] = ""
    api_key_file: Annotated[Path | None, show_default("none")] = None
    keep_alive: float = KEEP_ALIVE
    allowed_origins: Annotated[tuple[str, ...], show_default("none")] = ()
    access_log: bool = True

    def build(self) -> HttpSettings:
        """Return the settings; raise `PromptError` for an impossible value."""
        return call_with_flags(HttpSettings, self)

    def check_replicas(self, replicas: int) -> None:
        """Raise `PromptError` for a flag that replicas do not have."""
        for name in SINGLE:
            value = getattr(self, name)
            if value != getattr(HttpFlags, name):
                raise PromptError(
                    f"{name}={str(value)!r}: not with --replicas {replicas}, whose connections HAProxy "
                    "holds; drop one flag"
                )
