"""Far keys as latents of keys before the rotary embedding, reconstructed when they are read (after Palu)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.specs.near_far import NearFar, NearFarState
from zdc_jax.cache.specs.spec import Call, NewTokens, put_rows
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys


@dataclass(frozen=True, kw_only=True)
class Latents(NearFar):
    """`NearFar` that stores R latents [B, K, S, R] of a key and Z coordinates [B, K, S, Z] of a value.

    Queries and reconstructed keys have all H coordinates. Each call reconstructs all keys in an array, which
    a kernel could avoid. Near keys are exact.
    """

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the factor from latents to keys."""
        return self.num_kv_heads * self.head_dim * self.R * jnp.dtype(self.dtype).itemsize

    def bytes_read(self, tokens: int) -> int:
        """Return the bytes read to decode one token, including the factor from latents to keys."""
        return self.bytes(tokens) + self.fixed_bytes

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Array]:
        """Compute q, keys with their latents, and v."""
        return attention.project_latent(x, positions, implementation)

    def write_far(self, state: NearFarState, new: NewTokens) -> tuple[Array, Array]:
        """Return the store with the new tokens."""
        assert new.k.latents is not None
        parts, at = (new.k.latents.latents, new.v[..., : self.Z]), (new.start, new.kept)
        latents, values = (put_rows(old, x, *at) for old, x in zip(state.far, parts, strict=True))
        return latents, values

    def far_part(
        self, far: tuple[Array, Array], q: Array, k: NewKeys | None, positions: Array, call: Call, aux: Any
    ) -> tuple[Array, Array, Any]:
        """Compute `attend_far` with reconstructed keys [B, K, S, H]."""
        assert k is not None
        assert k.latents is not None
        latents, values = far
        return *self.attend_far((k.latents.reconstruct(latents), values), q, positions, call), aux
