"""What `generate` and `stream` give back."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Timings:
    """Seconds of wall time in which the host asked for tokens and waited for them.

    What the host makes of tokens is not among them, although the device may be at the next ones meanwhile:
    where a slow reader takes a stream's pieces, `decode` is less than the device took. `compile` is the part
    of both others that XLA took where a shape was new.
    """

    prefill: float
    decode: float
    compile: float

    def tokens_per_second(self, tokens: int) -> float:
        """Decode rate of `generate`; the first token of each row belongs to prefill."""
        return tokens / self.decode if self.decode > 0 else float("inf")


@dataclass(frozen=True)
class Completion:
    """What one prompt gave: token ids (with the stop token, if one ended it) and their text (without)."""

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


@dataclass(frozen=True)
class Generation:
    """Result of `generate`: one completion a prompt, KV cache bytes (all rows), timings."""

    completions: tuple[Completion, ...]
    kv_bytes: int
    capacity: int
    timings: Timings


@dataclass(frozen=True)
class Delta:
    """Part of a stream: index of the prompt, new token ids and text, and why it ended (else None)."""

    sequence: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
