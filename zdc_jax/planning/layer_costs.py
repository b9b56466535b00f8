"""What single layers cost when they keep less, and the plans that follow where such costs add up (ours)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zdc_jax.plan import LayerRanks, allowed_ranks


class LayerCosts(NamedTuple):
    """Increase of the mean negative log likelihood when one layer alone keeps less for distant tokens.

    ranks ascending, the last H; qk, v [L, len(ranks)]; cut [L]: the layer sees no distant token.
    """

    ranks: tuple[int, ...]
    qk: np.ndarray
    v: np.ndarray
    cut: np.ndarray

    def monotone(self) -> "LayerCosts":
        """Noise taken off: no rank costs less than a higher one, and nothing less than none."""
        falling = lambda x: np.maximum.accumulate(np.maximum(x, 0)[:, ::-1], axis=1)[:, ::-1]
        return self._replace(qk=falling(self.qk), v=falling(self.v), cut=np.maximum(self.cut, 0))

    def of(self, layer: int, ranks: LayerRanks) -> float:
        """Cost of a layer at these ranks, which need not be levels: at those next below, or the first."""
        if ranks.qk == 0:
            return float(self.cut[layer])
        level = lambda rank: max((i for i, r in enumerate(self.ranks) if r <= rank), default=0)
        return float(self.qk[layer, level(ranks.qk)] + self.v[layer, level(ranks.v)])


def rank_levels(head_dim: int) -> tuple[int, ...]:
    """Ranks at which single layers are measured: about H/8, H/4, H/2, 3H/4 and H."""
    allowed = np.array(allowed_ranks(head_dim)[1:])
    wanted = (head_dim * share for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1))
    return tuple(sorted({int(allowed[np.abs(allowed - rank).argmin()]) for rank in wanted}))


def steps_down(
    costs: LayerCosts, layers: Sequence[LayerRanks], *, single: bool = False
) -> list[tuple[int, LayerRanks]]:
    """Every layer with every smaller choice of ranks (`single`: the next level of one rank, or cutting it
    off), by cost for each coordinate that it saves."""
    steps = []
    for layer, now in enumerate(layers):
        lower = lambda rank: [r for r in costs.ranks if r < rank][-1 if single else 0 :]
        both = [] if single else [LayerRanks(qk, v) for qk in lower(now.qk) for v in lower(now.v)]
        fewer_qk = [LayerRanks(qk, now.v) for qk in lower(now.qk)]
        fewer_v = [LayerRanks(now.qk, v) for v in lower(now.v)]
        for ranks in [LayerRanks(0, 0)] * (now.qk > 0) + fewer_qk + fewer_v + both:
            saved = now.qk + now.v - ranks.qk - ranks.v
            price = (costs.of(layer, ranks) - costs.of(layer, now)) / saved
            steps.append((price, -saved, layer, ranks))
    return [(layer, ranks) for *_, layer, ranks in sorted(steps, key=lambda step: step[:3])]


def cheapest_path(costs: LayerCosts) -> list[tuple[LayerRanks, ...]]:
    """Ranks of all layers from all coordinates to none, always the step of least cost per coordinate."""
    top = costs.ranks[-1]
    layers = [LayerRanks(top, top)] * len(costs.cut)
    path = [tuple(layers)]
    while steps := steps_down(costs, layers):
        layer, layers[layer] = steps[0]
        path.append(tuple(layers))
    return path
