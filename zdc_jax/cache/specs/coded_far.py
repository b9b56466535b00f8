"""Base class of stores that quantize far tokens as they arrive (ours).

If the basis is not folded into the weights, queries and keys arrive before rotary embedding and basis. One
kernel then applies both to a single token, quantizes it, and writes it to the store and the ring.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import CodedPass, Stored, TurnedQueries, join_heads
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Coded, CodedParts
from zdc_jax.cache.codes.fitted_integers import kernel_planes, put_by_kernel, restore_tree
from zdc_jax.cache.paging.pages import in_pages, pools_of
from zdc_jax.cache.specs.near_far import NearFar, NearFarState
from zdc_jax.cache.specs.spec import Attended, Call, NewTokens, State, move_shift
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.cache_attention import ArrangedQueries, attend_passes
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.new_tokens import rotate_and_store
from zdc_jax.ops.slots import last_read


@dataclass(frozen=True, kw_only=True)
class CodedFar(NearFar):
    """`NearFar` with a quantized store.

    On kernels, a single token does not use `NearFar.attend`, but `far_pass` and `decode_stored` of the
    ring. A subclass that changes how tokens are written must override `project` too, so that keys come in
    stored form.
    """

    clauses = NearFar.clauses | {"shift"}
    exchange = "quantized"

    @abstractmethod
    def coded_parts(self, far: State) -> tuple[CodedParts, CodedParts]:
        """Return the parts of the store: those of keys and those of values."""

    @abstractmethod
    def from_parts(self, keys: Sequence[Coded], values: Sequence[Coded]) -> State:
        """Return the store with these arrays of its parts; the inverse of `coded_parts`."""

    @abstractmethod
    def code_far(self, state: NearFarState, new: NewTokens) -> State:
        """Return the store with the new tokens, as `write_far`, where no kernel supports the codes."""

    @abstractmethod
    def far_pass(
        self,
        far: State,
        q: Array,
        positions: Array,
        call: Call,
        aux: Any,
        arranged: ArrangedQueries | None = None,
    ) -> tuple[CodedPass, Any]:
        """Return the kernel's pass from single queries [B, 1, N, R] over the far tokens.

        Call it only where `reads_pages` is true. `arranged` are the queries as the kernel reads them, if
        other kernels wrote them so. The second result is the `aux` to pass on.
        """

    def write_far(self, state: NearFarState, new: NewTokens) -> State:
        keys, values = self.coded_parts(state.far)
        groups = (new.k.keys[..., : self.R], keys), (new.v[..., : self.Z], values)
        if written := put_by_kernel(groups, new.positions, new.end):
            return self.from_parts(*written)
        return self.code_far(state, new)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Array]:
        """Compute q, k and v; q and k are not rotated yet if the basis is not folded into the weights."""
        return attention.project_unrotated(x, positions, implementation)

    def attend(self, state: NearFarState, q: Array, new: NewTokens, aux: Any, call: Call) -> Attended:
        new, call = move_shift(new, call, self.capacity(state.far))
        if new.k.turn is not None:
            if q.shape[1] == 1 and (stored := self._put_token(state, q, new, call)):
                (q, q_far, q_near, gains), written = stored
                of_far = ArrangedQueries(q_far, gains)
                of_near = None if q_near is None else ArrangedQueries(q_near, gains)
                last = last_read(new.positions, new.end)
                far, aux = self.far_pass(written.far, q[..., : self.R], last, call, aux, of_far)
                near = self.near.decode_stored(written.near, q, last, call, of_near)
                o, lse = attend_passes(q, far, near, scale=call.scale, copies=call.copies)
                return Attended(written, o, lse, aux)
            q, new = new.rotate(q, call, by_token=True)
        rings = jax.tree.leaves(state.near)
        if call.first is None and (len(rings[0]) == len(q) or self._decodes_in_place(state, q, new.v, call)):
            return super().attend(state, q, new, aux, call)
        first = jnp.int32(0) if call.first is None else call.first
        own = jax.tree.map(lambda ring: lax.dynamic_slice_in_dim(ring, first, len(q)), state.near)
        call = replace(call, first=None)
        attended = super().attend(replace(state, near=own), q, new, aux, call)
        near = jax.tree.map(partial(_put_rings, first=first), state.near, attended.state.near)
        return attended._replace(state=replace(attended.state, near=near))

    @property
    def takes_more_rings(self) -> bool:
        return self.has_near and self.near_code is not None

    def _decodes_in_place(self, state: NearFarState, q: Array, v: Array, call: Call) -> bool:
        """Return whether kernels write and read single tokens in rings of more sequences than `q` has."""
        reads = q.shape[1] == 1 and self.reads_pages(state, q, v, call)
        return reads and self.near.can_decode_stored(state.near, q, v, call)

    def _put_token(
        self, state: NearFarState, q: Array, new: NewTokens, call: Call
    ) -> tuple[TurnedQueries, NearFarState] | None:
        """Rotate the queries of single tokens and write the tokens to the cache, with one kernel.

        Returns:
          The rotated queries with their block scores, and the cache with the new tokens. None if no kernel
          supports the cache.
        """
        rings, k, v = self.near.kernel_rings(state.near), new.k, new.v
        if not self.has_near or rings is None or not self.near.can_decode_stored(state.near, q, v, call):
            return None
        if not self.reads_pages(state, q, v, call):
            return None
        far, table = pools_of(state.far)
        keys, values = self.coded_parts(far)
        stored = Stored(kernel_planes(keys), rings[0]), Stored(kernel_planes(values), rings[1])
        heads = join_heads(q, k.keys, v)
        result = rotate_and_store(
            heads,
            k,
            stored,
            new.positions,
            new.end,
            state.near.near,
            implementation=call.implementation,
            scale=call.scale,
            means=call.means,
            table=table,
            first=call.first,
        )
        if result is None:
            return None
        turned, *written = result
        coded = [
            in_pages(restore_tree([coded for _, coded in parts], new.planes), table)
            for parts, new in zip((keys, values), written, strict=True)
        ]
        ring_k, ring_v = (
            restore_tree(old, [new.ring])
            for old, new in zip((state.near.ring_k, state.near.ring_v), written, strict=True)
        )
        near = replace(state.near, ring_k=ring_k, ring_v=ring_v)
        return turned, NearFarState(near, self.from_parts(*coded))


def _put_rings(old: Array, new: Array, first: Array) -> Array:
    """Replace the rings of some sequences."""
    return lax.dynamic_update_slice_in_dim(old, new, first, 0)
