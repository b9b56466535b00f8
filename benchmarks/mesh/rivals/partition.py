"""Pieces of a prompt, one for each of several devices, and a table of them by length (KV-Runahead §4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from zdc_jax.errors import MeshError


@dataclass(frozen=True)
class Partition:
    """Tokens of each device's piece of a prompt; pieces follow one another by position.

    Raises:
      MeshError: no device, or a device without a token.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise MeshError(f"tokens={self.tokens} must give at least one device at least one token each")

    @classmethod
    def even(cls, length: int, devices: int) -> Self:
        """KVR-E: pieces alike, the first ones longer by a token where devices do not divide length.

        Raises:
          MeshError: fewer tokens than devices, or no device.
        """
        if not 1 <= devices <= length:
            raise MeshError(f"{length} tokens cannot be divided over {devices=}: each needs one")
        each, more = divmod(length, devices)
        return cls((each + 1,) * more + (each,) * (devices - more))

    @classmethod
    def ending_at(cls, ends: Sequence[int]) -> Self:
        """Inverse of `ends`. Raises `MeshError` where these do not ascend from 1 or more."""
        return cls(tuple(int(end - start) for start, end in zip((0, *ends), ends, strict=False)))

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, padding of its rows included."""
        return sum(self.tokens)

    @property
    def ends(self) -> tuple[int, ...]:
        """Of each piece, the position behind its last token."""
        return tuple(accumulate(self.tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return max(self.tokens)

    @property
    def padding(self) -> tuple[int, ...]:
        """Rows that each device computes for nothing where all pieces are padded to the longest."""
        return tuple(self.longest - count for count in self.tokens)

    @property
    def starts(self) -> tuple[int, ...]:
        """Of each piece, the position of its first token."""
        return (0, *self.ends[:-1])

    def check(self, *, devices: int, length: int, capacity: int) -> None:
        """Raises `MeshError` unless this divides `length` tokens over `devices` and `capacity` holds them."""
        if len(self.tokens) != devices or self.length != length:
            raise MeshError(f"partition={self} must divide {length} tokens over {devices} devices")
        if length > capacity:
            raise MeshError(f"{capacity=} must be >= the {length} tokens of the prompts, padding included")


def interpolated(table: Sequence[Partition], length: int) -> Partition:
    """KVR-P: shares of a length between those of the two nearest in a table of searched partitions.

    Linear in the length (§4.2; §5, "Context-level Partitioning"), constant outside the table.

    Raises:
      MeshError: an empty table, partitions of different numbers of devices, fewer tokens than devices.
    """
    degrees = sorted({len(partition.tokens) for partition in table})
    if len(degrees) != 1:
        raise MeshError(f"table must hold partitions of one number of devices, it has {degrees}")
    [degree] = degrees
    if length < degree:
        raise MeshError(f"{length=} must be >= 1 token for each of {degree} devices")
    known = sorted(table, key=lambda partition: partition.length)
    lengths = [partition.length for partition in known]
    shares = np.array([partition.ends for partition in known]) / np.array(lengths)[:, None]
    share = np.array([np.interp(length, lengths, column) for column in shares.T])
    index = np.arange(degree)
    # Rounded ends may coincide, but every piece needs a token.
    ends = np.maximum.accumulate(np.maximum(np.rint(share * length).astype(int), 1) - index) + index
    return Partition.ending_at(np.minimum(ends, length - degree + 1 + index).tolist())


def cache_slots(partition: Partition, sinks: int, capacity: int) -> tuple[int, ...]:
    """Tokens that the caches of each device have room for, in eights; `capacity` on the last device.

    Of the others as few as hold their tokens (and the sinks, which are read together): all slots travel.
    """
    least = (max(end, sinks) for end in partition.ends[:-1])
    return (*(min(in_eights(count), capacity) for count in least), capacity)


def in_eights(tokens: int) -> int:
    """Slots for so many tokens in a cache that kernels can read."""
    return -(-tokens // 8) * 8
