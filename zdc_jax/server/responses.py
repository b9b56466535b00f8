"""Body of /v1/responses, which is answered as a chat. Responses are not stored."""

import re
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from zdc_jax.engine.request import EngineRequest
from zdc_jax.loading import TextModel
from zdc_jax.server.body import Body, Items, StreamedRequest, make_refusal
from zdc_jax.server.errors import RequestError
from zdc_jax.server.fields import IGNORED_IN_MESSAGES, IGNORED_IN_RESPONSES, REFUSED_IN_RESPONSES
from zdc_jax.server.messages import Part, join_parts
from zdc_jax.server.protocol import ChatRequest
from zdc_jax.server.structured import JsonSchema
from zdc_jax.server.tools import FunctionDefinition, ToolOutput

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "function.parameters": "parameters",
}
"""Names in this API of fields of a chat."""


class ResponsePart(Part):
    """Part of an item's text."""

    ignored: ClassVar = IGNORED_IN_MESSAGES | {"logprobs"}

    type: Literal["input_text", "output_text", "text"]


Text = str | Items[ResponsePart]


class InputItem(Body):
    """Message, call of a tool, result of a call, or reasoning of another model, which is ignored.

    Attributes:
      type: kind of the item.
      role: author of a message.
      content: text of a message.
      call_id: id of a call.
      name: name of the tool of a call.
      arguments: arguments of a call as JSON text.
      output: result of a call.
    """

    ignored: ClassVar = IGNORED_IN_MESSAGES | {"id", "status", "phase", "summary", "encrypted_content"}
    needed: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        needed = self.needed[self.type]
        for name in dict.fromkeys(name for names in self.needed.values() for name in names):
            value = getattr(self, name)
            if value is None if name in needed else value not in (None, []):
                verb = "is required" if name in needed else "is not a field"
                raise make_refusal(name, f'{verb} of items of type "{self.type}"')
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the item to the messages of a chat; calls belong to the assistant's message before them."""
        if self.type == "message":
            messages.append({"role": self.role, "content": join_parts(self.content)})
        elif self.type == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": self.call_id, "content": join_parts(self.output)}
            )
        elif self.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            messages[-1].setdefault("tool_calls", []).append(call)


class ResponseTool(FunctionDefinition):
    """Tool that a model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, tool: Any) -> Any:
        """Name the type of a tool that the server would have to provide, before its fields."""
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise make_refusal("type", "must be 'function'")
        return tool

    def to_chat(self) -> dict[str, Any]:
        """Convert to a tool of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedResponseTool(Body):
    """Choice of one tool, which the model must call."""

    type: Literal["function"]
    name: str = Field(min_length=1)

    def to_chat(self) -> dict[str, Any]:
        """Convert to a choice in a chat."""
        return {"type": "function", "function": {"name": self.name}}


class TextFormat(JsonSchema):
    """Format of the text, with the fields of a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def to_chat(self) -> dict[str, Any]:
        """Convert to the response format of a chat."""
        schema = self.model_dump(exclude={"type"}, by_alias=True)
        return {"type": self.type} | ({"json_schema": schema} if self.type == "json_schema" else {})


class TextOptions(Body):
    """Options of the text."""

    refused: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat()


class Reasoning(Body):
    """Options of reasoning."""

    ignored: ClassVar = frozenset({"summary", "generate_summary"})

    effort: str | None = None


class ResponseRequest(StreamedRequest):
    """Body of /v1/responses.

    Attributes:
      input: text of a user, or items, oldest first.
      instructions: system message.
      max_output_tokens: most tokens of the response.
      temperature: softmax temperature; 0 is greedy decoding.
      top_p: probability of the set of most likely tokens to sample from.
      seed: seed of the response; null for a random seed.
      tools: tools that the model may call.
      tool_choice: `none` hides the tools from the model, `required` makes it call one, and an object makes it
        call the tool of this name; None means `auto`.
      parallel_tool_calls: report all calls, not only the first.
      text: format of the text.
      reasoning: options of reasoning.
    """

    refused: ClassVar = REFUSED_IN_RESPONSES
    ignored: ClassVar = IGNORED_IN_RESPONSES

    input: str | Items[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    tools: Items[ResponseTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Reasoning()

    @cached_property
    def chat(self) -> ChatRequest:
        """The body as a chat; raises `RequestError` for fields that contradict each other."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        for item in items:
            item.add_to(messages)
        if self.instructions is not None:
            system = {"role": "system", "content": self.instructions}
            if messages and messages[0]["role"] in ("system", "developer"):  # Templates accept a single one.
                system["content"] += "\n\n" + messages.pop(0)["content"]
            messages.insert(0, system)
        if not messages:
            raise RequestError("input=[] must have at least 1 item", param="input")
        same_fields = self.model_dump(include={"temperature", "top_p", "seed", "parallel_tool_calls"})
        return ChatRequest.model_validate(
            same_fields
            | {
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "tools": [tool.to_chat() for tool in self.tools],
                "tool_choice": choice.to_chat() if isinstance(choice := self.tool_choice, Body) else choice,
                "response_format": self.text.format.to_chat(),
                "reasoning_effort": self.reasoning.effort,
            }
        )

    def engine_requests(self, model: TextModel, max_model_len: int) -> list[EngineRequest]:
        """Return the engine request of the chat; errors have the names of this API."""
        try:
            return self.chat.engine_requests(model, max_model_len)
        except RequestError as error:
            error.param, error.args = error.param and _rename(error.param), (_rename(str(error)),)
            raise

    def make_tool_output(self, model: TextModel) -> ToolOutput | None:
        """Return a reader for the calls of the chat's answer."""
        return self.chat.make_tool_output(model)


def _rename(text: str) -> str:
    """Return a text about a chat with the names of this API."""
    names = re.compile(rf"\b({'|'.join(map(re.escape, CHAT_FIELDS))})\b")
    return names.sub(lambda found: CHAT_FIELDS[found[0]], text)
