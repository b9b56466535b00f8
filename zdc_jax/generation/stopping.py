"""Where a row ends: at a stop token, before a stop string, or at its limit."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from zdc_jax.generation.detokenise import Detokeniser
from zdc_jax.generation.results import Completion, Delta, FinishReason


class StopStrings:
    """Strings that end a row and are no part of its text."""

    def __init__(self, strings: Sequence[str] = ()):
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, searched: int = 0) -> int | None:
        """Where the first of them begins; the first `searched` characters are known to hold none."""
        start = max(0, searched - self._longest + 1)
        places = (text.find(string, start) for string in self._strings)
        return min((place for place in places if place >= 0), default=None)

    def safe(self, text: str) -> int:
        """Characters of `text`, which holds none, before what may become one."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)


class Row:
    """What one prompt has given so far, and why it ended (else None).

    A row ends with its first token after which the text of all holds a stop string; the text ends before it.
    Without a tokenizer there is no text. least: tokens that must be there before a stop token or string ends
    the row.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
        stop: StopStrings,
        least: int = 0,
    ):
        self.index, self.least = index, least
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer)
        self._stop_ids, self._stop = frozenset(stop_ids), stop
        self._text = ""
        self._shown = 0

    def take(self, tokens: Sequence[int], *, full: bool) -> Delta | None:
        """Adds new tokens, of which only the last may end the row; gives what can be shown, if anything.

        full: the row has as many as it may have. A row that has ended takes no more.
        """
        before = len(self.tokens)
        stopped = bool(tokens) and tokens[-1] in self._stop_ids and before + len(tokens) >= self.least
        if (end := self._read(tokens[:-1] if stopped else tokens)) is not None:
            self._end("stop", end)
        elif stopped:
            self.tokens.append(tokens[-1])
            self._end("stop")
        elif full:
            self._end("length")
        new, text = tuple(self.tokens[before:]), self._show()
        return Delta(self.index, new, text, self.finish_reason) if new or text or self.finish_reason else None

    def completion(self) -> Completion:
        """All of a row that has ended."""
        assert self.finish_reason is not None
        text = None if self._detokeniser is None else self._text
        return Completion(tuple(self.tokens), text, self.finish_reason)

    def _read(self, tokens: Sequence[int]) -> int | None:
        """Adds tokens up to one that completes a stop string; gives where in the text that begins."""
        if self._detokeniser is None or not self._stop:
            self._add(tokens)
            return None
        for token in tokens:
            searched = len(self._text)
            self._add([token])
            end = self._stop.find(self._text + self._detokeniser.tail(), searched)
            if end is not None and len(self.tokens) >= self.least:
                return end
        return None

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if self._detokeniser is not None:
            self._text += self._detokeniser.feed(tokens)

    def _end(self, reason: FinishReason, end: int | None = None) -> None:
        """end: where the text does; None for at its last character."""
        self.finish_reason = reason
        if self._detokeniser is not None:
            self._text = (self._text + self._detokeniser.tail())[:end]

    def _show(self) -> str | None:
        """Text that was not shown before, up to what may become a stop string."""
        if self._detokeniser is None:
            return None
        end = len(self._text) if self.finish_reason else self._stop.safe(self._text)
        piece, self._shown = self._text[self._shown : end], end
        return piece
