"""Measures the `Profile` of a model on calibration text (ours)."""

from dataclasses import replace
from functools import cache

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
"""What far pairs keep, and the window."""


def whole_plan(config: ModelConfig) -> CompressionPlan:
    """The plan of a network to profile: all coordinates, in the basis, and whole projections."""
    return replace(CompressionPlan.full(config), window=COST_WINDOW, sinks=SINKS)


def collect_profile(
    network: Transformer, windows: np.ndarray, *, fingerprint: str, progress: bool = False
) -> Profile:
    """Profile of a network of `whole_plan`, on the first few of `windows` [W, T], one at a time."""
    H, windows = network.config.head_dim, windows[:PROFILE_WINDOWS]
    near, ranks = windows_for(windows.shape[1]), rank_levels(H)[:-1]
    measured, none = near[cost_window(near)], LayerRanks(0, 0)
    cuts = [(none, window) for window in near]
    cuts += [(LayerRanks(rank, H), measured) for rank in ranks]
    cuts += [(LayerRanks(H, rank), measured) for rank in ranks]
    entering, changes = _changes(network, windows, tuple(cuts), progress)
    by_window, by_rank = np.split(changes, [len(near)], axis=1)
    whole = np.maximum(by_window[:, cost_window(near), None], 1e-12)
    score_error, value_error = np.split(by_rank / whole, 2, axis=1)
    return Profile(
        _far_nats(network, windows, measured, progress),
        by_window / entering[:, None],
        score_error,
        value_error,
        np.array(near, np.int32),
        np.array(ranks, np.int32),
        fingerprint,
    )


def _far_nats(network: Transformer, windows: np.ndarray, window: int, progress: bool) -> np.ndarray:
    """[L]: the network runs under plans that cut off one layer; nothing else of a plan is in its weights."""
    plan, found, H = network.plan, [], network.config.head_dim
    dense = window_nll(network, windows).mean()
    try:
        layers = range(network.config.num_layers)
        for layer in track(layers, "profile of far attention", shown=progress):
            ranks = [LayerRanks(0, 0) if i == layer else LayerRanks(H, H) for i in layers]
            network.plan = CompressionPlan.of_layers(network.config, ranks, window=window, sinks=SINKS)
            found.append(window_nll(network, windows).mean() - dense)
    finally:
        network.plan = plan
    return np.array(found)


def _changes(
    network: Transformer, windows: np.ndarray, cuts: tuple[Cut, ...], progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Norms, root of sums over all tokens: of what enters each layer [L], of how each cut changes what it
    writes [L, C]."""
    found = []
    tap = _tap(cuts)
    for tokens in track(list(windows), "profile of layers", shown=progress):
        squares = observe(network, jnp.asarray(tokens[None]), tap)
        found.append(np.stack(squares).astype(np.float64))
    norms = np.sqrt(np.sum(found, axis=0))
    return norms[:, 0], norms[:, 1:]


@cache
def _tap(cuts: tuple[Cut, ...]) -> Tap:
    """Sums of squares over tokens [1 + C]: of what enters a layer, of how each cut changes what it writes.

    A sliding-window layer sees no more than its window under any cut.
    """

    def square(x):
        return jnp.square(x.astype(jnp.float32)).sum()

    def tap(seen: Seen) -> Array:
        attention, whole = seen.attention, seen.attention.output(seen.o)
        squares = [square(seen.x)]
        for ranks, window in cuts:
            less = _attended(seen, ranks, window)
            squares.append(square(attention.output(less) - whole))
        return jnp.stack(squares)

    return tap


def _attended(seen: Seen, ranks: LayerRanks, window: int) -> Array:
    """What attention gives where far pairs keep `ranks`, near ones all."""
    kept = {"qk_rank": ranks.qk, "v_rank": ranks.v, "sinks": SINKS, "window": window}
    if (own := seen.attention.spec.window) is not None:
        kept = {"qk_rank": 0, "v_rank": 0, "window": own if ranks.qk else min(own, window)}
    o, _ = self_attention(seen.q, seen.k, seen.v, scale=seen.attention.scale, implementation="xla", **kept)
    return o
