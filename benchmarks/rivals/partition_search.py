"""The search for a partition with the least time to the first token (TTFT; KV-Runahead §4.2, Appendix D).

The paper measures every candidate of a grid. Here a cost model, fitted to pieces measured on one device,
proposes partitions, and only those are measured on all devices (ours):

    pair = RunaheadTransformer(network, [device] * 2)
    cost = PieceCost.fit(measured(pair, tokens, partitions_of_several_lengths))
    link = lambda end: handed_bytes(plan, Partition((end, 1)), capacity=capacity)[0] / bandwidth
    proposal = searched(length, U, cost, layers=len(plan.layers), link=link)
    times = measured(RunaheadTransformer(network, devices), tokens, [Partition.even(length, U), proposal])
    best = min(times, key=times.get)
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from scipy.optimize import nnls

from benchmarks.rivals.partition import Partition, in_eights
from benchmarks.rivals.runahead import RunaheadTransformer
from zdc_jax.axes import Array
from zdc_jax.model.transformer import Embeddings
from zdc_jax.ops.attention import Implementation


@dataclass(frozen=True)
class PieceCost:
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
    """What the coefficients of `PieceCost` are multiplied with [U, 4]."""
    t, s = np.array(partition.tokens, float), np.array(partition.starts, float)
    return np.stack([np.ones_like(t), t, t * s, t * t], 1)


Link = Callable[[int], float]
"""Seconds that a link is busy with the caches of so many first tokens, all layers together."""


def predicted_ttft(partition: Partition, cost: PieceCost, *, layers: int, link: Link) -> float:
    """Seconds to the first token of staggered devices (ours; both objectives of §4.2 in one formula).

    Every layer of a device takes the same share of its piece's seconds, and hands its cache on before it
    turns to attention. So the slowest device or link works on all layers but one without a break; what comes
    before is one hand-over from each device to the next, what comes after is one layer of the last device.
    """
    pieces, handed = cost.seconds(partition), [link(end) for end in partition.ends[:-1]]
    return ((layers - 1) * max([*pieces, *handed]) + sum(handed) + pieces[-1]) / layers


def searched(length: int, devices: int, cost: PieceCost, *, layers: int, link: Link) -> Partition:
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


def _filled(length: int, devices: int, cost: PieceCost, link: Link, bound: float) -> Partition:
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


def measured(
    model: RunaheadTransformer,
    tokens: Int[Array, "B T"],
    partitions: Sequence[Partition],
    *,
    implementation: Implementation | None = None,
    repeats: int = 5,
) -> dict[Partition, float]:
    """Median seconds to the first token's logits, on the devices of the model, without compilation.

    Where all of these are one and the same, its pieces run one by one, which is what `PieceCost.fit` takes.

    Args:
      tokens: prompts, of which each partition takes as many tokens as it has. repeats: runs that count.

    Raises:
      what `RunaheadTransformer.prefill` does.
    """
    embeddings = model.networks[-1].embeddings

    def once(partition: Partition) -> float:
        began = time.perf_counter()
        prompts = tokens[:, : partition.length]
        end = jnp.full(len(tokens), partition.length, jnp.int32)
        prefill = partial(model.prefill, partition=partition, implementation=implementation)
        last, _ = prefill(prompts, end, capacity=in_eights(partition.length))
        jax.block_until_ready(_logits(embeddings, last))
        return time.perf_counter() - began

    return {each: median([once(each) for _ in range(repeats + 1)][1:]) for each in partitions}


@jax.jit
def _logits(embeddings: Embeddings, last: Array) -> Array:
    return embeddings.unembed(last)


def link_bandwidth(source: jax.Device, target: jax.Device, *, size: int = 2**28, repeats: int = 5) -> float:
    """Bytes per second of an array of `size` bytes on its way to another device, median of `repeats`."""
    array = jax.block_until_ready(jax.device_put(jnp.zeros(size, jnp.uint8), source))

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        return time.perf_counter() - began

    return size / median([once() for _ in range(repeats + 1)][1:])
