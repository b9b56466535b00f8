"""Middleware around the routes of a server: request ids, access lines and CORS."""

import logging
import re
import time
import uuid
from contextvars import ContextVar
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zdc_jax.server.http_settings import HttpSettings

logger = logging.getLogger("zdc_jax.server")

HEADER = "X-Request-Id"
CLIENT_ID = re.compile(r"[!-~]{1,128}")
"""Ids that clients may choose: visible ASCII, so that an id cannot forge a line of the log."""
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task answers."""
MAX_PATH = 200
"""Most characters of a path in the log."""


class RequestLog:
    """Middleware that gives each request an id, and logs one line when its answer ends.

    Args:
      app: application to wrap.
      access_log: log the lines. Ids are given in any case.
    """

    def __init__(self, app: ASGIApp, access_log: bool):
        self._app, self._access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER, "")
        name = sent if CLIENT_ID.fullmatch(sent) else uuid.uuid4().hex
        request_id.set(name)  # Each request has a task of its own.
        began, status, whole = time.monotonic(), 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._access_log:
                end = "" if whole else ", cut off"
                seconds = time.monotonic() - began
                logger.info("%s: %d in %.3f s%s, request %s", _describe(scope), status, seconds, end, name)


def _describe(scope: Scope) -> str:
    """Return a request's client, method and path without its query, which may hold secrets."""
    host, port = scope.get("client") or ("local socket", None)
    client = host if port is None else f"{host}:{port}"
    return f"{client} {scope['method']} {quote(scope['path'])[:MAX_PATH]}"


def wrap(app: ASGIApp, settings: HttpSettings) -> ASGIApp:
    """Wrap an application in the middleware that also sees refused requests and internal errors."""
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", HEADER],
        )
    if settings.root_path:
        app = _set_root_path(app, settings.root_path)
    return RequestLog(app, settings.access_log)


def _set_root_path(app: ASGIApp, root_path: str) -> ASGIApp:
    """Return an application that also serves paths with a prefix, which a proxy may strip or not."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] + "/" * (scope["path"] == root_path)
        await app({**scope, "root_path": root_path, "path": path}, receive, send)

    return run
