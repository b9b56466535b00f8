"""Far tokens of some KV heads only; the other heads read sinks and window (after DuoAttention)."""

from dataclasses import dataclass

import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.specs.near_far import NearFar, NearFarState
from zdc_jax.cache.specs.spec import Call, NewTokens, put_rows
from zdc_jax.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class RetrievingHeads(NearFar):
    """`NearFar` whose store has only the KV heads `heads`.

    Its arrays are k [B, len(heads), S, R] and v [B, len(heads), S, Z].

    Attributes:
      heads: KV heads that read far tokens, ascending.

    Raises:
      PlanError: `heads` do not ascend from 0 to K - 1, or the window is 0.
    """

    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        K = self.num_kv_heads
        if not self.heads or list(self.heads) != sorted({*self.heads} & {*range(K)}):
            raise PlanError(f"heads={self.heads} must ascend from 0 to {K - 1}, the KV heads of a layer")
        if not self.window:
            raise PlanError("window=0 must be at least 1 token, because other heads read no older tokens")

    def create_far(self, batch: int, capacity: int) -> tuple[Array, Array]:
        rows = batch, len(self.heads), capacity
        return jnp.zeros((*rows, self.R), self.dtype), jnp.zeros((*rows, self.Z), self.dtype)

    def write_far(self, state: NearFarState, new: NewTokens) -> tuple[Array, Array]:
        heads = jnp.array(self.heads)

        def put(buffer: Array, x: Array) -> Array:
            return put_rows(buffer, x[:, :, heads, : buffer.shape[-1]], new.start, new.kept)

        return put(state.far[0], new.k.keys), put(state.far[1], new.v)

    def attend_far(
        self, far: tuple[Array, Array], q: Array, positions: Array, call: Call
    ) -> tuple[Array, Array]:
        """Compute attention to the far tokens; heads without a store return zeros and an lse of -inf."""
        B, T, N, R = q.shape
        K, heads = self.num_kv_heads, jnp.array(self.heads)
        group = q.reshape(B, T, K, N // K, R)[:, :, heads]
        o, lse = self.attend_rows(group.reshape(B, T, -1, R), *far, positions, call)
        all_o = jnp.zeros((B, T, K, N // K, self.Z), o.dtype)
        all_lse = jnp.full((B, K, N // K, T), -jnp.inf, lse.dtype)
        all_o = all_o.at[:, :, heads].set(o.reshape(B, T, len(self.heads), -1, self.Z))
        all_lse = all_lse.at[:, heads].set(lse.reshape(B, len(self.heads), -1, T))
        return all_o.reshape(B, T, N, self.Z), all_lse.reshape(B, N, T)
