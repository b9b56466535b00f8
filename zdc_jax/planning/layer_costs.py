"""Costs of storing less in single layers, and the plans that follow if these costs add up over layers.

Costs are increases of the mean negative log-likelihood. Not part of the ZDC paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import NamedTuple

import numpy as np

from zdc_jax.methods.coded import Settings
from zdc_jax.plan import LayerRanks, allowed_ranks

WHOLE_BITS = 16
"""Bits of a coordinate that is not quantized. All layers of a float32 model use more by the same factor."""
CODED_NEAR = 8
"""Bits of recent tokens in plans of method `coded`. Eight bits lose nothing measurable (docs/coding.md)."""


@dataclass(frozen=True)
class Precision:
    """Precision (rank and bits) at which a layer stores the keys, or the values, of older tokens.

    Attributes:
      rank: coordinates per head.
      bits: bits per coordinate. Fewer than 16 bits mean quantized values of method `coded`.
      index: number of leading coordinates of keys that have bits of their own; 0: none.
      bits_index: bits of these coordinates.
    """

    rank: int
    bits: int = WHOLE_BITS
    index: int = 0
    bits_index: int = 0

    @property
    def size(self) -> float:
        """Bytes per token and head. Quantized values have a scale of one byte; an index has another one."""
        scales = 0 if self.bits == WHOLE_BITS else 2 if self.index else 1
        bits = self.index * self.bits_index + (self.rank - self.index) * self.bits
        return bits / 8 + scales


def build_layer(keys: Precision, values: Precision) -> LayerRanks:
    """Return a layer that stores keys and values at these precisions, both quantized or neither.

    Attention reads all quantized values.
    """
    if keys.bits == WHOLE_BITS:
        return LayerRanks(keys.rank, values.rank)
    settings = Settings(bits_k=keys.bits, bits_v=values.bits, index=keys.index, read=0, bits_near=CODED_NEAR)
    if keys.index:
        settings = replace(settings, bits_index=keys.bits_index)
    return LayerRanks(keys.rank, values.rank, settings=settings)


def precisions(ranks: LayerRanks) -> tuple[Precision, Precision]:
    """Return the precisions of keys and values of a layer that stores older tokens; inverts `build_layer`."""
    coded = ranks.settings
    if not isinstance(coded, Settings):
        return Precision(ranks.qk), Precision(ranks.v)
    index = (coded.index, coded.bits_index) if coded.index else ()
    return Precision(ranks.qk, coded.bits_k, *index), Precision(ranks.v, coded.bits_v)


class LayerCosts(NamedTuple):
    """Costs of storing less for older tokens in one layer, with all other layers unchanged.

    Attributes:
      keys: precisions of keys by increasing size. The last one is the most that a layer stores.
      values: precisions of values by increasing size.
      qk: costs of the precisions of keys, [L, len(keys)].
      v: costs of the precisions of values, [L, len(values)].
      cut: costs of storing no older tokens, [L].
    """

    keys: tuple[Precision, ...]
    values: tuple[Precision, ...]
    qk: np.ndarray
    v: np.ndarray
    cut: np.ndarray

    def monotone(self) -> "LayerCosts":
        """Return the costs without noise: none is negative, or less than that of a larger precision."""
        return self._replace(
            qk=_make_decreasing(self.qk, self.keys),
            v=_make_decreasing(self.v, self.values),
            cut=np.maximum(self.cut, 0),
        )

    def of(self, layer: int, ranks: LayerRanks) -> float:
        """Return the cost of a layer.

        A precision that is not listed costs as much as the next smaller one, or as the first.
        """
        if ranks.qk == 0:
            return float(self.cut[layer])
        keys, values = precisions(ranks)
        key_cost = self.qk[layer, _find_level(self.keys, keys)]
        return float(key_cost + self.v[layer, _find_level(self.values, values)])


def _make_decreasing(costs: np.ndarray, levels: Sequence[Precision]) -> np.ndarray:
    """Raise each cost [L, levels] to the largest cost of larger precisions, but not of equally large ones."""
    sizes = np.array([precision.size for precision in levels])
    counts = (sizes > sizes[:, None]) | np.eye(len(sizes), dtype=bool)
    return np.where(counts, np.maximum(costs, 0)[:, None], 0).max(-1)


def _find_level(levels: Sequence[Precision], precision: Precision) -> int:
    """Return the index of a precision, or of the largest one that is not larger, or 0."""
    candidates = [
        (each.size, each == precision, i) for i, each in enumerate(levels) if each.size <= precision.size
    ]
    return max(candidates, default=(0, False, 0))[-1]


def rank_levels(head_dim: int) -> tuple[int, ...]:
    """Return the ranks at which single layers are measured: about H/8, H/4, H/2, 3H/4 and H."""
    return tuple(sorted({nearest_rank(head_dim, share) for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}))


def nearest_rank(head_dim: int, share: float) -> int:
    """Return the allowed rank above 0 that is closest to a share of the head dim."""
    return min(allowed_ranks(head_dim)[1:], key=lambda rank: abs(rank - share * head_dim))


def list_reductions(
    costs: LayerCosts, layers: Sequence[LayerRanks], *, single: bool = False
) -> list[tuple[int, LayerRanks]]:
    """List all reductions of one layer, by increasing cost per saved byte.

    Args:
      costs: costs of single layers.
      layers: what each layer stores now.
      single: whether to list only single steps: the next smaller size of either keys or values, or storing no
        older tokens.

    Returns:
      layer indices and what these layers then store.
    """
    steps = []
    for layer, now in enumerate(layers):
        if now.qk == 0:
            continue
        keys, values = precisions(now)
        smaller_keys = _list_smaller(costs.keys, keys, single)
        smaller_values = _list_smaller(costs.values, values, single)
        smaller = [*product(smaller_keys, [values]), *product([keys], smaller_values)]
        if not single:
            smaller += product(smaller_keys, smaller_values)
        for ranks in [LayerRanks(0, 0), *starmap(build_layer, smaller)]:
            saved = _compute_size(now) - _compute_size(ranks)
            price = (costs.of(layer, ranks) - costs.of(layer, now)) / saved
            steps.append((price, -saved, layer, ranks))
    return [(layer, ranks) for *_, layer, ranks in sorted(steps, key=lambda step: step[:3])]


def _list_smaller(levels: Sequence[Precision], precision: Precision, single: bool) -> list[Precision]:
    smaller = [each for each in levels if each.size < precision.size]
    return [each for each in smaller if each.size == smaller[-1].size] if single else smaller


def _compute_size(ranks: LayerRanks) -> float:
    """Return the bytes per older token and head."""
    return sum(precision.size for precision in precisions(ranks)) if ranks.qk else 0.0


def cheapest_path(costs: LayerCosts) -> list[tuple[LayerRanks, ...]]:
    """Return the layers after each greedy step, from storing the most to storing no older tokens.

    Each step is the reduction of one layer with the least cost per saved byte.
    """
    layers = [build_layer(costs.keys[-1], costs.values[-1])] * len(costs.cut)
    path = [tuple(layers)]
    while steps := list_reductions(costs, layers):
        layer, layers[layer] = steps[0]
        path.append(tuple(layers))
    return path
