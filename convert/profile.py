"""Measures the `Profile` of a model on calibration text (ours)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.axes import Array
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import self_attention
from zdc_jax.profile import SINKS, Profile, windows_for

PROFILE_WINDOWS = 4
"""Calibration windows that the profile is measured on."""


def collect_profile(network: Transformer, windows: np.ndarray, *, fingerprint: str) -> Profile:
    """Profile of the unmodified model on the first few of `windows` [W, T], one at a time."""
    near = windows_for(windows.shape[1])
    found = []
    for tokens in windows[:PROFILE_WINDOWS]:
        x = network.embeddings.embed(jnp.asarray(tokens[None]), jnp.arange(len(tokens))[None])
        squares = []
        for block in network.layers:
            x, square = _layer(block, x, near)
            squares.append(square)
        found.append(np.stack(squares).astype(np.float64))
    total = np.sum(found, axis=0)
    far_write = np.sqrt(total[:, 1:] / total[:, :1])
    return Profile(far_write, np.array(near, np.int32), fingerprint)


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
