"""Keys as latents, few coordinates from before the rotary embedding, and the way back (after Palu)."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.ops.rotary import rotate


class LatentKeys(NamedTuple):
    """Keys of new tokens, and what a cache of latents needs.

    keys [B, T, K, H]: as attention sees them. latents [B, T, K, R]: keys before the rotary embedding times
    `factor` [K, H, R], whose columns are orthonormal. frequencies [H/2]: of the rotary embedding; zeros turn
    nothing.
    """

    keys: Array
    latents: Array
    factor: Array
    frequencies: Array

    def each(self, change: Callable[[Array], Array]) -> "LatentKeys":
        """With what there is of each token changed."""
        return self._replace(keys=change(self.keys), latents=change(self.latents))


def reconstructed(
    latents: Float[Array, "B K S R"], factor: Float[Array, "K H R"], frequencies: Float[Array, " h"]
) -> Float[Array, "B K S H"]:
    """Keys as attention sees them, slot = position."""
    k = jnp.einsum("BKSR,KHR->BSKH", latents, factor)
    positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    return rotate(k, positions, frequencies, interleaved=False).swapaxes(1, 2)
