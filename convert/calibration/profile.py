"""Measures the `Profile` of a model on calibration text (ours)."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from convert.progress import track
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import self_attention
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.evaluate import window_nll
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
    plan, found = network.plan, []
    dense = window_nll(network, windows).mean()
    try:
        layers = range(network.config.num_layers)
        for layer in track(layers, "profile of far attention", shown=progress):
            ranks = [LayerRanks(0, 0) if i == layer else kept for i, kept in enumerate(plan.layers)]
            network.plan = replace(plan, layers=tuple(ranks), window=window)
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
    for tokens in track(list(windows), "profile of layers", shown=progress):
        x = network.embeddings.embed(jnp.asarray(tokens[None]), jnp.arange(len(tokens))[None])
        squares = []
        for block in network.layers:
            x, square = _layer(block, x, cuts)
            squares.append(square)
        found.append(np.stack(squares).astype(np.float64))
    norms = np.sqrt(np.sum(found, axis=0))
    return norms[:, 0], norms[:, 1:]


@partial(jax.jit, static_argnames="cuts")
def _layer(block: Block, x: Array, cuts: tuple[Cut, ...]) -> tuple[Array, Array]:
    """The layer's output, and sums of squares over tokens [1 + C]."""
    attention = block.attention
    attend = partial(self_attention, scale=attention.config.head_dim**-0.5)
    square = lambda x: jnp.square(x.astype(jnp.float32)).sum()
    squares = [square(x)]

    def attend_and_compare(q: Array, k: Array, v: Array) -> Array:
        o, _ = attend(q, k, v)
        whole = attention.output(o)
        for ranks, window in cuts:
            kept = {"qk_rank": ranks.qk, "v_rank": ranks.v, "sinks": SINKS, "window": window}
            less, _ = attend(q, k, v, **kept, implementation="xla")
            squares.append(square(attention.output(less) - whole))
        return o

    y = block(x, jnp.arange(x.shape[1])[None], attend_and_compare)
    return y, jnp.stack(squares)
