"""The mean of keys that a cache leaves out (`zdc_jax.ops.shift`), from windows of text (ours)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.rotary import layer_frequencies
from zdc_jax.ops.shift import BLOCK, mean_keys


def estimate_shift(network: Transformer, windows: np.ndarray) -> np.ndarray:
    """Return m of `zdc_jax.ops.shift` for the keys of `windows` [W, T], float64 [L, K, H].

    It is exact for these windows: what it leaves of keys is smallest. Turning the keys of each block back by
    its center and averaging them is least squares, since rotations keep lengths.
    """
    config, (W, T) = network.config, windows.shape
    each = [jax.device_get(_sum_blocks(network, jnp.asarray(window[None]))) for window in windows]
    sums = [np.sum(layer, axis=0, dtype=np.float64) for layer in zip(*each, strict=True)]

    def turn_back(layer: int) -> np.ndarray:
        spec, blocks = config.layers[layer], sums[layer]  # [blocks, K, H]
        turns = mean_keys(np.eye(config.head_dim), layer_frequencies(spec, config), len(blocks))
        return np.einsum("bKH,bIH->KI", blocks, turns) / (W * T)

    return np.stack([turn_back(layer) for layer in range(config.num_layers)])


@jax.jit
def _sum_blocks(network: Transformer, tokens: Array) -> list[Array]:
    """Sum the keys of each layer over blocks of positions, [blocks, K, H] each."""
    return observe(network, tokens, _sum_keys)


def _sum_keys(seen: Seen) -> Array:
    k = seen.exact_k.sum(0)
    padded = jnp.pad(k, ((0, -len(k) % BLOCK), (0, 0), (0, 0)))
    return padded.reshape(-1, BLOCK, *k.shape[1:]).sum(1)


def list_mean_keys(
    config: ModelConfig, shift: np.ndarray, tokens: int
) -> list[Float[np.ndarray, "blocks K H"]]:
    """Return the mean keys of all blocks of `tokens` positions for each layer, in float32."""
    blocks = -(-tokens // BLOCK)
    return [
        mean_keys(mean, layer_frequencies(spec, config), blocks).astype(np.float32)
        for mean, spec in zip(shift, config.layers, strict=True)
    ]
