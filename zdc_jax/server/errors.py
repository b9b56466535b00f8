"""Errors in OpenAI's format: a status and `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import HTTPExceptionHandler

from zdc_jax.engine.request import Busy, Closing
from zdc_jax.errors import ChatError, PromptError, ZDCError

RETRY_AFTER = 1
"""Seconds after which a client should retry when the queue was full."""
CLOSED_REQUEST = 499
"""Status logged for a request whose client disconnected."""
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Types of errors below status 500 that clients recognise."""


class RequestError(ZDCError):
    """A request that gets no answer.

    It is not a `ValueError`, so that pydantic does not wrap it.

    Attributes:
      status: HTTP status.
      param: request field that caused the error, or None.
      code: short machine-readable reason, or None.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def make_length_error(param: str, prompt: int, answer: int, max_model_len: int) -> RequestError:
    """Return the error for a prompt that leaves too few tokens for its answer.

    Clients recognise the code and the first sentence, which are OpenAI's, and then shorten the prompt.

    Args:
      param: request field with the prompt.
      prompt: number of prompt tokens.
      answer: most tokens of the answer, as the client set them; without a limit the fewest.
      max_model_len: most tokens of a prompt and its answer together.
    """
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{prompt + answer} tokens ({prompt} in the {param}, {answer} in the completion). Please reduce the "
        f"length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


@contextmanager
def report_errors_of(param: str | None = None, *, prefix: str = "") -> Iterator[None]:
    """Convert `PromptError` and `ChatError` inside the context to a `RequestError`.

    Args:
      param: request field that caused the error; default the first word of the message.
      prefix: text before the message.
    """
    try:
        yield
    except (PromptError, ChatError) as error:
        message = f"{prefix}{error}"
        raise RequestError(message, param=param or re.split(r"\W", message)[0]) from error


def make_response(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the HTTP response for an error."""
    return JSONResponse(error.body, error.status, headers)


async def _on_refused(request: Request, error: Any) -> JSONResponse:
    return make_response(error if isinstance(error, RequestError) else RequestError(str(error)))


async def _on_busy(request: Request, error: Any) -> JSONResponse:
    """Answer 503 if the server is closing, otherwise 429."""
    closing = request.app.state.closing or isinstance(error, Closing)
    status, code = (503, "closing") if closing else (429, "queue_full")
    refused = RequestError(str(error) or "the queue is full; retry later", status=status, code=code)
    return make_response(refused, {"Retry-After": str(RETRY_AFTER)})


async def _on_http(request: Request, error: Any) -> JSONResponse:
    """Answer requests with an unknown path or a wrong method."""
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        message, code = f"{asked}: this path accepts {error.headers['Allow']} only", "method_not_supported"
    else:
        paths = ", ".join(sorted(route.path.replace(":path}", "}") for route in request.app.routes))
        message, code = f"{asked}: unknown path; this server has {paths}", "unknown_url"
    return make_response(RequestError(message, status=error.status_code, code=code), error.headers)


async def _on_disconnect(request: Request, error: Any) -> JSONResponse:
    return make_response(RequestError("the client disconnected", status=CLOSED_REQUEST))


async def _on_bug(request: Request, error: Any) -> JSONResponse:
    """Hide the details of an unexpected error, which are in the log."""
    return make_response(RequestError("internal error", status=500))


HANDLERS: dict[Any, HTTPExceptionHandler] = {
    RequestError: _on_refused,
    PromptError: _on_refused,
    ChatError: _on_refused,
    Busy: _on_busy,
    HTTPException: _on_http,
    ClientDisconnect: _on_disconnect,
    Exception: _on_bug,
}
"""Handler of each exception type."""
