"""A ring of near tokens in few bits: sinks and window of a cache that codes its far tokens, too (ours)."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from kernels_pallas import Parts, Plane
from zdc_jax.axes import Array
from zdc_jax.cache.codes import Code, Coded, decode_tokens, empty_tokens, encode_tokens
from zdc_jax.cache.fitted_integers import kernel_planes, put_by_kernel
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState, put_ring
from zdc_jax.cache.spec import Attended, Call
from zdc_jax.errors import PlanError
from zdc_jax.ops.slots import slot_of_token
from zdc_jax.ops.stored import coded_decode_refusal, coded_ring_decode, merge_parts, takes_kernels


@dataclass(frozen=True, kw_only=True)
class CodedRing(PrefixRing):
    """`PrefixRing` of near tokens alone, R = Z = 0, whose rings are coded: trees of leaves [B, K, M, …].

    Attention reads the ring in the model's dtype. New tokens are seen as the ring will hold them, so that it
    does not matter in which piece they came.

    Raises:
      PlanError: far coordinates, or a code of several tokens or of other vectors.
    """

    code: Code

    def __post_init__(self) -> None:
        if self.R or self.Z:
            raise PlanError(f"R={self.R}, Z={self.Z}: a coded ring holds near tokens alone, R = Z = 0")
        if self.code.block > 1:
            raise PlanError(f"{self.code} codes {self.code.block} tokens together; a ring takes single ones")
        if reason := self.code.refusal(self.head_dim):
            raise PlanError(reason)

    @classmethod
    def of(cls, ring: PrefixRing, code: Code) -> Self:
        """The same ring, coded."""
        return cls(**_shape(ring), code=code)

    @property
    def plain(self) -> PrefixRing:
        """The same ring of whole tokens."""
        return PrefixRing(**_shape(self))

    def create(self, batch: int, capacity: int) -> PrefixRingState:
        """`LayerCacheSpec.create`."""
        state = jax.eval_shape(partial(self.plain.create, batch, capacity))
        k, v = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in (state.k, state.v))

        def empty(ring):
            return empty_tokens(self.code, ring.shape[:-1], self.head_dim, self.dtype)

        return PrefixRingState(k, v, empty(state.ring_k), empty(state.ring_v), state.near)

    def write(
        self, state: PrefixRingState, k: Array, v: Array, positions: Array, end: Array
    ) -> PrefixRingState:
        """`LayerCacheSpec.write`."""
        sinks, window = state.near
        if k.shape[1] == 1:
            slot, taken = slot_of_token(positions, end, sinks=sinks, window=window)
            stored = (k, [(self.code, state.ring_k)]), (v, [(self.code, state.ring_v)])
            if done := put_by_kernel(stored, slot, (slot + taken)[:, 0]):
                ((ring_k,), (ring_v,)) = done
                return replace(state, ring_k=ring_k, ring_v=ring_v)
        put = partial(put_ring, positions=positions, end=end, sinks=sinks, window=window)

        def coded(ring, x):
            return jax.tree.map(lambda held, new: put(held, x=new), ring, self._encode(x))

        return replace(state, ring_k=coded(state.ring_k, k), ring_v=coded(state.ring_v, v))

    def attend(
        self,
        state: PrefixRingState,
        q: Array,
        k: Array,
        v: Array,
        positions: Array,
        end: Array,
        aux: object,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`; kernels decode from the codes."""
        if q.shape[1] == 1 and self.decodes_held(state, q, v, call):
            written = self.write(state, k, v, positions, end)
            return Attended(written, *merge_parts(q, self.decode_held(written, q, positions, call)), aux)
        whole = replace(state, ring_k=self._decode(state.ring_k), ring_v=self._decode(state.ring_v))
        seen = self.seen(k), self.seen(v)
        done = self.plain.attend(whole, q, *seen, positions, end, aux, call)
        return done._replace(state=self.write(state, k, v, positions, end))

    def kernel_rings(self, state: PrefixRingState) -> tuple[Any, Any] | None:
        """`PrefixRing.kernel_rings`."""
        planes = kernel_planes([(self.code, state.ring_k), (self.code, state.ring_v)])
        return (planes[0], planes[1]) if planes else None

    def decodes_held(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        """`PrefixRing.decodes_held`: from the codes."""
        planes = [*(self.kernel_rings(state) or ())]
        refusal = partial(coded_decode_refusal, q, planes, slots=_slots_of(planes))
        # What is refused here may run on kernels yet, once it is decoded.
        return call.implementation != "xla" and takes_kernels("near decode", None, refusal)

    def decode_held(self, state: PrefixRingState, q: Array, positions: Array, call: Call) -> Parts:
        """`PrefixRing.decode_held`."""
        planes, (sinks, window) = [*(self.kernel_rings(state) or ())], state.near
        return coded_ring_decode(q, planes, positions, scale=call.scale, sinks=sinks, window=window)

    def attend_whole(
        self, q: Array, k: Array, v: Array, positions: Array, aux: object, call: Call
    ) -> Attended:
        """`LayerCacheSpec.attend_whole`."""
        return self.plain.attend_whole(q, self.seen(k), self.seen(v), positions, aux, call)

    def _encode(self, x: Array) -> Coded:
        return encode_tokens(self.code, x)

    def _decode(self, coded: Coded) -> Array:
        return decode_tokens(self.code, coded, self.head_dim).astype(self.dtype)

    def seen(self, x: Array) -> Array:
        """`PrefixRing.seen`: rounded."""
        return self._decode(self._encode(x))

    def held(self, state: PrefixRingState) -> PrefixRingState:
        """`PrefixRing.held`: coded."""
        return replace(state, ring_k=self._encode(state.ring_k), ring_v=self._encode(state.ring_v))


def _slots_of(planes: list[Plane]) -> jax.ShapeDtypeStruct | None:
    """The shape of a list of all slots, of one query a row."""
    if not planes:
        return None
    B, K, M = planes[0].reach.shape
    return jax.ShapeDtypeStruct((B, 1, K, M), jnp.int32)


def _shape(ring: PrefixRing) -> dict[str, Any]:
    return {field.name: getattr(ring, field.name) for field in fields(PrefixRing)}
