"""API keys: where they come from, and how requests are compared with them."""

import hmac
import os
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from zdc_jax.errors import PromptError, describe_error
from zdc_jax.server.errors import RequestError, make_response

KEY = "ZDC_API_KEY"
"""Environment variable with an API key that clients may send; empty for no key."""


def collect_keys(file: Path | None) -> tuple[str, ...]:
    """Return the key of the environment and those of a file; none means that clients need none.

    Raises:
      PromptError: the file cannot be read or contains no key.
    """
    keys = [] if file is None else _read_keys(file)
    return (*filter(None, [os.environ.get(KEY)]), *keys)


def _read_keys(file: Path) -> list[str]:
    """Return the keys of a file, one per line; empty lines and lines that start with `#` are left out."""
    named = f"api_key_file={str(file)!r}"
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise PromptError(f"{named}: cannot be read: {describe_error(error)}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise PromptError(f"{named}: contains no key; write one key per line, or leave the file out")
    return keys


def make_guard(keys: Collection[str]) -> list[Middleware]:
    """Return the middleware that refuses requests without one of the keys; none without keys.

    Raises:
      ValueError: a key is empty.
    """
    if "" in keys:
        raise ValueError("api_keys has an empty key; leave it out")
    return [Middleware(ApiKeys, keys)] if keys else []


class ApiKeys:
    """Middleware that refuses requests without the header `Authorization: Bearer KEY`.

    Args:
      app: application to wrap.
      keys: keys that clients may send.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str]):
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, sent_key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Starlette decodes header bytes as Latin-1, whatever their encoding.
        sent = sha256(sent_key.strip().encode("latin-1")).digest()
        same = [hmac.compare_digest(sent, digest) for digest in self._digests]  # All, in constant time.
        if scheme.lower() != "bearer" or not any(same):
            message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'"
            refused = RequestError(message, status=401, code="invalid_api_key")
            await make_response(refused, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)
