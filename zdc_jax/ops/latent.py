"""Keys as low-rank latents from before the rotary embedding, and their reconstruction (after Palu)."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.ops.rotary import rotate


class LatentKeys(NamedTuple):
    """Keys of new tokens, with their latents.

    Attributes:
      keys: keys as attention sees them, [B, T, K, H].
      latents: keys before the rotary embedding times `factor`, [B, T, K, R].
      factor: projection with orthonormal columns, [K, H, R].
      frequencies: rotary frequencies, [H/2]; zeros mean no rotary embedding.
    """

    keys: Array
    latents: Array
    factor: Array
    frequencies: Array

    def each(self, change: Callable[[Array], Array]) -> "LatentKeys":
        """Apply `change` to the arrays that have a token axis."""
        return self._replace(keys=change(self.keys), latents=change(self.latents))


def reconstructed(
    latents: Float[Array, "B K S R"], factor: Float[Array, "K H R"], frequencies: Float[Array, " h"]
) -> Float[Array, "B K S H"]:
    """Return the keys as attention sees them; slot s has position s."""
    k = jnp.einsum("BKSR,KHR->BSKH", latents, factor)
    positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    return rotate(k, positions, frequencies, interleaved=False).swapaxes(1, 2)
