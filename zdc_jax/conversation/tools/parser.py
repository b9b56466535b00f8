"""Incremental parser of replies: text in, content and tool calls out."""

from collections.abc import Collection
from dataclasses import dataclass

from zdc_jax.conversation.tools.call_reader import CallReader
from zdc_jax.generation.stopping import StopStrings

SEPARATORS = ",;[]"
"""Characters between calls, and around lists of calls."""


@dataclass(frozen=True)
class ToolFormat:
    """Format in which a family of models writes tool calls.

    Calls are JSON objects, alone or in lists. A reply that starts with a call of a known tool needs no mark.

    Attributes:
      name: name of the format.
      starts: marks before calls.
      end: mark after calls; None if nothing follows them.
      named: a call may be its name followed by its arguments, as in `add{"a": 1}`.
      listed: models write all calls as one list after a single mark, rather than one by one.
      arguments: key of the arguments in a call.
    """

    name: str
    starts: tuple[str, ...]
    end: str | None = None
    named: bool = False
    listed: bool = False
    arguments: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return self.starts if self.end is None else (*self.starts, self.end)


@dataclass(frozen=True)
class CallDelta:
    """Part of a tool call.

    Attributes:
      index: index of the call in the reply.
      name: name of the tool, in the first part of a call only.
      arguments: JSON text that continues the arguments.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """Content and calls that new text completes."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolParser:
    """Incremental parser of one reply.

    What looks like a call but is none becomes content. White space before a call, separators between calls,
    and anything between a call and its end mark are dropped. So is a further call that the end of the reply
    cuts off before its name. Any division of a reply gives the same content and calls.

    Args:
      format: format of the calls.
      names: names of the tools.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]):
        self._format, self._names = format, names
        self._buffer = ""
        self._final = False
        self._read = self._read_start
        self._content = ""
        self._calls: list[CallDelta] = []
        self._count = 0
        # A group of calls begins at a start mark or at the start of the reply.
        self._reader: CallReader | None = None
        self._unclaimed = ""  # Text of the group that belongs to no call yet.
        self._marked = self._claimed = False  # Whether the group has a mark, and a call.

    def feed(self, text: str) -> ToolDelta:
        """Add text and return what is certain now."""
        self._buffer += text
        return self._advance()

    def finish(self) -> ToolDelta:
        """Return the rest, after the last text."""
        self._final = True
        return self._advance()

    def _advance(self) -> ToolDelta:
        while self._read():
            pass
        delta = ToolDelta(self._content, tuple(self._calls))
        self._content, self._calls = "", []
        return delta

    # Each method that `_read` may be returns whether to go on, or to wait for more text.

    def _read_start(self) -> bool:
        """Decide whether the reply starts with a call."""
        text = self._buffer.lstrip()
        if not self._final and any(mark.startswith(text) for mark in self._format.starts):
            return False
        if text.startswith(("{", "[")) and not text.startswith(self._format.starts):
            return self._enter_group(len(self._buffer) - len(text), marked=False)
        self._read = self._read_content
        return True

    def _read_content(self) -> bool:
        """Pass on content up to the next start mark."""
        if found := self._find_first(self._format.starts):
            at, mark = found
            blank = at - len(self._buffer[:at].rstrip())
            self._pass_on(at - blank)
            return self._enter_group(blank + len(mark), marked=True)
        if not self._final:
            self._pass_on(self._count_safe())
        elif self._buffer.strip() or not self._count:
            self._pass_on(len(self._buffer))
        return False

    def _read_group(self) -> bool:
        """Read calls and the separators between them."""
        text, marks = self._buffer, self._format.marks
        if any(mark.startswith(text) for mark in marks):
            if not self._final:
                return False
            if self._claimed:  # The end of the reply cuts a mark, which is no content.
                self._take(len(text))
                return self._leave_group()
        if self._format.end is not None and text.startswith(self._format.end):
            self._take(len(self._format.end))
            return self._leave_group()
        if not text or text.startswith(marks):
            return self._leave_group()
        if text[0].isspace() or text[0] in SEPARATORS:
            self._take(1)
            return True
        named = self._format.named and self._marked and not self._claimed and text[0] != "{"
        if not named and text[0] != "{":
            return self._leave_group(skip=self._marked and self._claimed)
        self._reader = CallReader(None if self._marked else self._names, named=named)
        self._read = self._read_call
        return True

    def _read_call(self) -> bool:
        """Read a call as far as it goes."""
        reader = self._reader
        assert reader is not None
        begun = reader.name is not None
        self._take(reader.feed(self._buffer))
        if reader.name is not None:
            self._unclaimed, self._claimed, self._count = "", True, self._count + (not begun)
            arguments = reader.take_arguments()
            if arguments or not begun:
                self._calls.append(CallDelta(self._count - 1, None if begun else reader.name, arguments))
        if reader.state == "done":
            self._read = self._read_group
            return True
        if reader.state == "reading" and not self._final:
            return False
        self._release()
        return self._leave_group(skip=self._marked and reader.name is not None)

    def _skip_to_end(self) -> bool:
        """Drop text between a call and its end mark; without that mark it is content."""
        found = self._find_first(self._format.marks)
        if found is None and not self._final:
            return False
        if found is not None and found[1] == self._format.end:
            self._buffer = self._buffer[found[0] + len(found[1]) :]
        self._read = self._read_content
        return True

    def _enter_group(self, count: int, *, marked: bool) -> bool:
        """Begin to read calls after the next `count` characters."""
        self._take(count)
        self._marked, self._claimed, self._read = marked, False, self._read_group
        return True

    def _leave_group(self, *, skip: bool = False) -> bool:
        """Read content next, or skip to the end mark with `skip`."""
        if not self._claimed:
            self._release()
        self._unclaimed = ""
        self._read = self._skip_to_end if skip and self._format.end is not None else self._read_content
        return True

    def _release(self) -> None:
        """Pass on text that belongs to no call, unless the reply ends in the beginning of a further call."""
        if not (self._final and self._marked and self._count and not self._buffer):
            self._content += self._unclaimed
        self._unclaimed = ""

    def _take(self, count: int) -> None:
        self._unclaimed, self._buffer = self._unclaimed + self._buffer[:count], self._buffer[count:]

    def _pass_on(self, count: int) -> None:
        self._content, self._buffer = self._content + self._buffer[:count], self._buffer[count:]

    def _find_first(self, marks: tuple[str, ...]) -> tuple[int, str] | None:
        """Return the position of the first mark in the buffer, and the mark."""
        return min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)

    def _count_safe(self) -> int:
        """Count the characters of the buffer before white space and the part of a mark that may follow it."""
        safe = StopStrings(self._format.starts).count_safe(self._buffer)
        return len(self._buffer[:safe].rstrip())
