"""Near tokens at full width in a ring, far tokens in a store of any format, and one softmax over both (ours).

Near tokens are the sinks and the last `window` tokens, so that the position alone decides. All others are
far. Every new token is written to the store at once. A token that leaves the window is just overwritten in
the ring.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Code
from zdc_jax.cache.paging.pages import count_slots
from zdc_jax.cache.specs.coded_ring import CodedRing
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, State, move_shift
from zdc_jax.ops.cache_attention import stored_attention
from zdc_jax.ops.new_keys import NewKeys


@partial(jax.tree_util.register_dataclass, data_fields=["near", "far"], meta_fields=[])
@dataclass(frozen=True)
class NearFarState:
    """Arrays of one layer.

    Attributes:
      near: ring of near tokens.
      far: store, with a format that the spec defines.
    """

    near: PrefixRingState
    far: State


@dataclass(frozen=True, kw_only=True)
class NearFar(LayerCacheSpec):
    """Spec with a ring of the near tokens at H coordinates, and a store of R and Z coordinates of all tokens.

    A query reads {j < sinks} ∪ {t - window < j ≤ t} from the ring and every other j ≤ t from the store. With
    sinks or a window, q, k and v have full width; otherwise the stored width.

    Attributes:
      R: coordinates of a key in the store.
      Z: coordinates of a value in the store.
      sinks: number of first tokens that are near.
      window: number of last tokens that are near.
      near_code: quantization of the ring; None stores it in the model's dtype. Stores that copy tokens from
        the ring do not support it.
    """

    R: int
    Z: int
    sinks: int = 0
    window: int = 0
    near_code: Code | None = None
    clauses = LayerCacheSpec.clauses | {"pages"}

    @property
    def near(self) -> PrefixRing:
        """Spec of the ring."""
        ring = PrefixRing(**self.base_fields, R=0, Z=0, sinks=self.sinks, window=self.window)
        return ring if self.near_code is None else CodedRing.of(ring, self.near_code)

    @property
    def has_near(self) -> bool:
        """Whether the ring stores any token."""
        return bool(self.sinks or self.window)

    def create_far(self, batch: int, capacity: int) -> State:
        """Create the arrays of an empty store; by default k [B, K, S, R] and v [B, K, S, Z]."""
        rows = batch, self.num_kv_heads, capacity
        return jnp.zeros((*rows, self.R), self.dtype), jnp.zeros((*rows, self.Z), self.dtype)

    @abstractmethod
    def write_far(self, state: NearFarState, new: NewTokens) -> State:
        """Return the store with the new tokens; `state` is the cache without them."""

    def attend_far(
        self, far: State, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], call: Call
    ) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
        """Compute attention to the far tokens and its log-sum-exp, -inf for a query without far tokens."""
        k, v = far
        return self.attend_rows(q, k, v, positions, call)

    def capacity(self, far: State) -> int:
        """Return the slots of a store, whose leaves may be in pages."""
        _, values, *_ = far
        return count_slots(values)

    def far_part(
        self, far: State, q: Array, k: NewKeys | None, positions: Array, call: Call, aux: Any
    ) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"], Any]:
        """Compute `attend_far` for `attend`, with the new keys k; return also the `aux` to pass on."""
        return *self.attend_far(far, q[..., : self.R], positions, call), aux

    def attend_rows(
        self,
        q: Float[Array, "B T _ R"],
        k: Float[Array, "B _ S R"],
        v: Float[Array, "B _ S Z"],
        positions: Int[Array, "B T"],
        call: Call,
    ) -> tuple[Float[Array, "B T _ Z"], Float[Array, "B _ T"]]:
        """Compute attention to far tokens from dequantized keys and values, slot = position."""
        return stored_attention(
            q,
            k,
            v,
            positions,
            scale=call.scale,
            sinks=self.sinks,
            window=self.window,
            implementation=call.implementation,
            end=call.end,
            block_scores=call.block_scores,
            needed_from=call.needed_from,
        )

    def far_step(
        self, state: NearFarState, q: Array, new: NewTokens, call: Call, aux: Any
    ) -> tuple[State, Float[Array, "B T N Z"], Float[Array, "B N T"], Any]:
        """Write the new tokens to the store and compute `far_part`.

        The new store comes first in the result.
        """
        far = self.write_far(state, new)
        return far, *self.far_part(far, q, new.k, new.positions, call, aux)

    def attend_jointly(self, state: NearFarState, q: Array, new: NewTokens, call: Call) -> Attended | None:
        """Compute `attend` to near and far tokens of a chunk of prompts with one kernel.

        Returns:
          The result without `aux`; None where no kernel can do so, as for stores without an override.
        """
        return None

    def create(self, batch: int, capacity: int) -> NearFarState:
        return NearFarState(self.near.create(batch, capacity), self.create_far(batch, capacity))

    def write(self, state: NearFarState, new: NewTokens) -> NearFarState:
        far = self.write_far(state, new)
        return NearFarState(self.near.write(state.near, new), far)

    def write_tail(self, state: NearFarState, new: NewTokens) -> NearFarState:
        return NearFarState(self.near.write_tail(state.near, new), state.far)

    def attend(
        self, state: NearFarState, q: Float[Array, "B T N Hq"], new: NewTokens, aux: Any, call: Call
    ) -> Attended:
        new, call = move_shift(new, replace(call, end=new.end), self.capacity(state.far))
        if (joint := self.attend_jointly(state, q, new, call)) is not None:
            return joint._replace(aux=aux)
        far, far_o, far_lse, aux = self.far_step(state, q, new, call, aux)
        if not self.has_near:
            return Attended(NearFarState(state.near, far), far_o, far_lse, aux)
        near = self.near.attend(state.near, q, new, None, call)
        o, lse = merge_partial([(near.o, near.lse), (far_o, far_lse)])
        return Attended(NearFarState(near.state, far), o, lse, aux)
