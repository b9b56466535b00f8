"""Plans of least cost for each size, if costs of layers add up: a knapsack with few kinds of layers (ours).

Each layer chooses one precision of keys and one of values. At a price per byte, the best choices are those of
least cost plus price times size, which is the Lagrangian of the knapsack. Prices from low to high give plans
from large to small.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from jaxtyping import Float, Int

from zdc_jax.plan import LayerRanks
from zdc_jax.planning.layer_costs import LayerCosts, build_layer

MOST_KINDS = 6
"""Most distinct layers in a plan. Each kind is compiled once when a model with the plan is loaded."""
PRICES_TRIED = 64
"""Prices between those that change the first and the last layer."""


def knapsack_path(costs: LayerCosts, stores: Sequence[bool]) -> list[tuple[LayerRanks, ...]]:
    """Return the layers of plans of falling size, of at most `MOST_KINDS` kinds.

    Args:
      costs: costs of single layers. The costs of storing no older tokens are not used.
      stores: for each layer, whether it stores older tokens. Others keep the highest precision.
    """
    pairs = list(product(range(len(costs.keys)), range(len(costs.values))))
    kinds = [build_layer(costs.keys[k], costs.values[v]) for k, v in pairs]
    size = np.array([costs.keys[k].size + costs.values[v].size for k, v in pairs])
    layers = np.flatnonzero(stores)
    cost = np.stack([[costs.qk[layer, k] + costs.v[layer, v] for k, v in pairs] for layer in layers])
    path, smallest = list[tuple[LayerRanks, ...]](), np.inf
    for price in _list_prices(cost, size):
        choice = choose_kinds(cost + price * size)
        if (total := size[choice].sum()) < smallest:
            smallest, chosen = total, dict(zip(layers, choice, strict=True))
            path.append(tuple(kinds[chosen.get(layer, -1)] for layer in range(len(costs.qk))))
    return path


def choose_kinds(cost: Float[np.ndarray, "L P"], most: int = MOST_KINDS) -> Int[np.ndarray, " L"]:
    """Return the choice of each layer, of least cost, with at most `most` different choices.

    Choices are dropped one at a time: the one without which the cost rises least.
    """
    choice = cost.argmin(1)
    while len(used := np.unique(choice)) > most:
        others = [used[used != kind] for kind in used]
        rest = others[int(np.argmin([cost[:, each].min(1).sum() for each in others]))]
        choice = rest[cost[:, rest].argmin(1)]
    return choice


def _list_prices(
    cost: Float[np.ndarray, "L P"], size: Float[np.ndarray, " P"]
) -> Float[np.ndarray, " prices"]:
    """Return rising prices per byte, from one that keeps all layers at their largest to the opposite."""
    saved = size[:, None] - size
    more = cost[:, None] - cost[:, :, None]
    slopes = (more / np.where(saved > 0, saved, 1))[:, saved > 0]
    slopes = slopes[slopes > 0]
    if not len(slopes):
        return np.array([0.0, 1.0])
    return np.concatenate([[0.0], np.geomspace(slopes.min() / 2, 2 * slopes.max(), PRICES_TRIED)])
