"""The mean of keys that a cache leaves out (`zdc_jax.ops.shift`), from windows of text (ours)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from convert.calibration.far_values import sum_attention
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.rotary import layer_frequencies
from zdc_jax.ops.shift import BLOCK, mean_keys


def estimate_shift(network: Transformer, windows: np.ndarray, *, far: bool = False) -> np.ndarray:
    """Return m of `zdc_jax.ops.shift` for the keys of `windows` [W, T], float64 [L, K, H].

    It is exact for these windows: what it leaves of keys is smallest. Turning the keys of each block back by
    its center and averaging them is least squares, since rotations keep lengths. With `far`, m is halfway
    between this mean and that weighted by the attention to older tokens, if there is any.
    """
    config = network.config
    each = [jax.device_get(_sum_blocks(network, jnp.asarray(window[None]), far)) for window in windows]
    sums = jax.tree.map(lambda *x: np.sum(x, axis=0, dtype=np.float64), *each)

    def average(layer: int) -> np.ndarray:
        frequencies = layer_frequencies(config.layers[layer], config)
        turns = mean_keys(np.eye(config.head_dim), frequencies, len(sums[layer][0][0]))
        # Heads without attention to older tokens have weights of 0.
        means = [
            np.einsum("bKH,bIH->KI", keys, turns) / np.where(weights > 0, weights, np.nan)[:, None]
            for keys, weights in sums[layer]
        ]
        return np.nanmean(means, axis=0)

    return np.stack([average(layer) for layer in range(config.num_layers)])


@partial(jax.jit, static_argnums=2)
def _sum_blocks(network: Transformer, tokens: Array, far: bool) -> list[list[tuple[Array, Array]]]:
    """Sum the keys of each layer over blocks of positions, [blocks, K, H], and their weights, [K].

    All keys of a layer weigh alike. With `far`, a second sum weighs them by the attention to older tokens.
    """
    return observe(network, tokens, _sum_far_keys if far else _sum_keys)


def _sum_keys(seen: Seen) -> list[tuple[Array, Array]]:
    return [_sum_weighted(seen.exact_k, jnp.ones(seen.exact_k.shape[:3]))]


def _sum_far_keys(seen: Seen) -> list[tuple[Array, Array]]:
    return [*_sum_keys(seen), _sum_weighted(seen.exact_k, sum_attention(seen).swapaxes(1, 2))]


def _sum_weighted(k: Float[Array, "B T K H"], weights: Float[Array, "B T K"]) -> tuple[Array, Array]:
    k = (weights[..., None] * k).sum(0)
    padded = jnp.pad(k, ((0, -len(k) % BLOCK), (0, 0), (0, 0)))
    return padded.reshape(-1, BLOCK, *k.shape[1:]).sum(1), weights.sum((0, 1))


def list_mean_keys(
    config: ModelConfig, shift: np.ndarray, tokens: int
) -> list[Float[np.ndarray, "blocks K H"]]:
    """Return the mean keys of all blocks of `tokens` positions for each layer, in float32."""
    blocks = -(-tokens // BLOCK)
    return [
        mean_keys(mean, layer_frequencies(spec, config), blocks).astype(np.float32)
        for mean, spec in zip(shift, config.layers, strict=True)
    ]
