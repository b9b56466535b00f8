"""Incremental reader of one tool call, such as `{"name": "add", "arguments": {"a": 1}}`."""

import json
import re
from collections.abc import Collection, Generator
from typing import Any, Literal

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
LONGEST_NAME = 256
NAME = re.compile(r"[\w.-]+")

Program = Generator[None, str, None]
"""Reader that is sent one character at a time and ends with the call."""


class CallReader:
    """Incremental reader of one call.

    Arguments are passed on as the model writes them, so that a client can show them while they grow. Line
    breaks and tabs inside strings, which JSON forbids, are escaped.

    Args:
      known: names that a call may have; None for any.
      named: read `add{"a": 1}` instead of a JSON object with the name and the arguments.

    Attributes:
      name: name of the function; None until it was read.
      state: `failed` at a character that cannot continue the call.
    """

    def __init__(self, known: Collection[str] | None, *, named: bool = False):
        self.name: str | None = None
        self.state: Literal["reading", "done", "failed"] = "reading"
        self._known, self._arguments = known, ""
        self._has_arguments = False
        self._program = self._read_named() if named else self._read_object()
        next(self._program)

    def feed(self, text: str) -> int:
        """Read text and return how many characters belong to the call."""
        for index, char in enumerate(text):
            try:
                self._program.send(char)
            except StopIteration:
                self.state = "done"
                return index + 1
            except ValueError:
                self.state = "failed"
                return index
        return len(text)

    def take_arguments(self) -> str:
        """Return the JSON text of arguments that was read since the last time."""
        text, self._arguments = self._arguments, ""
        return text

    def _read_object(self) -> Program:
        """Read an object with a name and arguments in any order; other members are skipped."""
        if (yield) != "{":
            raise ValueError("a call is a JSON object")
        char = yield from _skip_space()
        while char != "}":
            key = JsonValue()
            yield from key.read(char)
            if (yield from _skip_space()) != ":":
                raise ValueError("a colon follows a key")
            char = yield from _skip_space()
            after = yield from self._read_member(json.loads(key.text), char)
            char = after if after and not after.isspace() else (yield from _skip_space())
            if char == ",":
                char = yield from _skip_space()
            elif char != "}":
                raise ValueError("a comma or the end follows a member")
        if self.name is None:
            raise ValueError("a call has a name")
        if not self._has_arguments:
            self._arguments = "{}"

    def _read_named(self) -> Program:
        """Read a name and an object; text in brackets between them (`[CALL_ID]…[ARGS]`) is skipped."""
        name = ""
        while (char := (yield)) != "{":
            name += char
            if char == "\n" or len(name) > LONGEST_NAME:
                raise ValueError("arguments follow a name")
        if not NAME.fullmatch(name := name.partition("[")[0].strip()):
            raise ValueError("a name is one word")
        self._begin(name)
        yield from self._read_member(ARGUMENT_KEYS[0], char)

    def _read_member(self, key: str, char: str) -> Generator[None, str, str]:
        """Read the value of a member from its first character; return what `JsonValue.read` returns."""
        value = JsonValue()
        if key in ARGUMENT_KEYS and char == "{":
            self._has_arguments = True
            return (yield from value.read(char, self))
        after = yield from value.read(char)
        if key in ARGUMENT_KEYS:
            self._has_arguments = True
            self._arguments += _normalize(value.text)
        elif key in NAME_KEYS and isinstance(name := json.loads(value.text), str):
            self._begin(name)
        return after

    def add_arguments(self, text: str) -> None:
        """Add JSON text of arguments."""
        self._arguments += text

    def _begin(self, name: str) -> None:
        if not name or (self._known is not None and name not in self._known):
            raise ValueError(f"{name!r} is not a tool")
        self.name = self.name or name


class JsonValue:
    """Scanner for the end of a JSON value.

    Attributes:
      text: text of the value, with escaped control characters.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def read(self, char: str, listener: CallReader | None = None) -> Generator[None, str, str]:
        """Read a value that starts with `char`; return the character after a number or word, otherwise "".

        Args:
          char: first character.
          listener: reader that gets the text while it is read.

        Raises:
          ValueError: brackets do not match.
        """
        while True:
            if not (self._in_string or self._closers) and self._parts and (char in ",}]" or char.isspace()):
                return char
            text = json.dumps(char)[1:-1] if self._in_string and char < " " else char
            ended = self._ends(char)
            self._parts.append(text)
            if listener is not None:
                listener.add_arguments(text)
            if ended:
                return ""
            char = yield

    def _ends(self, char: str) -> bool:
        """Update the state by a character; return whether it ends a string, list or object."""
        if self._in_string:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._in_string = False
                return not self._closers
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if not self._closers or self._closers.pop() != char:
                raise ValueError("brackets do not match")
            return not self._closers
        return False


def _skip_space() -> Generator[None, str, str]:
    """Return the next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _normalize(text: str) -> str:
    """Return arguments that are not written as an object as JSON text of an object where possible."""
    value = json.loads(text)
    if value is None:
        return "{}"
    return value if isinstance(value, str) and parse_object(value) is not None else text


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; return None if the text is something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
