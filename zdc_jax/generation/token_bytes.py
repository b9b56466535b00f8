"""Bytes of single tokens: what each token of a vocabulary adds to a text.

`Tokenizer.decode` on single tokens loses text. Many decoders strip the space of a first word, and a part of a
character becomes U+FFFD. The bytes come from the vocabulary instead, and joined bytes are the whole text.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """Bytes of the tokens of one tokenizer; get it from `get_token_bytes`.

    Byte-level BPE and SentencePiece (byte fallback, Metaspace) are read from the vocabulary. Tokens of other
    decoders are decoded in context.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: each.content.encode() for token, each in added.items() if each.special}
        self._added = {token: each.content for token, each in added.items() if not each.special}
        self._steps = list(_list_steps(tokenizer.decoder))
        self._read = self._choose_reader()
        self._known: dict[tuple[int, bool], bytes] = {}
        self._has_text: dict[int, bool] = {}  # Every token of every answer is looked up.

    def has_text(self, token: int) -> bool:
        """Return whether a token is part of a text: neither special nor outside the vocabulary."""
        if (known := self._has_text.get(token)) is None:
            known = token not in self._special and self._tokenizer.id_to_token(token) is not None
            self._has_text[token] = known
        return known

    def get(self, token: int, *, first: bool) -> bytes:
        """Return the bytes of a token: parts of UTF-8 text, or the name of a special token.

        Args:
          token: token id; ids outside the vocabulary have no bytes.
          first: whether no token with text precedes it. SentencePiece drops the space of a first word.
        """
        if (data := self._known.get((token, first))) is None:
            data = self._read(token, first) if self.has_text(token) else self._special.get(token, b"")
            self._known[token, first] = data
        return data

    def join(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """Return the text of `tokens` after `before`, with special tokens; broken characters are U+FFFD."""
        data, first = bytearray(), not any(map(self.has_text, before))
        for token in tokens:
            data += self.get(token, first=first)
            first = first and not self.has_text(token)
        return data.decode(errors="replace")

    def _choose_reader(self) -> Callable[[int, bool], bytes]:
        kinds = [step["type"] for step in self._steps]
        if "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Fuse"}:
            return self._read_byte_level
        if {*kinds} & {"Replace", "Metaspace"} and {*kinds} <= _SENTENCEPIECE_STEPS:
            return self._read_sentencepiece
        return self._read_in_context

    def _read_byte_level(self, token: int, _first: bool) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token) or ""
        if any(letter not in _BYTE_OF_LETTER for letter in name):
            return name.encode()
        return bytes(_BYTE_OF_LETTER[letter] for letter in name)

    def _read_sentencepiece(self, token: int, first: bool) -> bytes:
        text, strips, is_byte = self._tokenizer.id_to_token(token) or "", 0, False
        for step in self._steps:
            if step["type"] == "ByteFallback" and (byte := _BYTE.fullmatch(text)):
                text, is_byte = chr(int(byte[1], 16)), True
            if step["type"] == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            elif step["type"] == "Metaspace":
                text, strips = text.replace(step["replacement"], " "), step["prepend_scheme"] != "never"
            elif step["type"] == "Strip":
                strips = step["start"]
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, strips) if first else 0 :].encode("latin-1" if is_byte else "utf-8")

    def _read_in_context(self, token: int, first: bool) -> bytes:
        """Decode a token after itself, since decoders of words treat the first token differently."""
        alone = self._tokenizer.decode([token])
        return (alone if first else self._tokenizer.decode([token, token])[len(alone) :]).encode()


@lru_cache(maxsize=8)
def get_token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens; the result is shared, and fills as tokens are read."""
    return TokenBytes(tokenizer)


def _list_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder of `tokenizers`, in order; none for a tokenizer without a decoder."""
    nested = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while nested:
        step = nested.pop(0)
        if step["type"] == "Sequence":
            nested = [*step["decoders"], *nested]
        else:
            yield step


def _map_letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level BPE, as in GPT-2.

    Printable bytes are their own letters. The others, in order, are the letters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _map_letters()
