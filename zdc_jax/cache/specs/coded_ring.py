"""A quantized ring of near tokens (sinks and window), for caches that also quantize far tokens (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from kernels_pallas import BlockMeans, CodedPass, Plane, RingSnapshots, Trailing
from kernels_pallas.quantized.inputs import BLOCK
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Code, Coded, decode_tokens, empty_tokens, encode_tokens
from zdc_jax.cache.codes.fitted_integers import FittedIntegers, kernel_planes, put_by_kernel, restore_tree
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState, put_ring
from zdc_jax.cache.specs.spec import Attended, Call, NewTokens, Snapshots
from zdc_jax.errors import PlanError
from zdc_jax.ops.cache_attention import (
    ArrangedQueries,
    attend_passes,
    coded_decode_refusal,
    get_queries,
    table_of_rings,
    takes_kernels,
)
from zdc_jax.ops.new_tokens import put_near_with_kernel, round_with_kernel
from zdc_jax.ops.slots import last_read, slot_of_token


@dataclass(frozen=True, kw_only=True)
class CodedRing(PrefixRing):
    """`PrefixRing` without far tokens, R = Z = 0, whose rings are quantized: trees of leaves [B, K, M, …].

    Attention reads the ring in the model's dtype. It reads new tokens as the ring will store them, so that
    results do not depend on how a prompt is cut into chunks.

    Attributes:
      code: quantization of the rings, token by token.

    Raises:
      PlanError: R or Z is not 0, or the code needs several tokens, or does not support H coordinates.
    """

    exchange = "quantized"

    code: Code

    def __post_init__(self) -> None:
        if self.R or self.Z:
            raise PlanError(f"R={self.R}, Z={self.Z}: a quantized ring stores no far tokens; both must be 0")
        if self.code.block > 1:
            raise PlanError(
                f"code={self.code}: quantizes {self.code.block} tokens together; a ring needs single tokens"
            )
        if reason := self.code.refusal(self.head_dim):
            raise PlanError(reason)

    @classmethod
    def of(cls, ring: PrefixRing, code: Code) -> Self:
        """Return `ring` with quantized storage."""
        return cls(**_get_ring_fields(ring), code=code)

    @property
    def unquantized(self) -> PrefixRing:
        """The same ring in the model's dtype."""
        return PrefixRing(**_get_ring_fields(self))

    def create(self, batch: int, capacity: int) -> PrefixRingState:
        state = jax.eval_shape(partial(self.unquantized.create, batch, capacity))
        k, v = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in (state.k, state.v))

        def empty() -> Coded:
            tokens = batch, self.num_kv_heads, self.ring_slots(capacity)
            return empty_tokens(self.code, tokens, self.head_dim, self.dtype)

        return PrefixRingState(k, v, empty(), empty(), state.near)

    def ring_slots(self, capacity: int) -> int:
        """Return the ring's slots, of which a kernel reads 64 at a time, and copies 8."""
        return max(BLOCK, -(-super().ring_slots(capacity) // 8) * 8)

    def write(self, state: PrefixRingState, new: NewTokens) -> PrefixRingState:
        (sinks, window), keys = state.near, new.k.keys
        if keys.shape[1] == 1:
            slot, has_slot = slot_of_token(new.positions, new.end, sinks=sinks, window=window)
            groups = (keys, [(self.code, state.ring_k)]), (new.v, [(self.code, state.ring_v)])
            if written := put_by_kernel(groups, slot, (slot + has_slot)[:, 0]):
                ((ring_k,), (ring_v,)) = written
                return replace(state, ring_k=ring_k, ring_v=ring_v)
        coded, _ = self._round(new)
        return self._put(state, coded, new)

    def _put(self, state: PrefixRingState, coded: list[Coded], new: NewTokens) -> PrefixRingState:
        """Write quantized keys and values, leaves [B, T, K, …], to the slots of the new tokens."""
        sinks, window = state.near
        put = partial(put_ring, positions=new.positions, end=new.end, sinks=sinks, window=window)
        rings = state.ring_k, state.ring_v
        ring_k, ring_v = jax.tree.map(lambda old, leaf: put(old, x=leaf), rings, tuple(coded))
        return replace(state, ring_k=ring_k, ring_v=ring_v)

    def attend(self, state: PrefixRingState, q: Array, new: NewTokens, aux: object, call: Call) -> Attended:
        if q.shape[1] == 1 and self.can_decode_stored(state, q, new.v, call):
            written = self.write(state, new)
            near = self.decode_stored(written, q, last_read(new.positions, new.end), call)
            return Attended(written, *attend_passes(q, near, scale=call.scale), aux)
        decoded = replace(state, ring_k=self._decode(state.ring_k), ring_v=self._decode(state.ring_v))
        coded, read = self._round(new)
        attended = self.unquantized.attend(decoded, q, read, aux, call)
        return attended._replace(state=self._put(state, coded, new))

    def join_prompt(
        self, state: PrefixRingState, new: NewTokens, means: BlockMeans | None = None
    ) -> tuple[PrefixRingState, Trailing]:
        whole = jnp.arange(len(new.end), dtype=jnp.int32)
        if placed := self.put_prompt(state, whole, new, means):
            return placed[:2]
        decoded = replace(state, ring_k=self._decode(state.ring_k), ring_v=self._decode(state.ring_v))
        coded, read = self._round(new)
        _, rows = self.unquantized.join_prompt(decoded, read, means)
        return self._put(state, coded, new), rows

    def put_prompt(
        self,
        state: PrefixRingState,
        rows: Array,
        new: NewTokens,
        means: BlockMeans | None = None,
        snapshots: Snapshots | None = None,
    ) -> tuple[PrefixRingState, Trailing, list[Array]] | None:
        """Compute `join_prompt` for the sequences `rows` of a batch, with one kernel in place.

        Returns:
          The rings of the batch, the near tokens that the queries read, and the leaves of `snapshots` with
          the new copies; None if no kernel can serve the call.
        """
        rings = self.kernel_rings(state)
        if rings is None:
            return None
        copies, tree = snapshots and snapshots.leaves, jax.tree.structure(state)
        kept = jax.tree.unflatten(tree, copies) if copies else None
        held = self.kernel_rings(kept) if kept is not None else None
        of_rings = RingSnapshots(held, snapshots.marks, snapshots.slots) if snapshots and held else None
        tokens, at = (new.k.keys, new.v), (new.positions, new.end)
        found = put_near_with_kernel(tokens, rings, rows, *at, state.near, of_rings, means)
        if found is None:
            return None

        def restore(old: PrefixRingState, planes: Sequence[Plane]) -> PrefixRingState:
            pairs = zip((old.ring_k, old.ring_v), planes, strict=True)
            ring_k, ring_v = (restore_tree(leaves, [plane]) for leaves, plane in pairs)
            return replace(old, ring_k=ring_k, ring_v=ring_v)

        written = [] if kept is None else jax.tree.leaves(restore(kept, found.snapshots))
        return restore(state, found.rings), found.trailing, written

    def kernel_rings(self, state: PrefixRingState) -> tuple[Any, Any] | None:
        planes = kernel_planes([(self.code, state.ring_k), (self.code, state.ring_v)])
        return (planes[0], planes[1]) if planes else None

    def can_decode_stored(self, state: PrefixRingState, q: Array, v: Array, call: Call) -> bool:
        planes = [*(self.kernel_rings(state) or ())]
        table = table_of_rings(planes, len(q), call.first) if planes else None
        refusal = partial(coded_decode_refusal, q, planes, table=table, ring=state.near)
        # No explicit implementation is passed on: kernels can still run on the decoded ring.
        return call.implementation != "xla" and takes_kernels("near decode", None, refusal)

    def decode_stored(
        self,
        state: PrefixRingState,
        q: Array,
        positions: Array,
        call: Call,
        arranged: ArrangedQueries | None = None,
    ) -> CodedPass:
        planes = self.kernel_rings(state)
        assert planes is not None
        keys, values = planes
        queries, B = get_queries(arranged, q, call.block_scores), len(positions)
        return CodedPass(
            queries.q,
            [keys],
            values,
            jnp.zeros(B, jnp.int32),
            positions[:, 0] + 1,
            block_table=table_of_rings(planes, B, call.first),
            gains=queries.gains,
            ring=state.near,
        )

    def attend_whole(self, q: Array, new: NewTokens, aux: object, call: Call) -> Attended:
        _, read = self._round(new)
        return self.unquantized.attend_whole(q, read, aux, call)

    def _round(self, new: NewTokens) -> tuple[list[Coded], NewTokens]:
        """Return keys and values quantized, with leaves [B, T, K, …], and the tokens as they are read."""
        tokens = new.k.keys, new.v
        bits = self.code.bits if isinstance(self.code, FittedIntegers) else None
        rounded = round_with_kernel(tokens, bits)
        if rounded is None:
            pairs = [(self._encode(x), self.as_read(x)) for x in tokens]
        else:
            read = (each.values.astype(self.dtype) for each in rounded)
            pairs = [((each.levels, each.reach[..., None]), x) for each, x in zip(rounded, read, strict=True)]
        (coded_k, keys), (coded_v, values) = pairs
        return [coded_k, coded_v], replace(new, k=new.k._replace(keys=keys), v=values)

    def _encode(self, x: Array) -> Coded:
        return encode_tokens(self.code, x)

    def _decode(self, coded: Coded) -> Array:
        return decode_tokens(self.code, coded, self.head_dim).astype(self.dtype)

    def as_read(self, x: Array) -> Array:
        return self._decode(self._encode(x))

    def encode_state(self, state: PrefixRingState) -> PrefixRingState:
        return replace(state, ring_k=self._encode(state.ring_k), ring_v=self._encode(state.ring_v))


def _get_ring_fields(ring: PrefixRing) -> dict[str, Any]:
    return {field.name: getattr(ring, field.name) for field in fields(PrefixRing)}
