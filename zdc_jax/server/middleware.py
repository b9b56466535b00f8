"""Middleware around the routes of a server."""

import re
from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from zdc_jax.errors import PromptError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
"""Scheme, host and optional port, as browsers send them."""


def check_origins(origins: Collection[str]) -> None:
    """Raise `PromptError` for an origin that no browser sends."""
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            raise PromptError(
                f"allowed_origin={origin!r}: must be * or an origin such as https://example.com:8080, "
                "in lower case and without a path"
            )


def wrap(app: ASGIApp, *, allowed_origins: Collection[str] = ()) -> ASGIApp:
    """Wrap an application in the middleware that also sees refused requests and internal errors.

    Args:
      app: application from `make_app`.
      allowed_origins: origins of web pages that may read answers; `*` for all.

    Raises:
      PromptError: no browser sends such an origin.
    """
    check_origins(allowed_origins)
    if allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app
