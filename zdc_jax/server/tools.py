"""Tools in OpenAI's format: definitions in requests, and calls in replies."""

import secrets
import string
from collections.abc import Collection
from typing import Any, ClassVar, Literal

from pydantic import Field
from tokenizers import Tokenizer

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.conversation.tools.formats import FORMATS, find_format
from zdc_jax.conversation.tools.parser import CallDelta, ToolDelta, ToolFormat, ToolParser
from zdc_jax.engine.request import Event
from zdc_jax.generation.request import list_special_tokens
from zdc_jax.server.body import Body, JsonObject
from zdc_jax.server.errors import RequestError
from zdc_jax.server.fields import IGNORED_IN_MESSAGES

ID_LENGTH = 9
"""Characters of a call's id; templates of Mistral accept no other length."""


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""Schema of a tool without parameters, for chat templates."""


class FunctionDefinition(Body):
    """Definition of a function.

    Attributes:
      name: name of the function.
      description: what the function does.
      parameters: JSON schema of the arguments; None for no arguments.
    """

    ignored: ClassVar = frozenset({"strict"})

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(Body):
    """Tool that a model may call."""

    ignored: ClassVar = IGNORED_IN_MESSAGES

    type: Literal["function"]
    function: FunctionDefinition

    def to_template(self) -> dict[str, Any]:
        """Convert to the format of chat templates."""
        function = self.function.model_dump(exclude_none=True)
        function["parameters"] = self.function.parameters or NO_PARAMETERS
        return {"type": self.type, "function": function}


class FunctionName(Body):
    """Name of a function."""

    name: str = Field(min_length=1)


class NamedTool(Body):
    """Choice of one tool, which the model must call."""

    type: Literal["function"]
    function: FunctionName


def require_format(template: ChatTemplate) -> ToolFormat:
    """Return the format of calls that a chat template teaches; raise `RequestError` if it teaches none."""
    source = template.for_tools()
    format = find_format(source.source) if "tools" in source.variables else None
    if format is None:
        names = ", ".join(each.name for each in FORMATS)
        raise RequestError(
            f"tools: the chat template of this model teaches no supported format of calls ({names}); "
            "leave tools out, or use another model",
            param="tools",
        )
    return format


class ToolOutput:
    """Reader of the content and calls of one answer.

    Args:
      format: format of the calls.
      tokenizer: tokenizer of the model.
      tools: tools that the model may call.
      parallel: report all calls, not only the first.
    """

    def __init__(self, format: ToolFormat, tokenizer: Tokenizer, tools: Collection[Tool], *, parallel: bool):
        special = list_special_tokens(tokenizer)
        self._tokenizer, self._parallel = tokenizer, parallel
        self._marks = {special[mark]: mark for mark in format.marks if mark in special}
        self._parser = ToolParser(format, {tool.function.name for tool in tools})

    def read(self, event: Event) -> ToolDelta:
        """Return the content and the calls that an event completes."""
        deltas = [self._parser.feed(self._insert_marks(event))]
        if event.finish_reason is not None:
            deltas.append(self._parser.finish())
        calls = [call for delta in deltas for call in delta.calls if self._parallel or call.index == 0]
        return ToolDelta("".join(delta.content for delta in deltas), tuple(calls))

    def _insert_marks(self, event: Event) -> str:
        """Return the text of an event with those marks of calls that are special tokens."""
        text = event.text or ""
        length = len(text)
        for index in reversed(range(len(event.tokens))):
            if mark := self._marks.get(event.tokens[index]):
                # Earlier events may have held back text, so the text after the mark is measured.
                at = max(0, length - len(self._tokenizer.decode(event.tokens[index + 1 :])))
                text = text[:at] + mark + text[at:]
        return text


def format_call_delta(call: CallDelta) -> dict[str, Any]:
    """Format a part of a call for a streamed chunk; the first part has an id and the name."""
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    named = {"name": call.name} | function
    return {"index": call.index, "id": make_call_id(), "type": "function", "function": named}


def format_calls(calls: Collection[CallDelta]) -> list[dict[str, Any]]:
    """Format all parts of calls as whole calls."""
    whole: list[dict[str, Any]] = []
    for call in calls:
        part = format_call_delta(call)
        if part.pop("index") == len(whole):
            whole.append(part)
        else:
            whole[call.index]["function"]["arguments"] += call.arguments
    return whole


def make_call_id() -> str:
    """Return a random id of `ID_LENGTH` letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
