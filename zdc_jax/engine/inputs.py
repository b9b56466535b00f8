"""Inputs of an engine's programs: chunks to prefill and sequences to decode, packed into int32 numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from jaxtyping import Int

from zdc_jax.generation.next_token import Choice
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.shaping import SequenceShaping

NO_SLOT = 2**30
"""Slot of no snapshot, beyond all slots."""


@dataclass(frozen=True)
class ChunkInputs:
    """Inputs for one prefill chunk.

    Attributes:
      row: index of the sequence in the batch.
      tokens: token ids of the chunk.
      begin: position of the first token.
      last: whether the text ends with the chunk, so that a token is generated after it.
      numbers: packed request parameters (`pack_parameters`).
      choice: kind of program that chooses that token.
      shaping: changes of logits before that choice; None for no changes.
      following: token after the chunk, to score the token after each of the chunk's; None for no scores.
      mark: tokens of the sequence that a snapshot holds.
      tail: slot of that snapshot; None for no snapshot.
    """

    row: int
    tokens: Sequence[int]
    begin: int
    last: bool
    numbers: np.ndarray
    choice: Choice = "any"
    shaping: SequenceShaping | None = None
    following: int | None = None
    mark: int = 0
    tail: int | None = None

    @property
    def header(self) -> list[int]:
        """Numbers before the tokens in a packed chunk."""
        slot, count = NO_SLOT if self.tail is None else self.tail, len(self.tokens)
        needed_from = self.begin + (count - 1 if self.following is None else 0)
        return [self.row, self.begin, count, self.last, self.mark, slot, needed_from]


@dataclass
class DecodeInputs:
    """Inputs for decoding.

    Attributes:
      numbers: packed request parameters of each sequence (`pack_parameters`), [B, WIDTH] int32.
      active: sequences to decode, [B] bool.
      choice: kind of program that serves all of them.
      is_shaped: whether the logits of one of them are changed before its token is chosen.
    """

    numbers: np.ndarray
    active: np.ndarray
    choice: Choice
    is_shaped: bool = False

    @classmethod
    def empty(cls, rows: int) -> "DecodeInputs":
        """Return inputs of a batch without active sequences."""
        return cls(np.full((rows, WIDTH), -1, np.int32), np.zeros(rows, bool), "greedy")

    def add(self, row: int, numbers: np.ndarray, choice: Choice, is_shaped: bool = False) -> None:
        """Add the sequence at index `row` of the batch."""
        self.numbers[row], self.active[row] = numbers, True
        self.choice = max(choice, self.choice, key=get_args(Choice).index)
        self.is_shaped |= is_shaped

    def pack(self, count: int | None = None) -> Int[np.ndarray, "B 1+WIDTH"]:
        """Pack the inputs of the first `count` sequences for a program; default all."""
        active, numbers = self.active[:count, None], self.numbers[:count]
        return np.concatenate([active.astype(np.int32), numbers], axis=1)


def pack_chunks(chunks: Sequence[ChunkInputs], count: int, width: int, *, empty_row: int) -> np.ndarray:
    """Pack chunks for a program with `count` chunks of `width` tokens in total.

    Missing chunks are empty and have the batch index `empty_row`.
    """
    empty = [empty_row, 0, 0, False, 0, NO_SLOT, 0]
    headers = [chunk.header for chunk in chunks] + [empty] * (count - len(chunks))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return np.array([*itertools.chain(*headers), *tokens, *[0] * (width - len(tokens))], np.int32)
