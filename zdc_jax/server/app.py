"""Routes of the server: OpenAI's completions, chats and models, vLLM's tokenize, health and metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from zdc_jax.engine.request import Serving
from zdc_jax.generation.request import tokenized
from zdc_jax.server.answers import Answers
from zdc_jax.server.api_keys import make_guard
from zdc_jax.server.errors import HANDLERS, RequestError, report_errors_of
from zdc_jax.server.keep_alive import keep_alive
from zdc_jax.server.metrics import Metrics
from zdc_jax.server.page import show_page
from zdc_jax.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ModelRequest,
    TokenizeRequest,
)
from zdc_jax.server.replies import Reply, make_reply

MAX_BODY_BYTES = 2**24
"""Default limit on the size of a request."""


def make_app(
    engine: Serving, *, name: str, api_keys: Collection[str] = (), max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """Return the server as an ASGI application.

    Set `app.state.closing` when the server accepts no more requests.

    Args:
      engine: engine that answers requests; the caller closes it.
      name: name of the model in the API.
      api_keys: keys of which clients must send one, except to `/`, `/health` and `/metrics`.
      max_body_bytes: largest request; larger ones are refused.

    Raises:
      ValueError: a key is empty.
    """
    api = Api(engine, name, Metrics(engine, name))
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", api.health),
            Route("/metrics", api.show_metrics),
            Mount("/", routes=routes, middleware=make_guard(api_keys)),
        ],
        exception_handlers=HANDLERS,
        max_body_size=max_body_bytes,
    )
    app.state.closing = False
    return app


@dataclass(frozen=True)
class Api:
    """Handlers of the routes.

    Attributes:
      engine: engine that answers requests.
      name: name of the model in the API.
      metrics: metrics of the server.
    """

    engine: Serving
    name: str
    metrics: Metrics

    async def completions(self, http: Request) -> Response:
        """Continue prompts given as text or token ids."""
        return await self._answer(http, CompletionRequest.model_validate_json(await http.body()))

    async def chat_completions(self, http: Request) -> Response:
        """Answer the messages of a chat."""
        return await self._answer(http, ChatRequest.model_validate_json(await http.body()))

    async def models(self, http: Request) -> Response:
        """List the served model."""
        model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "zdc-jax"}
        model |= {"max_model_len": self.engine.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, http: Request) -> Response:
        """Answer 200 while the server accepts requests, otherwise 503."""
        return Response(status_code=503 if http.app.state.closing or self.engine.closing else 200)

    def show_metrics(self, http: Request) -> Response:
        """Return metrics in the Prometheus format."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, http: Request) -> Response:
        """Convert a text to token ids."""
        body = TokenizeRequest.model_validate_json(await http.body())
        special = body.add_special_tokens
        with report_errors_of("prompt"):
            tokens = await run_in_threadpool(
                tokenized, self._get_tokenizer(body), body.prompt, add_special_tokens=special
            )
        length = self.engine.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, http: Request) -> Response:
        """Convert token ids, special ones included, to text."""
        body = DetokenizeRequest.model_validate_json(await http.body())
        decode = self._get_tokenizer(body).decode
        return JSONResponse(
            {"prompt": await run_in_threadpool(decode, body.tokens, skip_special_tokens=False)}
        )

    def _get_tokenizer(self, body: ModelRequest) -> Tokenizer:
        self._check_model(body)
        if self.engine.model.tokenizer is None:
            raise RequestError("this model has no tokenizer, which /tokenize and /detokenize need")
        return self.engine.model.tokenizer

    def _check_model(self, body: ModelRequest) -> None:
        if body.model not in (None, self.name):
            message = f"model={body.model!r:.80} is not served here; the only model is {self.name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    async def _answer(self, http: Request, body: GenerationRequest) -> Response:
        """Submit a request to the engine, and answer whole or as a stream."""
        self._check_model(body)
        # Templates and tokenizers may take long, and must not block other clients.
        requests = await run_in_threadpool(body.engine_requests, self.engine.model, self.engine.max_model_len)
        reply = make_reply(body, self.name, self.engine.model.tokenizer, requests)
        answers = Answers.submit(self.engine, requests, self.metrics)
        if body.stream:
            return EventStream(answers, reply, body.stream_options.include_usage)
        return await _answer_whole(http, answers, reply)


async def _answer_whole(http: Request, answers: Answers, reply: Reply) -> Response:
    """Return the complete answer; cancel it if the client disconnects before."""
    watch = asyncio.create_task(_wait_for_disconnect(http))
    # Cancelled requests end with an event, so the loop below ends, too. Ended requests are unaffected.
    watch.add_done_callback(lambda _: answers.cancel())
    try:
        async for index, event in answers.events():
            reply.add(index, event)
    finally:
        watch.cancel()
    return JSONResponse(reply.whole())


async def _wait_for_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Response that streams answers as server-sent events.

    However the stream ends, its requests are cancelled in the engine.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, reply: Reply, include_usage: bool):
        super().__init__(_stream_events(answers, reply, include_usage), headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with keep_alive(send) as send_or_beat:
                await super().__call__(scope, receive, send_or_beat)
        finally:
            self._answers.cancel()


async def _stream_events(answers: Answers, reply: Reply, include_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events.

    The status has been sent before, so an error is an event, too, followed by the final `[DONE]`.
    """
    try:
        async for index, event in answers.events():
            if (chunk := reply.chunk(index, event)) is not None:
                yield _format_event(to_json(chunk))
        if include_usage:
            yield _format_event(to_json(reply.last_chunk()))
    except RequestError as error:
        yield _format_event(to_json(error.body))
    yield _format_event(b"[DONE]")


def _format_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
