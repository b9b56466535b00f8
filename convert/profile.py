"""Measures the `Profile` of a model on calibration text (ours)."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.axes import Array
from zdc_jax.evaluate import window_nll
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import self_attention
from zdc_jax.plan import LayerRanks
from zdc_jax.profile import SINKS, Profile, cost_window, windows_for

PROFILE_WINDOWS = 8
"""Calibration windows that the profile is measured on."""


def collect_profile(network: Transformer, windows: np.ndarray, *, fingerprint: str) -> Profile:
    """Profile of the unmodified model on the first few of `windows` [W, T], one at a time."""
    near, windows = windows_for(windows.shape[1]), windows[:PROFILE_WINDOWS]
    far_nats = _far_nats(network, windows, near[cost_window(near)])
    return Profile(_far_write(network, windows, near), far_nats, np.array(near, np.int32), fingerprint)


def _far_nats(network: Transformer, windows: np.ndarray, window: int) -> np.ndarray:
    """[L]: the network runs under plans that cut off one layer; nothing else of a plan is in its weights."""
    whole, found = network.plan, []
    dense = window_nll(network, windows).mean()
    try:
        for layer in range(network.config.num_layers):
            ranks = [LayerRanks(0, 0) if i == layer else kept for i, kept in enumerate(whole.layers)]
            network.plan = replace(whole, layers=tuple(ranks), window=window, sinks=SINKS)
            found.append(window_nll(network, windows).mean() - dense)
    finally:
        network.plan = whole
    return np.array(found)


def _far_write(network: Transformer, windows: np.ndarray, near: tuple[int, ...]) -> np.ndarray:
    """[L, W]."""
    found = []
    for tokens in windows:
        x = network.embeddings.embed(jnp.asarray(tokens[None]), jnp.arange(len(tokens))[None])
        squares = []
        for block in network.layers:
            x, square = _layer(block, x, near)
            squares.append(square)
        found.append(np.stack(squares).astype(np.float64))
    total = np.sum(found, axis=0)
    return np.sqrt(total[:, 1:] / total[:, :1])


@partial(jax.jit, static_argnames="near")
def _layer(block: Block, x: Array, near: tuple[int, ...]) -> tuple[Array, Array]:
    """The layer's output, and Σ over tokens of squared norms [1 + W]: of x, and of what far keys write."""
    scale, output = block.attention.config.head_dim**-0.5, block.attention.output
    square = lambda x: jnp.square(x.astype(jnp.float32)).sum()
    squares = [square(x)]

    def attend(q: Array, k: Array, v: Array) -> Array:
        o, _ = self_attention(q, k, v, scale=scale)
        whole = output(o)
        for window in near:
            recent, _ = self_attention(
                q, k, v, scale=scale, qk_rank=0, v_rank=0, sinks=SINKS, window=window, implementation="xla"
            )
            squares.append(square(output(recent) - whole))
        return o

    y = block(x, jnp.arange(x.shape[1])[None], attend)
    return y, jnp.stack(squares)
