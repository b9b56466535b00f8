"""x"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from scipy.optimize import nnls

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


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of one device for t tokens after s: call + token · t + past · t s + own · t² (§3, and a floor).

    `token` stands for all products with weights, `past` and `own` for attention on earlier tokens and on the
    piece itself.
    """

    call: float
    token: float
    past: float
    own: float

    @classmethod
    def fit(cls, seconds: Mapping[Partition, float]) -> Self:
        """Least squares of relative errors, no term below 0.

        Args:
          seconds: that one device takes for all pieces of a partition, one by one.

        Raises:
          ValueError: the partitions do not tell the four terms apart, or a time is not above 0.
        """
        rows = np.array([_terms(partition).sum(0) for partition in seconds]).reshape(-1, 4)
        times = np.array(list(seconds.values()))
        if not (times > 0).all():
            raise ValueError(f"seconds={times.tolist()} must all be > 0")
        scale = np.maximum(rows.max(0, initial=0), 1)
        if np.linalg.matrix_rank(rows / scale) < 4:
            raise ValueError(f"seconds must tell 4 terms apart, got partitions {list(seconds)}")
        found, _ = nnls(rows / scale / times[:, None], np.ones(len(times)))
        return cls(*(found / scale).tolist())

    def of(self, start: int, tokens: int) -> float:
        """Of one piece, all layers together."""
        return self.call + (self.token + self.past * start + self.own * tokens) * tokens

    def seconds(self, partition: Partition) -> list[float]:
        """Of each piece, all layers together."""
        return [self.of(*piece) for piece in zip(partition.starts, partition.tokens, strict=True)]


def _terms(partition: Partition) -> np.ndarray:
    """What the coefficients of `ChunkCost` are multiplied with [U, 4]."""
    t, s = np.array(partition.tokens, float), np.array(partition.starts, float)
    return np.stack([np.ones_like(t), t, t * s, t * t], 1)


Link = Callable[[int], float]
"""Seconds that a link is busy with the caches of so many first tokens, all layers together."""


def predicted_ttft(partition: Partition, cost: ChunkCost, *, layers: int, link: Link) -> float:
    """Seconds to the first token of staggered devices (ours; both objectives of §4.2 in one formula).

    Every layer of a device takes the same share of its piece's seconds, and hands its cache on before it
    turns to attention. So the slowest device or link works on all layers but one without a break; what comes
    before is one hand-over from each device to the next, what comes after is one layer of the last device.
    """
    pieces, handed = cost.seconds(partition), [link(end) for end in partition.ends[:-1]]
    return ((layers - 1) * max([*pieces, *handed]) + sum(handed) + pieces[-1]) / layers


def searched(length: int, devices: int, cost: ChunkCost, *, layers: int, link: Link) -> Partition:
    """KVR-S: the partition with the least predicted TTFT, for any number of devices.

    If no device or link may be busy for longer than some bound, the last device has least to do when all
    others take as much as the bound allows. So partitions are a matter of one number, and the hierarchical
    grid search (§4.2, Fig. 6) is one on a line (ours). Of what a bound leaves free, when hand-overs and the
    last device's layer end, it sees only these partitions: a share of 1 / layers of the time.

    Raises:
      MeshError: fewer tokens than devices, or no device.
    """

    def ttft(partition):
        return predicted_ttft(partition, cost, layers=layers, link=link)

    best = Partition.even(length, devices)
    low, high = 0.0, max(cost.seconds(Partition((length,)))[0], link(length))
    for _ in range(_LEVELS):
        bounds = np.linspace(low, high, _GRID)
        found = [_filled(length, devices, cost, link, bound) for bound in bounds]
        nearest = min(range(_GRID), key=lambda index: ttft(found[index]))
        best = min(best, found[nearest], key=ttft)
        low, high = bounds[max(nearest - 1, 0)], bounds[min(nearest + 1, _GRID - 1)]
    return best


_GRID, _LEVELS = 17, 12
"""Bounds of a level; each level looks at an eighth of the one before, at last at seconds · 1e-10."""


def _filled(length: int, devices: int, cost: ChunkCost, link: Link, bound: float) -> Partition:
    """Pieces as long as neither they nor their hand-over takes more than `bound` seconds, or of one token.

    The last device has the rest.
    """
    ends: list[int] = []
    for after in range(devices - 1, 0, -1):
        start = ends[-1] if ends else 0

        def seconds(end, start=start):
            return max(cost.of(start, end - start), link(end))

        possible = range(start + 1, length - after + 1)
        ends.append(start + max(1, bisect_right(possible, bound, key=seconds)))
    return Partition.ending_at([*ends, length])
