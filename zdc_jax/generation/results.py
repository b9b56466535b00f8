"""Results of `generate` and `stream`."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Timings:
    """Wall time of one call, in seconds.

    Each stage counts the time in which the host requested tokens and waited for them. Detokenization is not
    counted. The device may compute ahead while a slow reader consumes a stream, so `decode` may be less than
    the device needed.

    Attributes:
      prefill: time for the prompts, up to the first token of each.
      decode: time for all further tokens.
      compile: part of both other times that XLA spent compiling new shapes.
    """

    prefill: float
    decode: float
    compile: float

    def tokens_per_second(self, tokens: int) -> float:
        """Return the decode rate of `tokens` tokens.

        The first token of each completion belongs to prefill and should not be counted.
        """
        return tokens / self.decode if self.decode > 0 else float("inf")


@dataclass(frozen=True)
class Completion:
    """Completion of one prompt.

    Attributes:
      tokens: generated token ids, including the stop token if one ended the completion.
      text: what the tokens add to the text of the prompt, without the stop token or stop string; None without
        a tokenizer.
      finish_reason: `stop` after a stop token or stop string, `length` at the token limit.
    """

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


@dataclass(frozen=True)
class Generation:
    """Result of `generate`.

    Attributes:
      completions: one for each prompt, in order.
      kv_bytes: size of the KV cache of the whole batch, in bytes.
      capacity: tokens of cache reserved for each sequence.
      timings: wall time of prefill, decoding and compilation.
    """

    completions: tuple[Completion, ...]
    kv_bytes: int
    capacity: int
    timings: Timings


@dataclass(frozen=True)
class Delta:
    """New part of one completion in a stream.

    Attributes:
      sequence: index of the prompt.
      tokens: new token ids.
      text: new text; None without a tokenizer.
      finish_reason: reason why the completion ended; None while it continues.
    """

    sequence: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
