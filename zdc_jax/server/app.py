"""The server's routes: OpenAI's completions, chats and models, vLLM's tokenize, health and metrics."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    SimpleUser,
)
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from zdc_jax.engine.request import Serving
from zdc_jax.generation.request import tokenized
from zdc_jax.server.answers import Answers
from zdc_jax.server.errors import HANDLERS, RequestError, blaming, response
from zdc_jax.server.metrics import Metrics
from zdc_jax.server.protocol import (
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    ToModel,
)
from zdc_jax.server.replies import Reply, reply_to

KEY = "ZDC_API_KEY"
"""Environment variable of the key that clients have to show; where it is empty, they need none."""
MOST_BODY_BYTES = 2**24


def make_app(
    engine: Serving, *, name: str, api_key: str | None = None, most_body_bytes: int = MOST_BODY_BYTES
) -> Starlette:
    """The server as an ASGI application; `app.state.closing` says that it takes no more requests.

    Args:
      engine: answers requests; closing it is the caller's.
      name: of the model, as clients ask for it.
      api_key: that clients have to show, but for health and metrics; None for none.
      most_body_bytes: of a request; more are refused.

    Raises:
      ValueError: an empty key, which everybody could show.
    """
    if api_key == "":
        raise ValueError("api_key='' must be a key, or None for none")
    api = Api(engine, name, Metrics(engine, name))
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
    ]
    guard = [] if api_key is None else [Middleware(AuthenticationMiddleware, ApiKey(api_key), _stranger)]
    app = Starlette(
        routes=[
            Route("/health", api.health),
            Route("/metrics", api.measured),
            Mount("/", routes=routes, middleware=guard),
        ],
        exception_handlers=HANDLERS,
        max_body_size=most_body_bytes,
    )
    app.state.closing = False
    return app


@dataclass(frozen=True)
class ApiKey(AuthenticationBackend):
    """Lets those in who show a key as `Authorization: Bearer KEY`."""

    key: str

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        """Takes the same time however much of the key is right; raises `AuthenticationError`."""
        scheme, _, given = conn.headers.get("authorization", "").partition(" ")
        # Headers come as Latin-1, whatever the bytes stand for.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self.key.encode())
        if scheme.lower() != "bearer" or not same:
            raise AuthenticationError("the API key is missing or wrong")
        return AuthCredentials(), SimpleUser("")


def _stranger(conn: HTTPConnection, error: AuthenticationError) -> Response:
    refused = RequestError(str(error), status=401, code="invalid_api_key")
    return response(refused, {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class Api:
    """What the routes do."""

    engine: Serving
    name: str
    metrics: Metrics

    async def completions(self, http: Request) -> Response:
        """Goes on from texts or token ids."""
        return await self._answer(http, CompletionRequest.model_validate_json(await http.body()))

    async def chat_completions(self, http: Request) -> Response:
        """Replies to messages."""
        return await self._answer(http, ChatRequest.model_validate_json(await http.body()))

    async def models(self, http: Request) -> Response:
        """The only one."""
        model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "zdc-jax"}
        model |= {"max_model_len": self.engine.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, http: Request) -> Response:
        """Whether requests are taken."""
        return Response(status_code=503 if http.app.state.closing or self.engine.closing else 200)

    def measured(self, http: Request) -> Response:
        """Metrics, for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, http: Request) -> Response:
        """Token ids of a text."""
        asked = TokenizeRequest.model_validate_json(await http.body())
        special = asked.add_special_tokens
        with blaming("prompt"):
            tokens = await run_in_threadpool(
                tokenized, self._tokenizer(asked), asked.prompt, add_special_tokens=special
            )
        length = self.engine.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, http: Request) -> Response:
        """Text of token ids, special ones included."""
        asked = DetokenizeRequest.model_validate_json(await http.body())
        decode = self._tokenizer(asked).decode
        return JSONResponse(
            {"prompt": await run_in_threadpool(decode, asked.tokens, skip_special_tokens=False)}
        )

    def _tokenizer(self, asked: ToModel) -> Tokenizer:
        self._check_model(asked)
        if self.engine.model.tokenizer is None:
            raise RequestError("this model has no tokenizer")
        return self.engine.model.tokenizer

    def _check_model(self, asked: ToModel) -> None:
        if asked.model not in (None, self.name):
            message = f"model {asked.model!r:.80} is not served here, {self.name!r} is"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    async def _answer(self, http: Request, asked: Asked) -> Response:
        """Asks the engine for what a client wants."""
        self._check_model(asked)
        # Templates and tokenizers may take long, and other clients should not wait for them.
        requests = await run_in_threadpool(
            asked.engine_requests, self.engine.model, self.engine.max_model_len
        )
        reply = reply_to(asked, self.name, self.engine.model.tokenizer, requests)
        answers = Answers.begun(self.engine, requests, self.metrics)
        if asked.stream:
            return EventStream(answers, reply, asked.stream_options.include_usage)
        return await _whole(http, answers, reply)


async def _whole(http: Request, answers: Answers, reply: Reply) -> Response:
    """The answer when all of it is there; gives up where the client goes before."""
    watch = asyncio.create_task(_gone(http))
    # What is given up ends too, so that nobody waits for it. What has ended already is not affected.
    watch.add_done_callback(lambda _: answers.cancel())
    try:
        async for index, event in answers.events():
            reply.take(index, event)
    finally:
        watch.cancel()
    return JSONResponse(reply.whole())


async def _gone(http: Request) -> None:
    """Ends when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Answers as server-sent events, as they come. However the stream ends, nothing is left in the engine."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, reply: Reply, include_usage: bool):
        super().__init__(_events(answers, reply, include_usage), headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def _events(answers: Answers, reply: Reply, include_usage: bool) -> AsyncIterator[bytes]:
    """The status went out before, so that an error is an event too, and the last but one."""
    try:
        async for index, event in answers.events():
            if (chunk := reply.chunk(index, event)) is not None:
                yield _event(to_json(chunk))
        if include_usage:
            yield _event(to_json(reply.last_chunk()))
    except RequestError as error:
        yield _event(to_json(error.body))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
