"""Text of a growing row of tokens, piece by piece.

The method of offsets of vLLM and text-generation-inference: the last few tokens are decoded again before
the new ones, and what they gave is cut off. `tokenizers.decoders.DecodeStream` is not used: where a tokenizer
falls back to bytes it gives a character before later bytes make it invalid, and then raises; and it decodes a
long run of broken characters anew for each token.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 4
"""Tokens decoded again before new ones. A character that is not finished has at most 3 bytes, so it begins
within the last 3 tokens; and the first word, whose space some decoders strip, is not among the new ones."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokeniser:
    """Gives the text of one row's tokens as they come.

    All that `feed` has given and `tail` together equal `tokenizer.decode` of all tokens. Two things wait:
    half a character at the end, and tokens that are one byte each (`<0xE2>`) until another token ends their
    run, since one invalid byte changes the text of the whole run. `feed` decodes at most 2 `CONTEXT` tokens
    beside the new ones, so each token a bounded number of times.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = {token for token, kind in added.items() if kind.special}
        self._context: list[int] = []
        self._context_text = ""
        self._given = 0  # Characters of `_context_text` that `feed` has given.
        self._bytes: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """New text after some more token ids; those that are special or unknown have none."""
        heard = [(token, name) for token in tokens if (name := self._name(token)) is not None]
        ready = len(heard)
        while ready and _BYTE.fullmatch(heard[ready - 1][1]):
            ready -= 1
        new = [token for token, _ in heard]
        if not ready:
            self._bytes += new
            return ""
        window = self._context + self._bytes + new[:ready]
        self._bytes = new[ready:]
        text = self._tokenizer.decode(window)
        piece = text[self._given : _finished(text)]
        self._context = window[-CONTEXT:]
        self._context_text = self._tokenizer.decode(self._context)
        self._given = _finished(self._context_text)
        return piece

    def tail(self) -> str:
        """Text of what waits, if the row ends here; takes nothing away."""
        text = self._tokenizer.decode(self._context + self._bytes) if self._bytes else self._context_text
        return text[self._given :]

    def _name(self, token: int) -> str | None:
        return None if token in self._silent else self._tokenizer.id_to_token(token)


def _finished(text: str) -> int:
    """Characters before half a one at the end, which decodes to one U+FFFD."""
    return len(text) - text.endswith("\ufffd")
