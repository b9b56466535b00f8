"""Routes of the server: OpenAI's completions, chats and models, and those of vLLM."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from zdc_jax.engine.request import Serving
from zdc_jax.generation.request import tokenized
from zdc_jax.generation.shaping import check_in_vocabulary
from zdc_jax.generation.token_bytes import get_token_bytes
from zdc_jax.server.answers import Answers
from zdc_jax.server.api_keys import make_guard
from zdc_jax.server.body import Body, ModelRequest, read_body, show
from zdc_jax.server.errors import HANDLERS, RequestError, report_errors_of
from zdc_jax.server.keep_alive import keep_alive
from zdc_jax.server.metrics import Metrics
from zdc_jax.server.page import show_page
from zdc_jax.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from zdc_jax.server.replies import ChatReply, CompletionReply, Reply
from zdc_jax.server.response_reply import ResponseReply
from zdc_jax.server.responses import ResponseRequest

NewReply = Callable[..., Reply | ResponseReply]

MAX_BODY_BYTES = 2**24
"""Largest request; larger ones are refused."""
LARGE_BODY_BYTES = 2**16
"""Size from which bodies are read in a thread: one of megabytes may take seconds."""
GENERATION: dict[str, tuple[type[GenerationRequest | ResponseRequest], NewReply]] = {
    "/v1/completions": (CompletionRequest, CompletionReply),
    "/v1/chat/completions": (ChatRequest, ChatReply),
    "/v1/responses": (ResponseRequest, ResponseReply),
}
"""Bodies and replies of the paths that generate text."""


def make_app(
    engine: Serving,
    *,
    name: str,
    aliases: Sequence[str] = (),
    api_keys: Collection[str] = (),
) -> Starlette:
    """Return the server as an ASGI application.

    Set `app.state.closing` when the server accepts no more requests.

    Args:
      engine: engine that answers requests; the caller closes it.
      name: name of the model in the API and in metrics.
      aliases: further names of the model in the API.
      api_keys: keys of which clients must send one, except to `/`, `/health`, `/ping` and `/metrics`.

    Raises:
      ValueError: a key is empty.
    """
    api = Api(engine, (name, *aliases), Metrics(engine, name))
    app = Starlette(routes=api.routes(make_guard(api_keys)), exception_handlers=HANDLERS)
    app.state.closing = False
    return app


@dataclass(frozen=True)
class Api:
    """Handlers of the routes.

    Attributes:
      engine: engine that answers requests.
      names: names of the model in the API.
      metrics: metrics of the server.
    """

    engine: Serving
    names: tuple[str, ...]
    metrics: Metrics

    def routes(self, guard: Sequence[Middleware]) -> list[Route]:
        """Return the routes; clients pass `guard` first, except where programs watch the server."""
        return [
            Route("/", show_page),
            *(
                Route(path, partial(self.answer, body, reply), methods=["POST"], middleware=guard)
                for path, (body, reply) in GENERATION.items()
            ),
            Route("/v1/embeddings", self.refuse_embeddings, methods=["POST"], middleware=guard),
            Route("/v1/models", self.models, middleware=guard),
            Route("/v1/models/{model:path}", self.model, middleware=guard),
            Route("/version", self.version, middleware=guard),
            Route("/tokenizer_info", self.tokenizer_info, middleware=guard),
            Route("/tokenize", self.tokenize, methods=["POST"], middleware=guard),
            Route("/detokenize", self.detokenize, methods=["POST"], middleware=guard),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/metrics", self.show_metrics),
        ]

    async def answer(
        self, kind: type[GenerationRequest | ResponseRequest], new_reply: NewReply, http: Request
    ) -> Response:
        """Submit a request to the engine, and answer whole or as a stream."""
        body = await self._read(kind, http)
        self._check_model(body.model)
        if isinstance(body, GenerationRequest):
            body.check_answers(self.engine.max_requests)
        # Templates and tokenizers may take long, and must not block other clients.
        requests = await run_in_threadpool(body.engine_requests, self.engine.model, self.engine.max_model_len)
        reply = new_reply(body.model or self.names[0], self.engine.model, body, requests)
        answers = Answers(self.engine, requests, self.metrics)
        return EventStream(answers, reply) if body.stream else await _answer_whole(http, answers, reply)

    async def refuse_embeddings(self, http: Request) -> Response:
        """Refuse by name what clients expect of servers with OpenAI's API."""
        raise RequestError("/v1/embeddings: this server generates text only; use a server for embeddings")

    async def models(self, http: Request) -> Response:
        """List the served model under each of its names."""
        return JSONResponse({"object": "list", "data": [self._describe_model(name) for name in self.names]})

    async def model(self, http: Request) -> Response:
        """Describe the served model."""
        name = http.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._describe_model(name))

    def _describe_model(self, name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "zdc-jax"}
        return model | {"root": self.names[0], "max_model_len": self.engine.max_model_len}

    async def version(self, http: Request) -> Response:
        """Return the version of this package; `source` if it runs without being installed."""
        try:
            installed = version("zdc-jax")
        except PackageNotFoundError:
            installed = "source"
        return JSONResponse({"version": installed})

    async def tokenizer_info(self, http: Request) -> Response:
        """Return the special tokens and the chat template, under the names of tokenizer_config.json."""
        template = self.engine.model.chat_template
        tokens = {} if template is None else dict(template.special_tokens)
        source = None if template is None else template.source
        return JSONResponse(tokens | {"chat_template": source, "model_max_length": self.engine.max_model_len})

    async def health(self, http: Request) -> Response:
        """Answer 200 while the server accepts requests, otherwise 503."""
        return Response(status_code=503 if http.app.state.closing or self.engine.closing else 200)

    def show_metrics(self, http: Request) -> Response:
        """Return metrics in the Prometheus format."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, http: Request) -> Response:
        """Convert a text to token ids."""
        body = await self._read(TokenizeRequest, http)
        special = body.add_special_tokens
        with report_errors_of("prompt"):
            tokens = await run_in_threadpool(
                tokenized, self._get_tokenizer(body), body.prompt, add_special_tokens=special
            )
        length = self.engine.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, http: Request) -> Response:
        """Convert token ids, special ones included, to text."""
        body = await self._read(DetokenizeRequest, http)
        join = get_token_bytes(self._get_tokenizer(body)).join
        with report_errors_of("tokens"):
            check_in_vocabulary("tokens", body.tokens, self.engine.model)
        return JSONResponse({"prompt": await run_in_threadpool(join, body.tokens)})

    async def _read[AnyBody: Body](self, kind: type[AnyBody], http: Request) -> AnyBody:
        """Read the body of a request; raise `RequestError` if it is too large or a field is wrong."""
        if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
            raise RequestError(f"Content-Encoding: {encoding} is not supported; send plain JSON", status=415)
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise RequestError(f"the body has more than {MAX_BODY_BYTES:,} bytes; send less", status=413)
        if len(data) < LARGE_BODY_BYTES:
            return read_body(kind, bytes(data))
        return await run_in_threadpool(read_body, kind, bytes(data))

    def _get_tokenizer(self, body: ModelRequest) -> Tokenizer:
        self._check_model(body.model)
        if self.engine.model.tokenizer is None:
            raise RequestError("this model has no tokenizer, which /tokenize and /detokenize need")
        return self.engine.model.tokenizer

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = " or ".join(map(show, self.names))
            message = f"model={show(name)} is not served here; the only model is {served}"
            raise RequestError(message, status=404, param="model", code="model_not_found")


async def _answer_whole(http: Request, answers: Answers, reply: Reply | ResponseReply) -> Response:
    """Return the complete answer; cancel it if the client disconnects before."""
    watch = asyncio.create_task(_wait_for_disconnect(http))
    # Cancelled requests end with an event, so the loop below ends, too. Ended requests are unaffected.
    watch.add_done_callback(lambda _: answers.cancel())
    try:
        async for index, event in answers.events():
            reply.add(index, event)
    except RequestError:
        if watch.done():
            raise ClientDisconnect from None
        raise
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

    def __init__(self, answers: Answers, reply: Reply | ResponseReply):
        super().__init__(reply.stream(answers), headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with keep_alive(send) as send_or_beat:
                await super().__call__(scope, receive, send_or_beat)
        finally:
            self._answers.cancel()
