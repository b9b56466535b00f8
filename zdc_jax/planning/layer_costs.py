"""What single layers cost when they keep less, and the plans that follow where such costs add up (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zdc_jax.methods.coded import Settings
from zdc_jax.plan import LayerRanks, allowed_ranks

WHOLE_BITS = 16
"""Of a coordinate that is kept as it is. A float32 model's has more, and so has each other of its layers."""
CODED_NEAR = 8
"""Bits of near tokens beside codes: eight lose nothing that was told from noise (docs/coding.md)."""


@dataclass(frozen=True)
class Precision:
    """How much a layer keeps of far keys, or of far values: `rank` coordinates a head, in `bits` each.

    With fewer than 16 bits they are codes of method `coded`; of keys the first `index` may have other bits.
    """

    rank: int
    bits: int = WHOLE_BITS
    index: int = 0
    bits_index: int = 0

    @property
    def size(self) -> float:
        """Bytes a token and head: codes have a scale of one byte, and one of the index."""
        scales = 0 if self.bits == WHOLE_BITS else 2 if self.index else 1
        bits = self.index * self.bits_index + (self.rank - self.index) * self.bits
        return bits / 8 + scales


def build_layer(keys: Precision, values: Precision) -> LayerRanks:
    """A layer that keeps its keys and values at these grades, both codes or neither; codes are all read."""
    if keys.bits == WHOLE_BITS:
        return LayerRanks(keys.rank, values.rank)
    settings = Settings(bits_k=keys.bits, bits_v=values.bits, index=keys.index, read=0, bits_near=CODED_NEAR)
    if keys.index:
        settings = replace(settings, bits_index=keys.bits_index)
    return LayerRanks(keys.rank, values.rank, settings=settings)


def precisions(ranks: LayerRanks) -> tuple[Precision, Precision]:
    """Of keys and of values: the inverse of `kept`, where a layer keeps far tokens."""
    coded = ranks.settings
    if not isinstance(coded, Settings):
        return Precision(ranks.qk), Precision(ranks.v)
    index = (coded.index, coded.bits_index) if coded.index else ()
    return Precision(ranks.qk, coded.bits_k, *index), Precision(ranks.v, coded.bits_v)


class LayerCosts(NamedTuple):
    """Increase of the mean negative log likelihood when one layer alone keeps less for distant tokens.

    keys, values: grades by rising size, the last is the most that a layer keeps; qk [L, len(keys)],
    v [L, len(values)]: costs of these; cut [L]: the layer sees no distant token.
    """

    keys: tuple[Precision, ...]
    values: tuple[Precision, ...]
    qk: np.ndarray
    v: np.ndarray
    cut: np.ndarray

    def monotone(self) -> "LayerCosts":
        """Noise taken off: no grade costs less than a larger one, and nothing less than none."""
        return self._replace(
            qk=_falling(self.qk, self.keys), v=_falling(self.v, self.values), cut=np.maximum(self.cut, 0)
        )

    def of(self, layer: int, ranks: LayerRanks) -> float:
        """Cost of a layer at these ranks, which need not be levels: at those next below, or the first."""
        if ranks.qk == 0:
            return float(self.cut[layer])
        keys, values = precisions(ranks)
        return float(self.qk[layer, _level(self.keys, keys)] + self.v[layer, _level(self.values, values)])


def _falling(costs: np.ndarray, levels: Sequence[Precision]) -> np.ndarray:
    """`costs` [L, levels], each raised to those of all larger grades. Two may have one size."""
    sizes = np.array([precision.size for precision in levels])
    counts = (sizes > sizes[:, None]) | np.eye(len(sizes), dtype=bool)
    return np.where(counts, np.maximum(costs, 0)[:, None], 0).max(-1)


def _level(levels: Sequence[Precision], precision: Precision) -> int:
    """Index of a grade, or of the largest of those that are no larger, or 0."""
    found = [
        (each.size, each == precision, i) for i, each in enumerate(levels) if each.size <= precision.size
    ]
    return max(found, default=(0, False, 0))[-1]


def rank_levels(head_dim: int) -> tuple[int, ...]:
    """Ranks at which single layers are measured: about H/8, H/4, H/2, 3H/4 and H."""
    allowed = np.array(allowed_ranks(head_dim)[1:])
    wanted = (head_dim * share for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1))
    return tuple(sorted({int(allowed[np.abs(allowed - rank).argmin()]) for rank in wanted}))


def list_reductions(
    costs: LayerCosts, layers: Sequence[LayerRanks], *, single: bool = False
) -> list[tuple[int, LayerRanks]]:
    """Every layer with every smaller choice of grades (`single`: the next size of one, or cutting it off), by
    cost for each byte that it saves."""
    steps = []
    for layer, now in enumerate(layers):
        if now.qk == 0:
            continue
        keys, values = precisions(now)
        fewer_keys, fewer_values = _smaller(costs.keys, keys, single), _smaller(costs.values, values, single)
        both = [] if single else [build_layer(k, v) for k in fewer_keys for v in fewer_values]
        fewer = [
            *(build_layer(k, values) for k in fewer_keys),
            *(build_layer(keys, v) for v in fewer_values),
            *both,
        ]
        for ranks in [LayerRanks(0, 0), *fewer]:
            saved = _size(now) - _size(ranks)
            price = (costs.of(layer, ranks) - costs.of(layer, now)) / saved
            steps.append((price, -saved, layer, ranks))
    return [(layer, ranks) for *_, layer, ranks in sorted(steps, key=lambda step: step[:3])]


def _smaller(levels: Sequence[Precision], precision: Precision, single: bool) -> list[Precision]:
    smaller = [each for each in levels if each.size < precision.size]
    return [each for each in smaller if each.size == smaller[-1].size] if single else smaller


def _size(ranks: LayerRanks) -> float:
    return sum(precision.size for precision in precisions(ranks)) if ranks.qk else 0.0


def cheapest_path(costs: LayerCosts) -> list[tuple[LayerRanks, ...]]:
    """Ranks of all layers from the most that they keep to none, always the step of least cost per byte."""
    layers = [build_layer(costs.keys[-1], costs.values[-1])] * len(costs.cut)
    path = [tuple(layers)]
    while steps := list_reductions(costs, layers):
        layer, layers[layer] = steps[0]
        path.append(tuple(layers))
    return path
