"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import HTTPExceptionHandler

from zdc_jax.engine.request import Busy, Closing
from zdc_jax.errors import ChatError, PromptError, ZDCError

RETRY_AFTER = 1
"""Seconds after which a client that found the queue full may come again."""
CLOSED_REQUEST = 499
"""Status of a request whose client has gone; nobody sees it."""


class RequestError(ZDCError):
    """A request gets no answer. `param`: the field that is to blame; `code`: what happened, in a word.

    It is no `ValueError`, so that pydantic lets it pass.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets."""
        described = {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": described}


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Raises a `PromptError` inside as a `RequestError` of this field."""
    try:
        yield
    except PromptError as error:
        raise RequestError(str(error), param=param) from error


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def malformed(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = f"{place}: {first['msg']}" if place else first["msg"]
    return RequestError(message, param=str(first["loc"][0]) if place else None)


def response(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(error.body, error.status, headers)


async def _on_request_error(request: Request, error: Any) -> JSONResponse:
    return response(error)


async def _on_malformed(request: Request, error: Any) -> JSONResponse:
    return response(malformed(error))


async def _on_refused(request: Request, error: Any) -> JSONResponse:
    return response(RequestError(str(error)))


async def _on_busy(request: Request, error: Any) -> JSONResponse:
    """The engine is busy for a while, or for good."""
    closing = request.app.state.closing or isinstance(error, Closing)
    status, code = (503, "closing") if closing else (429, "queue_full")
    refused = RequestError(str(error) or "too many requests wait", status=status, code=code)
    return response(refused, {"Retry-After": str(RETRY_AFTER)})


async def _on_http(request: Request, error: Any) -> JSONResponse:
    """No such path or method."""
    return response(RequestError(error.detail, status=error.status_code), error.headers)


async def _on_gone(request: Request, error: Any) -> JSONResponse:
    return response(RequestError("the client has gone", status=CLOSED_REQUEST))


async def _on_bug(request: Request, error: Any) -> JSONResponse:
    """The log says what happened; the client needs not know."""
    return response(RequestError("internal error", status=500))


HANDLERS: dict[Any, HTTPExceptionHandler] = {
    RequestError: _on_request_error,
    ValidationError: _on_malformed,
    PromptError: _on_refused,
    ChatError: _on_refused,
    Busy: _on_busy,
    HTTPException: _on_http,
    ClientDisconnect: _on_gone,
    Exception: _on_bug,
}
"""What is answered where an error ends a request."""
