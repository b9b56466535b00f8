"""Far tokens in codes, made as tokens come: what caches of codes share (ours).

Keys and queries come before the rotary embedding and the basis, where these come behind the weights. A single
token is then turned, coded and put into store and ring by one kernel.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels_pallas import Parts, Stored
from zdc_jax.axes import Array
from zdc_jax.cache.codes import Code, Coded
from zdc_jax.cache.fitted_integers import as_before, kernel_planes, put_by_kernel
from zdc_jax.cache.near_far import NearFar, NearFarState
from zdc_jax.cache.pages import in_pages, pools_of
from zdc_jax.cache.spec import Attended, Call, State
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.rotary import UnrotatedKeys
from zdc_jax.ops.stored import merge_parts, rotate_and_store

Made = tuple[Sequence[tuple[Code, Coded]], Sequence[tuple[Code, Coded]]]
"""Of keys and of values: codes that take their coordinates one after another, and what each has made."""


@dataclass(frozen=True, kw_only=True)
class CodedFar(NearFar):
    """`NearFar` whose store is codes.

    On kernels a single token takes none of `NearFar`'s ways to write and to attend, but `decode_parts` and
    the ring's `decode_held`. What changes the former overrides `project`, too, to get keys as stored.
    """

    @abstractmethod
    def made(self, far: State) -> Made:
        """What the store is made of."""

    @abstractmethod
    def of_made(self, keys: Sequence[Coded], values: Sequence[Coded]) -> State:
        """The store of what its codes have made."""

    @abstractmethod
    def code_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> State:
        """`write_far` where no kernel knows the codes."""

    @abstractmethod
    def decode_parts(self, far: State, q: Array, positions: Array, call: Call, aux: Any) -> tuple[Parts, Any]:
        """Attention of single queries [B, 1, N, R] to the far tokens, on kernels, where `reads_pages` says
        that they can; and what is handed on."""

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> State:
        """`NearFar.write_far`."""
        keys, values = self.made(state.far)
        groups = (k[..., : self.R], keys), (v[..., : self.Z], values)
        if done := put_by_kernel(groups, positions, end):
            return self.of_made(*done)
        return self.code_far(state, k, v, positions, end)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, UnrotatedKeys | Array, Array]:
        """`LayerCacheSpec.project`: q and k before they are turned, if the basis comes behind the weights."""
        return attention.project_unrotated(x, positions, implementation)

    def attend(
        self,
        state: NearFarState,
        q: Array,
        k: UnrotatedKeys | Array,
        v: Array,
        positions: Array,
        end: Array,
        aux: Any,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`."""
        if isinstance(k, UnrotatedKeys):
            if q.shape[1] == 1 and (stored := self._put_token(state, q, k, v, positions, end, call)):
                q, held = stored
                far, aux = self.decode_parts(held.far, q[..., : self.R], positions, call, aux)
                near = self.near.decode_held(held.near, q, positions, call)
                return Attended(held, *merge_parts(q, near, far), aux)
            q, k = k.rotate(q, call.implementation)
        return super().attend(state, q, k, v, positions, end, aux, call)

    def _put_token(
        self,
        state: NearFarState,
        q: Array,
        k: UnrotatedKeys,
        v: Array,
        positions: Array,
        end: Array,
        call: Call,
    ) -> tuple[Array, NearFarState] | None:
        """Turned queries of single tokens, and the cache with these, by one kernel; None where it cannot."""
        rings = self.near.kernel_rings(state.near)
        if not self.has_near or rings is None or not self.near.decodes_held(state.near, q, v, call):
            return None
        if not self.reads_pages(state, q, v, call):
            return None
        far, table = pools_of(state.far)
        keys, values = self.made(far)
        stored = Stored(kernel_planes(keys), rings[0]), Stored(kernel_planes(values), rings[1])
        given = q, k, v, stored, positions, end, state.near.near
        found = rotate_and_store(*given, call.implementation, table)
        if found is None:
            return None
        q, *written = found
        coded = [
            in_pages(as_before([coded for _, coded in part], each.planes), table)
            for part, each in zip((keys, values), written, strict=True)
        ]
        ring_k, ring_v = (
            as_before(held, [each.ring])
            for held, each in zip((state.near.ring_k, state.near.ring_v), written, strict=True)
        )
        near = replace(state.near, ring_k=ring_k, ring_v=ring_v)
        return q, NearFarState(near, self.of_made(*coded))
