"""Messages of a chat in OpenAI's format, with tool calls, and their conversion for chat templates."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import model_validator

from zdc_jax.conversation.template import Message
from zdc_jax.conversation.tools.call_reader import parse_object
from zdc_jax.server.body import Body, Items, JsonObject, make_refusal
from zdc_jax.server.fields import IGNORED_IN_MESSAGES


class Part(Body):
    """Part of a text; subclasses have a `type`."""

    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, part: Any) -> Any:
        """Raise an error about the type of an image, before its other fields are refused as unknown."""
        types = get_args(cls.model_fields["type"].annotation)
        if isinstance(part, dict) and part.get("type", types[0]) not in types:
            raise make_refusal(
                "type", f'is not supported: this model reads text only; send parts of type "{types[0]}"'
            )
        return part


class TextPart(Part):
    """Part of a message's text."""

    ignored: ClassVar = IGNORED_IN_MESSAGES

    type: Literal["text"]


def join_parts(text: str | Sequence[Part] | None) -> str:
    """Return a text, with one line for each part."""
    return text if isinstance(text, str) else "\n".join(part.text for part in text or ())


class FunctionCall(Body):
    """Function that a tool call names.

    Attributes:
      name: name of the function.
      arguments: arguments as JSON text, or as an object.
    """

    ignored: ClassVar = IGNORED_IN_MESSAGES

    name: str
    arguments: str | JsonObject = ""

    def to_template(self) -> dict[str, Any]:
        """Convert to the format of templates, which expect an object of arguments.

        Text that is not a JSON object stays text: models make such calls, and clients send them back.
        """
        arguments = self.arguments or {}
        if isinstance(arguments, str) and (parsed := parse_object(arguments)) is not None:
            arguments = parsed
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """Call of a tool in an assistant's message.

    Attributes:
      id: id that the message with the result repeats.
      type: kind of tool.
      function: the function and its arguments.
    """

    ignored: ClassVar = IGNORED_IN_MESSAGES | {"index"}

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """Message of a chat.

    Attributes:
      role: author of the message; `developer` means `system`.
      content: text, or a list of text parts; may be absent from messages of assistants and tools.
      tool_calls: calls of an assistant's message.
      tool_call_id: id of the call that a tool's message answers.
      name: name of the tool.
      reasoning_content: an assistant's thoughts before its reply.
      reasoning: newer name of `reasoning_content`.
    """

    ignored: ClassVar = IGNORED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise make_refusal("content", f'is required in messages of role "{self.role}"')
        if self.tool_calls and self.role != "assistant":
            raise make_refusal("tool_calls", 'is for messages of role "assistant" only')
        if self.tool_call_id is not None and self.role != "tool":
            raise make_refusal("tool_call_id", 'is for messages of role "tool" only')
        return self

    def to_template(self) -> Message:
        """Convert to the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": join_parts(self.content)}
        if self.role == "tool":
            message |= self.model_dump(include={"tool_call_id", "name"}, exclude_none=True)
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.to_template()}
                for call in self.tool_calls
            ]
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts
        return message
