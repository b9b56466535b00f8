"""Tokens with log-probabilities as clients see them: their bytes, and their places in the text."""

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from zdc_jax.engine.request import EngineRequest, TokenLogprobs
from zdc_jax.generation.detokenise import Detokeniser


@dataclass(frozen=True)
class SpelledToken:
    """Token with its log-probabilities.

    Attributes:
      data: bytes of the token, which may be a part of a character.
      logprob: its log-probability; None for the first token of a prompt.
      top: bytes and log-probabilities of the most likely tokens at its position.
      offset: characters of the text before the token, or before the character that it continues.
    """

    data: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class Speller:
    """Speller of the tokens of one answer, in order.

    Args:
      tokenizer: tokenizer of the model; None spells tokens by their ids.
      request: the request.
      echoed: text of the prompt, if the answer starts with it.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: EngineRequest, echoed: str = ""):
        self._echoed, self._length = echoed, 0
        self._prompt = self._answer = None
        if tokenizer is not None:
            self._prompt = Detokeniser(tokenizer)
            self._answer = Detokeniser(tokenizer, () if request.new_text else request.prompt)

    def spell_prompt(self, tokens: Iterable[TokenLogprobs]) -> list[SpelledToken]:
        """Return the spelled tokens of an echoed prompt."""
        return [self._spell(self._prompt, token) for token in tokens]

    def spell_answer(self, tokens: Iterable[TokenLogprobs]) -> list[SpelledToken]:
        """Return the next spelled tokens of the answer."""
        self._length = max(self._length, len(self._echoed))
        return [self._spell(self._answer, token) for token in tokens]

    def _spell(self, detokeniser: Detokeniser | None, each: TokenLogprobs) -> SpelledToken:
        def spell(token: int) -> bytes:
            data = b"" if detokeniser is None else detokeniser.spell(token)
            return data or f"token_id:{token}".encode()

        data = spell(each.token)
        top = tuple((spell(token), logprob) for token, logprob in each.top)
        text, place = ("", 0) if detokeniser is None else detokeniser.place(each.token)
        offset = self._length + place
        # A client may spell special tokens in a prompt. They are in the echoed text, and in no other.
        if not text and self._echoed.startswith(name := data.decode(errors="ignore"), self._length):
            text = name
        self._length += len(text)
        return SpelledToken(data, each.logprob, top, offset)
