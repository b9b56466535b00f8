"""Response of /v1/responses: output items that grow with the answer, and the events of a stream."""

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zdc_jax.engine.request import EngineRequest, Event
from zdc_jax.loading import TextModel
from zdc_jax.server.answers import Answers
from zdc_jax.server.body import Body
from zdc_jax.server.errors import RequestError
from zdc_jax.server.replies import Answer, AnswerPart, format_event
from zdc_jax.server.responses import ResponseRequest
from zdc_jax.server.spelling import Speller
from zdc_jax.server.tools import make_call_id

StreamEvent = dict[str, Any]


@dataclass
class OutputItem:
    """Message or tool call of a response.

    Attributes:
      id: id of the item.
      index: index of the item in the output.
      name: name of the tool; None for a message.
      call_id: id of the call.
      text: text of a message, or JSON text of arguments, so far.
      status: `in_progress`, `completed` or `incomplete`.
    """

    id: str
    index: int
    name: str | None = None
    call_id: str = ""
    text: str = ""
    status: str = "in_progress"

    @property
    def part(self) -> dict[str, Any]:
        """The only part of a message's content."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def format(self) -> dict[str, Any]:
        """Format the item for an event or a response."""
        if self.name is None:
            content = [self.part] if self.text else []
            item = {"type": "message", "role": "assistant", "content": content}
        else:
            item = {
                "type": "function_call",
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
        return {"id": self.id, "status": self.status} | item


class ResponseReply:
    """Builder of a response and of its events.

    Args:
      name: name of the model in the API.
      model: model that answers.
      body: body of the client's request.
      requests: its only engine request.
    """

    def __init__(self, name: str, model: TextModel, body: ResponseRequest, requests: Sequence[EngineRequest]):
        (self._request,) = requests
        self._name, self._body = name, body
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._answer = Answer(
            speller=Speller(model.tokenizer, self._request), tools=body.make_tool_output(model)
        )
        self._items, self._numbers = list[OutputItem](), itertools.count()

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        """Yield server-sent events, each with its type as the name."""
        try:
            for kind in ("response.created", "response.in_progress"):
                yield _name_event(self._make_event(kind, response=self.whole()))
            async for index, event in answers.events():
                for each in self.add(index, event):
                    yield _name_event(each)
        except RequestError as error:
            yield _name_event(
                self._make_event("error", code=error.code, message=str(error), param=error.param)
            )

    def add(self, index: int, event: Event) -> list[StreamEvent]:
        """Add an event of the engine request, whose index is 0, and return the events for the client."""
        return list(self._grow(self._answer.add(event)))

    def _grow(self, part: AnswerPart) -> Iterator[StreamEvent]:
        """Add a part of the answer to the items."""
        if part.text:
            yield from self._open(None)
            yield self._extend(part.text)
        for call in part.calls:
            if call.name is not None:
                yield from self._open(call.name)
            if call.arguments:
                yield self._extend(call.arguments)
        if part.finish_reason is not None:
            status = "completed" if part.finish_reason == "stop" else "incomplete"
            yield from self._close(status)
            yield self._make_event(f"response.{status}", response=self.whole())

    def whole(self) -> dict[str, Any]:
        """Return the response so far."""
        body, answer = self._body, self._answer
        choice, form = body.tool_choice, body.text.format
        status = {None: "in_progress", "stop": "completed"}.get(answer.finish_reason, "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._name,
            "output": [item.format() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": form.type} | form.model_dump(by_alias=True, exclude_defaults=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.model_dump() | {"strict": False} for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if answer.finish_reason is None else self._count_tokens(),
        }

    def _count_tokens(self) -> dict[str, Any]:
        prompt, answer = len(self._request.prompt), self._answer
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer.tokens,
        }

    def _open(self, name: str | None) -> Iterator[StreamEvent]:
        """Begin a message or a call, unless the last item is a message that goes on."""
        if name is None and self._items and self._items[-1].name is None:
            return
        yield from self._close("completed")
        prefix, call_id = ("msg", "") if name is None else ("fc", make_call_id())
        item = OutputItem(f"{prefix}_{secrets.token_hex(12)}", len(self._items), name, call_id)
        self._items.append(item)
        yield self._make_event("response.output_item.added", output_index=item.index, item=item.format())
        if name is None:
            yield self._make_item_event("response.content_part.added", content_index=0, part=item.part)

    def _extend(self, text: str) -> StreamEvent:
        """Add text to the last item."""
        item = self._items[-1]
        item.text += text
        if item.name is not None:
            return self._make_item_event("response.function_call_arguments.delta", delta=text)
        return self._make_item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """End the last item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        if item.name is None:
            kind = "response.output_text.done"
            yield self._make_item_event(kind, content_index=0, text=item.text, logprobs=[])
            yield self._make_item_event("response.content_part.done", content_index=0, part=item.part)
        else:
            kind = "response.function_call_arguments.done"
            yield self._make_item_event(kind, name=item.name, arguments=item.text)
        yield self._make_event("response.output_item.done", output_index=item.index, item=item.format())

    def _make_item_event(self, kind: str, **fields: Any) -> StreamEvent:
        item = self._items[-1]
        return self._make_event(kind, item_id=item.id, output_index=item.index, **fields)

    def _make_event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": kind, "sequence_number": next(self._numbers)} | fields


def _name_event(event: StreamEvent) -> bytes:
    return format_event(event, event["type"])
