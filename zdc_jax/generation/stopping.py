"""End of a sequence: at a stop token, before a stop string, or at its token limit."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from zdc_jax.generation.detokenise import Detokeniser
from zdc_jax.generation.results import Completion, Delta, FinishReason


class StopStrings:
    """Strings that end a sequence and are not part of its text."""

    def __init__(self, strings: Sequence[str] = ()):
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, searched: int = 0) -> int | None:
        """Return the position of the first stop string in `text`, or None.

        The first `searched` characters are known to contain no stop string.
        """
        start = max(0, searched - self._longest + 1)
        positions = (text.find(string, start) for string in self._strings)
        return min((position for position in positions if position >= 0), default=None)

    def count_safe(self, text: str) -> int:
        """Count the characters of `text` before a suffix that may become a stop string.

        The text must not contain a stop string.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)


class OutputSequence:
    """Tokens and text generated for one prompt.

    A sequence ends with the first token after which its text contains a stop string; its text ends before
    that string. Without a tokenizer there is no text.

    Args:
      index: index of the prompt.
      tokenizer: tokenizer of the model, or None.
      stop_ids: token ids that end the sequence.
      stop: strings that end the sequence.
      before: tokens that the text continues; none for a text of its own.
      min_tokens: fewest tokens before a stop token or stop string may end the sequence.

    Attributes:
      index: index of the prompt.
      min_tokens: fewest tokens before a stop token or stop string may end the sequence.
      tokens: generated token ids.
      finish_reason: reason why the sequence ended; None while it continues.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
        stop: StopStrings,
        *,
        before: Sequence[int],
        min_tokens: int = 0,
    ):
        self.index, self.min_tokens = index, min_tokens
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer, before)
        self._stop_ids, self._stop = frozenset(stop_ids), stop
        self._text = ""
        self._shown = 0

    def append(self, tokens: Sequence[int], *, full: bool, complete: bool = False) -> Delta | None:
        """Add new tokens and return what can be shown now, or None for nothing.

        Must not be called after the sequence has ended.

        Args:
          tokens: new token ids; only the last one may be a stop token.
          full: whether the sequence has reached its token limit.
          complete: whether the sequence belongs to its grammar and nothing may follow.
        """
        before = len(self.tokens)
        stopped = bool(tokens) and tokens[-1] in self._stop_ids and before + len(tokens) >= self.min_tokens
        if (end := self._add_until_stop(tokens[:-1] if stopped else tokens)) is not None:
            self._end("stop", end)
        elif stopped:
            self.tokens.append(tokens[-1])
            self._end("stop")
        elif complete:
            self._end("stop")
        elif full:
            self._end("length")
        new, text = tuple(self.tokens[before:]), self._show()
        return Delta(self.index, new, text, self.finish_reason) if new or text or self.finish_reason else None

    def completion(self) -> Completion:
        """Return the result of a sequence that has ended."""
        assert self.finish_reason is not None
        text = None if self._detokeniser is None else self._text
        return Completion(tuple(self.tokens), text, self.finish_reason)

    def _add_until_stop(self, tokens: Sequence[int]) -> int | None:
        """Add tokens up to the first that completes a stop string; return its position in the text."""
        if self._detokeniser is None or not self._stop:
            self._add(tokens)
            return None
        for token in tokens:
            searched = len(self._text)
            self._add([token])
            end = self._stop.find(self._text + self._detokeniser.tail(), searched)
            if end is not None and len(self.tokens) >= self.min_tokens:
                return end
        return None

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if self._detokeniser is not None:
            self._text += self._detokeniser.feed(tokens)

    def _end(self, reason: FinishReason, end: int | None = None) -> None:
        """Set the finish reason and cut the text at `end`; None keeps all of it."""
        self.finish_reason = reason
        if self._detokeniser is not None:
            self._text = (self._text + self._detokeniser.tail())[:end]

    def _show(self) -> str | None:
        """Return text not shown before, without a suffix that may become a stop string."""
        if self._detokeniser is None:
            return None
        end = len(self._text) if self.finish_reason else self._stop.count_safe(self._text)
        text, self._shown = self._text[self._shown : end], end
        return text
