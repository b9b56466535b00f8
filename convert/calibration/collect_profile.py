"""Measurement of a model's `Profile` on calibration text (ours)."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.progress import track
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.model.observe import Seen, Tap, observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import self_attention
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import rank_levels
from zdc_jax.planning.profile import COST_WINDOW, SINKS, Profile, cost_window, windows_for

PROFILE_WINDOWS = 8
"""Calibration windows that the profile is measured on."""

Cut = tuple[LayerRanks, int]
"""Ranks for tokens outside the window, and the window in tokens."""


def whole_plan(config: ModelConfig) -> CompressionPlan:
    """Return the plan of a network to profile: all coordinates of the basis, unsliced projections."""
    return replace(CompressionPlan.full(config), window=COST_WINDOW, sinks=SINKS)


def collect_profile(
    network: Transformer, windows: np.ndarray, *, fingerprint: str, progress: bool = False
) -> Profile:
    """Measure the profile of a network loaded with `whole_plan`, on the first of `windows` [W, T]."""
    H, windows = network.config.head_dim, windows[:PROFILE_WINDOWS]
    near, ranks = windows_for(windows.shape[1]), rank_levels(H)[:-1]
    cost_tokens = near[cost_window(near)]
    cuts = [(LayerRanks(0, 0), window) for window in near]
    cuts += [(LayerRanks(rank, H), cost_tokens) for rank in ranks]
    cuts += [(LayerRanks(H, rank), cost_tokens) for rank in ranks]
    input_norms, changes = _measure_changes(network, windows, tuple(cuts), progress)
    by_window, by_rank = np.split(changes, [len(near)], axis=1)
    without_far = np.maximum(by_window[:, cost_window(near), None], 1e-12)
    score_error, value_error = np.split(by_rank / without_far, 2, axis=1)
    return Profile(
        _measure_far_nats(network, windows, cost_tokens, progress),
        by_window / input_norms[:, None],
        score_error,
        value_error,
        np.array(near, np.int32),
        np.array(ranks, np.int32),
        fingerprint,
    )


def _measure_far_nats(network: Transformer, windows: np.ndarray, window: int, progress: bool) -> np.ndarray:
    """Measure the loss in nats per token [L] when one layer sees only its window.

    The network runs under other plans than its own, which is sound because they have the same weights.
    """
    plan, losses, H = network.plan, [], network.config.head_dim
    dense = window_nll(network, windows).mean()
    try:
        layers = range(network.config.num_layers)
        for layer in track(layers, "profile of far attention", shown=progress):
            ranks = [LayerRanks(0, 0) if i == layer else LayerRanks(H, H) for i in layers]
            network.plan = CompressionPlan.of_layers(network.config, ranks, window=window, sinks=SINKS)
            losses.append(window_nll(network, windows).mean() - dense)
    finally:
        network.plan = plan
    return np.array(losses)


def _measure_changes(
    network: Transformer, windows: np.ndarray, cuts: tuple[Cut, ...], progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Measure norms over all tokens.

    Returns:
      Norm of each layer's input [L], and norm of the change that each cut makes in a layer's output [L, C].
    """
    squares = []
    tap = _make_tap(cuts)
    for tokens in track(list(windows), "profile of layers", shown=progress):
        layers = observe(network, jnp.asarray(tokens[None]), tap)
        squares.append(np.stack(layers).astype(np.float64))
    norms = np.sqrt(np.sum(squares, axis=0))
    return norms[:, 0], norms[:, 1:]


@cache
def _make_tap(cuts: tuple[Cut, ...]) -> Tap:
    """Make a function of a layer that returns sums of squares over tokens, [1 + C].

    The sums are of the layer's input, and of the change that each cut makes in its output.
    """

    def sum_squares(x: Array) -> Array:
        return jnp.square(x.astype(jnp.float32)).sum()

    def measure(seen: Seen) -> Array:
        attention, whole = seen.attention, seen.attention.output(seen.o)
        squares = [sum_squares(seen.x)]
        for ranks, window in cuts:
            o = _attend_with_cut(seen, ranks, window)
            squares.append(sum_squares(attention.output(o) - whole))
        return jnp.stack(squares)

    return measure


def _attend_with_cut(seen: Seen, ranks: LayerRanks, window: int) -> Array:
    """Compute attention with `ranks` outside the window and all coordinates inside it.

    A sliding-window layer sees no more than its own window under any cut.
    """
    cut: dict[str, Any] = {"qk_rank": ranks.qk, "v_rank": ranks.v, "sinks": SINKS, "window": window}
    if (own := seen.attention.spec.window) is not None:
        cut = {"qk_rank": 0, "v_rank": 0, "window": own if ranks.qk else min(own, window)}
    cut |= {"block_scores": seen.block_scores, "implementation": "xla"}
    o, _ = self_attention(seen.q, seen.k, seen.v, scale=seen.attention.scale, **cut)
    return o
