"""Keys of new tokens, in the one form in which a layer's projections hand them to its cache (`NewKeys`)."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.rotary import rope_and_basis, rotary_angles, rotate
from zdc_jax.ops.shift import ShiftedQueries


class Turn(NamedTuple):
    """Rotary embedding and basis that queries and keys still need.

    Attributes:
      positions: position of each token, [B, T].
      frequencies: rotary frequencies, [H/2].
      q_basis: basis of queries, [K, H, C], as in `rope_and_basis`.
      k_basis: basis of keys, [K, H, C].
    """

    positions: Array
    frequencies: np.ndarray | Array
    q_basis: Array
    k_basis: Array

    def angles(self) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
        """Return cosines and sines of the rotary angles, in float32."""
        return rotary_angles(self.positions, self.frequencies)


class Latents(NamedTuple):
    """Keys as low-rank latents from before the rotary embedding (after Palu).

    Attributes:
      latents: keys before the rotary embedding times `factor`, [B, T, K, R].
      factor: projection with orthonormal columns, [K, H, R].
      frequencies: rotary frequencies, [H/2]; zeros mean no rotary embedding.
    """

    latents: Array
    factor: Array
    frequencies: Array

    def reconstruct(self, latents: Float[Array, "B K S R"]) -> Float[Array, "B K S H"]:
        """Return stored keys as attention sees them; slot s has position s."""
        k = jnp.einsum("BKSR,KHR->BSKH", latents, self.factor)
        positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
        return rotate(k, positions, self.frequencies, interleaved=False).swapaxes(1, 2)


class NewKeys(NamedTuple):
    """Keys of new tokens.

    Attributes:
      keys: keys [B, T, K, C] as attention reads them, unless there is a `turn`.
      turn: rotary embedding and basis that are not applied to q and `keys` yet, or None.
      shift: queries for the scores that keys without their mean lack, or None if the keys are whole.
      latents: latents of the keys, for caches that store those, or None.
    """

    keys: Array
    turn: Turn | None = None
    shift: ShiftedQueries | None = None
    latents: Latents | None = None

    def each(self, change: Callable[[Array], Array]) -> "NewKeys":
        """Apply `change` to the arrays that have a token axis."""
        turn, latents = self.turn, self.latents
        return NewKeys(
            change(self.keys),
            turn and turn._replace(positions=change(turn.positions)),
            self.shift and self.shift.each(change),
            latents and latents._replace(latents=change(latents.latents)),
        )

    def rotate(
        self, q: Float[Array, "B T N H"], implementation: Implementation | None, *, by_token: bool = False
    ) -> tuple[Float[Array, "B T N C"], "NewKeys"]:
        """Return queries and keys after rotary embedding and basis; unchanged if both are applied.

        `by_token` is the order in memory, as in `rope_and_basis`.
        """
        if self.turn is None:
            return q, self
        q, keys = rope_and_basis(q, self.keys, *self.turn, implementation, by_token=by_token)
        return q, self._replace(keys=keys, turn=None)

    def block_scores(self, slots: int, scale: float) -> Float[Array, "B T N blocks"] | None:
        """Return `ShiftedQueries.block_scores` for positions below `slots`; None if the keys are whole."""
        return None if self.shift is None else self.shift.block_scores(slots, scale)
