"""Groups of layers that agree on the important tokens, and so share a classification (ZDC §3.3, §5.2)."""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.errors import CalibrationError
from zdc_jax.model.block import Block
from zdc_jax.model.observe import Seen, Tap, observe, observe_layer
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.importance import column_sums, token_importance

ImportanceMethod = Literal["denominator", "detrended", "column_sum", "column_mean"]
"""Definition of a token's importance.

denominator: softmax denominator of the token's query, as in the paper; detrended: denominator per visible
  key.
column_sum: sum of the attention weights on the token's key; column_mean: mean of these weights over queries.
"""

SHARE = 0.35
"""Share of tokens in the sets of most and least important tokens that layers are compared by (ZDC §3.3)."""
THRESHOLD = 0.95
"""Smallest repetition ratio of layers that share a classification (ZDC §5.2)."""


def layer_importance(
    network: Transformer, tokens: Int[np.ndarray, "B T"], method: ImportanceMethod = "denominator"
) -> Float[np.ndarray, "L B T"]:
    """Compute the importance of every token in every layer of the unmodified model, float32.

    Raises:
      CalibrationError: an unknown method.
    """
    if method not in get_args(ImportanceMethod):
        raise CalibrationError(f"method={method!r}: must be one of {get_args(ImportanceMethod)}")
    layers = observe(network, jnp.asarray(tokens), _TAPS[method])
    return np.stack([np.asarray(importance) for importance in layers])


def layer_and_importance(
    block: Block, x: Float[Array, "B T D"], method: ImportanceMethod
) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """Run a layer on whole sequences; return its output and the importance of every token in it."""
    return observe_layer(block, x, _TAPS[method])


def _count_visible(seen: Seen) -> Int[Array, "B T"]:
    """Return the number of keys that each query sees."""
    count = jnp.arange(1, seen.x.shape[1] + 1)
    window = seen.attention.spec.window
    return jnp.broadcast_to(count if window is None else jnp.minimum(count, window), seen.x.shape[:2])


def _sum_columns(seen: Seen) -> Float[Array, "B T"]:
    attention = seen.attention
    return column_sums(seen.q, seen.k, seen.lse, scale=attention.scale, window=attention.spec.window)


_TAPS: dict[ImportanceMethod, Tap] = {
    "denominator": lambda seen: token_importance(seen.lse),
    "detrended": lambda seen: token_importance(seen.lse, _count_visible(seen)),
    "column_sum": _sum_columns,
    # By symmetry, the number of queries that see key t is the number of keys that query T - 1 - t sees.
    "column_mean": lambda seen: _sum_columns(seen) / _count_visible(seen)[:, ::-1],
}


def repetition_ratios(
    importance: Float[np.ndarray, "L B T"], *, share: float = SHARE, most: bool = True
) -> Float[np.ndarray, "L L"]:
    """Compute the share of the most (or least) important tokens that each pair of layers has in common.

    The result is a mean over sequences: symmetric, 1 on the diagonal, about `share` for unrelated layers.

    Raises:
      CalibrationError: `share` is outside (0, 0.5].
    """
    if not 0 < share <= 0.5:
        raise CalibrationError(f"share={share}: must be in (0, 0.5]")
    L, B, T = importance.shape
    count = max(1, round(share * T))
    order = np.argsort(-importance if most else importance, axis=-1, kind="stable")
    chosen = np.zeros((L, B, T), np.float32)
    np.put_along_axis(chosen, order[..., :count], 1, axis=-1)
    return np.einsum("lbt,mbt->lm", chosen, chosen) / (B * count)


def layer_groups(
    most: Float[np.ndarray, "L L"], least: Float[np.ndarray, "L L"], *, threshold: float = THRESHOLD
) -> tuple[int, ...]:
    """Divide layers into groups and return the first layer, the leader, of each group.

    A group is a run of layers that share both sets of tokens, the most and the least important, with the
    leader.

    Args:
      most: `repetition_ratios` of the most important tokens.
      least: `repetition_ratios` of the least important tokens.
      threshold: smallest ratio to the leader, in (0, 1].

    Raises:
      CalibrationError: `threshold` is outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise CalibrationError(f"threshold={threshold}: must be in (0, 1]")
    shared = np.minimum(most, least)
    leaders = [0]
    for layer in range(1, len(shared)):
        if shared[leaders[-1], layer] < threshold:
            leaders.append(layer)
    return tuple(leaders)
