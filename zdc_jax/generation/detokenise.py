"""Incremental detokenization: the text of a growing sequence of tokens.

This is the offset method of vLLM and text-generation-inference. The last few tokens are decoded again
together with the new ones, and the text that they already produced is cut off.

`tokenizers.decoders.DecodeStream` is not used. With byte-fallback tokenizers it emits a character that later
bytes make invalid, and then raises. It also decodes a long run of broken characters again for each token.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 4
"""Tokens that are decoded again together with new ones.

An unfinished character has at most 3 bytes, so it starts within the last 3 tokens. One token more ensures
that new tokens never come first: some decoders strip the space of the first word.
"""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokeniser:
    """Incremental detokenizer of one sequence.

    All texts from `feed` and the final `tail`, joined, equal `tokenizer.decode` of all tokens. Two things are
    withheld until they are complete:

    - an unfinished character at the end;
    - a run of byte tokens (`<0xE2>`), because one invalid byte changes the text of the whole run.

    Each `feed` decodes at most 2 `CONTEXT` tokens in addition to the new ones.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, properties in added.items() if properties.special}
        self._context: list[int] = []
        self._context_text = ""
        self._emitted = 0  # Characters of `_context_text` that `feed` has returned.
        self._pending_bytes: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """Add token ids and return the new text; special and unknown ids have no text."""
        named = [(token, name) for token in tokens if (name := self._name(token)) is not None]
        ready = len(named)
        while ready and _BYTE.fullmatch(named[ready - 1][1]):
            ready -= 1
        new = [token for token, _ in named]
        if not ready:
            self._pending_bytes += new
            return ""
        window = self._context + self._pending_bytes + new[:ready]
        self._pending_bytes = new[ready:]
        text = self._tokenizer.decode(window)
        new_text = text[self._emitted : _finished_length(text)]
        self._context = window[-CONTEXT:]
        self._context_text = self._tokenizer.decode(self._context)
        self._emitted = _finished_length(self._context_text)
        return new_text

    def tail(self) -> str:
        """Return the withheld text, as if the sequence ended here; the state does not change."""
        pending = self._pending_bytes
        text = self._tokenizer.decode(self._context + pending) if pending else self._context_text
        return text[self._emitted :]

    def _name(self, token: int) -> str | None:
        return None if token in self._special else self._tokenizer.id_to_token(token)


def _finished_length(text: str) -> int:
    """Return the length of `text` without an unfinished last character, which decodes to one U+FFFD."""
    return len(text) - text.endswith("\ufffd")
