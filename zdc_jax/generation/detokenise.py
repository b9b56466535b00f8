"""Incremental detokenization: the text of a growing sequence of tokens, and the place of each token in it."""

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from zdc_jax.generation.token_bytes import get_token_bytes

CONTEXT = 3
"""Tokens of a prompt that matter to the text after it: an unfinished character has at most 3 bytes."""


class Detokeniser:
    """Incremental detokenizer of one sequence.

    All texts from `feed` and the final `tail`, joined, are the tokens' bytes read as UTF-8. Invalid bytes
    become U+FFFD as in Python. An unfinished character at the end is withheld.

    Args:
      tokenizer: tokenizer of the model.
      before: tokens that the text continues. A character that is unfinished there belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._bytes = get_token_bytes(tokenizer)
        self._first = not any(map(self._bytes.has_text, before))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(before[-CONTEXT:])

    def feed(self, tokens: Sequence[int]) -> str:
        """Add token ids and return the new text; special and unknown ids have no text."""
        data = [self._take(token) for token in tokens if self._bytes.has_text(token)]
        return self._decoder.decode(b"".join(data))

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token that comes next: of its text, or of the name of a special token."""
        return self._bytes.get(token, first=self._first)

    def place(self, token: int) -> tuple[str, int]:
        """Add a token; return the new text and the place of the token in it.

        The place is the number of new characters before the character with the token's first byte.
        """
        if not self._bytes.has_text(token) or not (data := self._take(token)):
            return "", 0
        text = self._decoder.decode(data[:1])
        unfinished, _ = self._decoder.getstate()
        return text + self._decoder.decode(data[1:]), len(text) - (not unfinished)

    def tail(self) -> str:
        """Return the withheld text, as if the sequence ended here; the state does not change."""
        unfinished, _ = self._decoder.getstate()
        return unfinished.decode(errors="replace")

    def _take(self, token: int) -> bytes:
        first, self._first = self._first, False
        return self._bytes.get(token, first=first)
