"""Partitions of a prompt over devices, and the search for the one with the least TTFT (KV-Runahead §4.2).

The paper measures every candidate of a grid. Here a cost model, fitted to chunks measured on one device,
proposes partitions, and only those are measured on all devices (ours):

    pair = RunaheadTransformer(network, [device] * 2)
    cost = ChunkCost.fit(measure_partitions(pair, tokens, partitions_of_several_lengths))
    link = lambda end: handed_bytes(plan, Partition((end, 1)), capacity=capacity)[0] / bandwidth
    proposal = searched(length, U, cost, layers=len(plan.layers), link=link)
    model = RunaheadTransformer(network, devices)
    times = measure_partitions(model, tokens, [Partition.even(length, U), proposal])
    best = min(times, key=times.get)
"""

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
    """Chunks of a prompt, one for each device, in order of position.

    Attributes:
      tokens: tokens of each device's chunk.

    Raises:
      MeshError: no device, or a device without a token.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise MeshError(f"tokens={self.tokens} must give at least one device at least one token each")

    @classmethod
    def even(cls, length: int, devices: int) -> Self:
        """Return chunks of equal length (KVR-E); the first ones have the remaining tokens.

        Raises:
          MeshError: fewer tokens than devices, or no device.
        """
        if not 1 <= devices <= length:
            raise MeshError(f"{length} tokens cannot be divided over {devices=}: each needs one")
        each, more = divmod(length, devices)
        return cls((each + 1,) * more + (each,) * (devices - more))

    @classmethod
    def ending_at(cls, ends: Sequence[int]) -> Self:
        """Return the partition with these `ends`.

        Raises:
          MeshError: the ends do not ascend from 1 or more.
        """
        return cls(tuple(int(end - start) for start, end in zip((0, *ends), ends, strict=False)))

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, padding included."""
        return sum(self.tokens)

    @property
    def ends(self) -> tuple[int, ...]:
        """Position after the last token of each chunk."""
        return tuple(accumulate(self.tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return max(self.tokens)

    @property
    def padding(self) -> tuple[int, ...]:
        """Padded rows of each device if all chunks are padded to the longest."""
        return tuple(self.longest - count for count in self.tokens)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of the first token of each chunk."""
        return (0, *self.ends[:-1])

    def check(self, *, devices: int, length: int, capacity: int) -> None:
        """Check that the partition divides `length` tokens over `devices`, within `capacity`.

        Raises:
          MeshError: the partition does not fit.
        """
        if len(self.tokens) != devices or self.length != length:
            raise MeshError(f"partition={self} must divide {length} tokens over {devices} devices")
        if length > capacity:
            raise MeshError(f"{capacity=} must be >= the {length} tokens of the prompts, padding included")


def interpolated(table: Sequence[Partition], length: int) -> Partition:
    """Interpolate a partition between the two nearest lengths of a table of searched partitions (KVR-P).

    Shares are linear in the length (§4.2; §5, "Context-level Partitioning") and constant outside the table.

    Raises:
      MeshError: an empty table, partitions of different numbers of devices, or fewer tokens than devices.
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
    # Rounded ends may coincide, but every chunk needs a token.
    ends = np.maximum.accumulate(np.maximum(np.rint(share * length).astype(int), 1) - index) + index
    return Partition.ending_at(np.minimum(ends, length - degree + 1 + index).tolist())


def cache_slots(partition: Partition, sinks: int, capacity: int) -> tuple[int, ...]:
    """Return the slots of each device's caches, in multiples of 8; the last device has `capacity`.

    The other devices have as few slots as their tokens and the sinks need, because all slots are sent.
    """
    least = (max(end, sinks) for end in partition.ends[:-1])
    return (*(min(in_eights(count), capacity) for count in least), capacity)


def in_eights(tokens: int) -> int:
    """Return the slots for `tokens` in a cache that kernels can read, a multiple of 8."""
    return -(-tokens // 8) * 8


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of t tokens after s: call + token · t + past · t s + own · t² (§3, plus a constant).

    Attributes:
      call: constant cost.
      token: cost of a token in all products with weights.
      past: cost of attention of a token to an earlier one.
      own: cost of attention within the chunk.
    """

    call: float
    token: float
    past: float
    own: float

    @classmethod
    def fit(cls, seconds: Mapping[Partition, float]) -> Self:
        """Fit the four terms by least squares of relative errors, none below 0.

        Args:
          seconds: seconds of one device for all chunks of a partition, one by one.

        Raises:
          ValueError: the partitions do not determine the four terms, or a time is not above 0.
        """
        rows = np.array([_terms(partition).sum(0) for partition in seconds]).reshape(-1, 4)
        times = np.array(list(seconds.values()))
        if not (times > 0).all():
            raise ValueError(f"seconds={times.tolist()} must all be > 0")
        scale = np.maximum(rows.max(0, initial=0), 1)
        if np.linalg.matrix_rank(rows / scale) < 4:
            raise ValueError(f"seconds must tell 4 terms apart, got partitions {list(seconds)}")
        terms, _ = nnls(rows / scale / times[:, None], np.ones(len(times)))
        return cls(*(terms / scale).tolist())

    def of(self, start: int, tokens: int) -> float:
        """Return the seconds of one chunk, all layers together."""
        return self.call + (self.token + self.past * start + self.own * tokens) * tokens

    def seconds(self, partition: Partition) -> list[float]:
        """Return the seconds of each chunk, all layers together."""
        return [self.of(*chunk) for chunk in zip(partition.starts, partition.tokens, strict=True)]


def _terms(partition: Partition) -> np.ndarray:
    """Return the factors of the four terms, [U, 4]."""
    t, s = np.array(partition.tokens, float), np.array(partition.starts, float)
    return np.stack([np.ones_like(t), t, t * s, t * t], 1)


Link = Callable[[int], float]
"""Seconds that a link needs for the caches of the first `end` tokens, all layers together."""


def predicted_ttft(partition: Partition, cost: ChunkCost, *, layers: int, link: Link) -> float:
    """Predict the TTFT of staggered devices (ours; both objectives of §4.2 in one formula).

    In every layer a device spends the same share of its chunk's seconds, and passes its cache on before
    attention. So the slowest device or link works on all layers but one without a break. One transfer from
    each device to the next comes before, and one layer of the last device comes after.
    """
    pieces, handed = cost.seconds(partition), [link(end) for end in partition.ends[:-1]]
    return ((layers - 1) * max([*pieces, *handed]) + sum(handed) + pieces[-1]) / layers


def searched(length: int, devices: int, cost: ChunkCost, *, layers: int, link: Link) -> Partition:
    """Search the partition with the least predicted TTFT, for any number of devices (KVR-S).

    Let no device or link be busy longer than some bound. Then the last device has least to do if all others
    use the whole bound. So one number determines a partition, and the hierarchical grid search (§4.2, Fig. 6)
    becomes one on a line (ours). The search ignores transfers and the last device's layer within a bound,
    which is a share of 1 / layers of the time.

    Raises:
      MeshError: fewer tokens than devices, or no device.
    """

    def ttft(partition):
        return predicted_ttft(partition, cost, layers=layers, link=link)

    best = Partition.even(length, devices)
    low, high = 0.0, max(cost.seconds(Partition((length,)))[0], link(length))
    for _ in range(_LEVELS):
        bounds = np.linspace(low, high, _GRID)
        proposals = [_filled(length, devices, cost, link, bound) for bound in bounds]
        nearest = min(range(_GRID), key=lambda index: ttft(proposals[index]))
        best = min(best, proposals[nearest], key=ttft)
        low, high = bounds[max(nearest - 1, 0)], bounds[min(nearest + 1, _GRID - 1)]
    return best


_GRID, _LEVELS = 17, 12
"""Bounds of a level, and levels; each level looks at an eighth of the level before."""


def _filled(length: int, devices: int, cost: ChunkCost, link: Link, bound: float) -> Partition:
    """Return chunks that each use at most `bound` seconds, their transfer included, or have one token.

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
