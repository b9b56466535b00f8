"""What `generate` and `stream` give back."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Timings:
    """Seconds of wall time that the host asked and waited, without what it makes of the tokens.

    Where tokens come in pieces the device is at the next one meanwhile. `compile` is the part of both others
    that XLA took where a shape was new.
    """

    prefill: float
    decode: float
    compile: float

    def tokens_per_second(self, tokens: int) -> float:
        """Decode rate; the first token of each row belongs to prefill."""
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
    """One piece of a stream: row of the prompt, new token ids and text, and why the row ended (else None)."""

    row: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
