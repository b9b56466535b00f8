"""JSON bodies of requests: their base classes, and errors that name the field and the cause."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from zdc_jax.server.errors import RequestError
from zdc_jax.server.fields import IGNORED_IN_STREAMS

LONGEST_VALUE = 60
"""Most characters of a value in an error."""
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "refused": "unsupported_parameter",
}
"""OpenAI's codes of pydantic's kinds of errors."""


def _require_finite(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object; raise `ValueError` if one of its numbers is infinite or NaN."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("must have finite numbers only") from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_require_finite)]
"""JSON object with any content, which other programs may read."""


type Items[Item] = Annotated[list[Item], Field(fail_fast=True)]
"""JSON array of which only the first wrong item is described: millions would block the event loop long."""


class Body(BaseModel):
    """JSON object of a request. Null means that a field is absent, and numbers in quotes are refused.

    Attributes:
      refused: fields that would change the answer and are not implemented, with the values without effect.
      ignored: fields without effect.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _keep_effective(cls, body: Any) -> Any:
        """Leave out fields without effect, and unknown ones after the first.

        Raise for fields of `refused` with any other value.
        """
        if not isinstance(body, dict):
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or (name not in names and name in cls.ignored):
                continue
            if name in names:
                kept[name] = value
            elif name not in cls.refused:
                unknown = unknown or {name: value}
            elif value not in cls.refused[name]:
                todo = " or ".join(["leave it out", *(f"send {show(each)}" for each in cls.refused[name])])
                raise make_refusal(name, f"is not supported; {todo}")
        return kept | unknown


class ModelRequest(Body):
    """Body that may name a model.

    Attributes:
      model: name of the served model, or None.
    """

    model: str | None = None


class StreamOptions(Body):
    """Options of a streamed answer.

    Attributes:
      include_usage: send a last chunk with token counts.
    """

    refused: ClassVar = {"continuous_usage_stats": (False,)}
    ignored: ClassVar = IGNORED_IN_STREAMS

    include_usage: bool = False


class StreamedRequest(ModelRequest):
    """Body whose answer may be a stream.

    Attributes:
      stream: send the answer as server-sent events.
      stream_options: options of the stream, for streams only.
    """

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options != StreamOptions() and not self.stream:
            message = f"stream_options={show(self.stream_options.model_dump())} needs stream=true"
            raise RequestError(message, param="stream_options")
        return self


def make_refusal(field: str, cause: str) -> PydanticCustomError:
    """Return an error for validators of a `Body`, about one of its fields.

    Args:
      field: name of the field.
      cause: phrase that continues a sentence about the field, such as "must be positive".
    """
    return PydanticCustomError("refused", "{cause}", {"field": field, "cause": cause})


def read_body[AnyBody: Body](kind: type[AnyBody], data: bytes) -> AnyBody:
    """Read a body from JSON.

    Raises:
      RequestError: the data are not valid JSON, or a field is wrong.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(f"the body is not valid JSON: {first['ctx']['error']}") from error
        raise describe_invalid(error, from_json(data), kind) from error


@dataclass(frozen=True)
class Finding:
    """Finding of pydantic about one field.

    Attributes:
      path: names and indexes that lead to the field.
      value: value of the field; None if it is missing.
      union: length of the path to the union that the finding belongs to; None outside unions.
      kind: pydantic's name of the error.
      cause: what is wrong with the value.
    """

    path: tuple[str | int, ...]
    value: Any
    union: int | None
    kind: str
    cause: str

    @classmethod
    def locate(cls, details: ErrorDetails, body: Any) -> "Finding":
        """Find the field in the body; pydantic's location also has names of branches of unions."""
        path: list[str | int] = []
        union, value, kind = None, body, details["type"]
        absent = kind in ("missing", "refused")
        steps = details["loc"] if kind != "refused" else (*details["loc"], details["ctx"]["field"])
        for count, step in enumerate(steps, 1):
            if isinstance(value, dict) and (step in value or (absent and count == len(steps))):
                value = value.get(step)
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                union = len(path) if union is None else union
                continue
            path.append(step)
        return cls(tuple(path), value, union, kind, _describe_cause(details))

    @property
    def depth(self) -> tuple[int, int]:
        """Depth to which a branch of a union matched: levels, then the index in the last list."""
        last = self.path[-1] if self.path else 0
        return len(self.path), last if isinstance(last, int) else 0


def describe_invalid(error: ValidationError, body: Any, kind: type[Body]) -> RequestError:
    """Convert the first of pydantic's findings to a `RequestError`.

    Of a union, the branch that matched furthest is described.

    Args:
      error: pydantic's findings.
      body: JSON value of the whole body.
      kind: class of the body.
    """
    findings = [Finding.locate(details, body) for details in error.errors(include_url=False)]
    first = findings[0]
    chosen = [first]
    if first.union is not None:
        union = first.union, first.path[: first.union]
        branches = [each for each in findings if (each.union, each.path[: each.union]) == union]
        deepest = max(branches, key=lambda each: each.depth).path
        chosen = [each for each in branches if each.path == deepest]
        # A branch of the right type describes the value better than branches of other types.
        chosen = [each for each in chosen if not each.kind.endswith("_type")] or chosen
    first, causes = chosen[0], list(dict.fromkeys(each.cause for each in chosen))
    if not first.path:
        return RequestError(f"the body {causes[0]}")
    place = format_path(first.path)
    value = "" if first.kind == "missing" else f"={show(first.value)}"
    message = f"{place}{value} {_join_causes(causes)}"
    if first.kind == "extra_forbidden" and len(first.path) == 1:
        similar = get_close_matches(place, kind.model_fields, n=1)
        message += f", or send {similar[0]}" if similar else ""
    return RequestError(message, param=place, code=CODES.get(first.kind))


def _describe_cause(details: ErrorDetails) -> str:
    """Return a phrase that continues a sentence about the field."""
    match details["type"]:
        case "extra_forbidden":
            return "is not a field of this API; leave it out"
        case "missing":
            return "is required"
        case "model_type":
            return "must be a JSON object"
    message = details["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return re.sub(r"^\w+ should ", "must ", message)


def _join_causes(causes: Sequence[str]) -> str:
    """Join causes of several branches of a union: "must be a string or a list"."""
    first, *others = causes
    if all(each.startswith("must be ") for each in causes):
        return " or ".join([first, *(each.removeprefix("must be ") for each in others)])
    return " or ".join(causes)


def format_path(path: Sequence[str | int]) -> str:
    """Format names and indexes as in OpenAI's errors: `messages[0].content`; long names are cut."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:LONGEST_VALUE]}" for step in path)
    return "".join(steps).removeprefix(".")


def show(value: Any) -> str:
    """Format a value as JSON for an error; a long one ends after a whole word."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    return text[: text.rfind(" ", 0, LONGEST_VALUE) if " " in text[:LONGEST_VALUE] else LONGEST_VALUE] + " …"
