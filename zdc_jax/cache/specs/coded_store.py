"""A store of quantized far tokens; a token is quantized when its block of tokens is complete (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import (
    NEAR_WINDOW,
    BlockMeans,
    CodedPass,
    Plane,
    Trailing,
    dequantise,
    dequantise_refusal,
    prefill_attention,
)
from kernels_pallas.quantized.inputs import rows_of
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Code, Coded, CodedParts, empty_blocks
from zdc_jax.cache.codes.fitted_integers import FittedIntegers, kernel_planes
from zdc_jax.cache.paging.pages import Pages, pools_of
from zdc_jax.cache.specs.coded_far import CodedFar
from zdc_jax.cache.specs.coded_ring import CodedRing
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.prefix_ring import put_tokens, recent_rows
from zdc_jax.cache.specs.spec import Attended, Call, NewTokens, Snapshots, move_shift, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.cache_attention import (
    ArrangedQueries,
    attend_passes,
    coded_decode_refusal,
    far_pass,
    slots_for,
    stored_attention_refusal,
    takes_kernels,
)
from zdc_jax.ops.shift import BLOCK


@dataclass(frozen=True, kw_only=True)
class CodedStore(CodedFar):
    """`NearFar` whose far keys and values are stored in `key_code` and `value_code`.

    The store is a pair of trees with leaves [B, K, S/block, …], for as many tokens as both codes complete.
    The longer of the two blocks must be a multiple of the other. On XLA, attention reads the whole store in
    the model's dtype.

    Attributes:
      key_code: quantization of keys.
      value_code: quantization of values.

    Raises:
      PlanError: a code does not support R or Z coordinates; the window is shorter than a block; or the ring
        is quantized although blocks have several tokens, which must be exact until their block is complete.
    """

    key_code: Code
    value_code: Code

    def __post_init__(self) -> None:
        for code, width in ((self.key_code, self.R), (self.value_code, self.Z)):
            if reason := code.refusal(width):
                raise PlanError(reason)
        if self.block > 1 and self.near_code is not None:
            raise PlanError(
                f"near_code={self.near_code}: must be None, since {self.block} tokens are quantized together"
            )
        if self.block > 1 and self.window < self.block:
            raise PlanError(
                f"window={self.window} must be at least {self.block}, the tokens that are quantized together"
            )

    @property
    def block(self) -> int:
        """Number of tokens that are quantized together, the larger of keys and values."""
        return max(self.key_code.block, self.value_code.block)

    def create_far(self, batch: int, capacity: int) -> tuple[Coded, Coded]:
        # A last block that never completes stays near. Attention needs at least one block of keys.
        tokens = max(1, capacity // self.block) * self.block if self.block > 1 else slots_for(capacity)

        def empty(code: Code, width: int) -> Coded:
            blocks = batch, self.num_kv_heads, tokens // code.block
            return empty_blocks(code, blocks, width, self.dtype)

        return empty(self.key_code, self.R), empty(self.value_code, self.Z)

    def coded_parts(self, far: tuple[Coded, Coded]) -> tuple[CodedParts, CodedParts]:
        keys, values = self._pair_codes(far)
        return [keys], [values]

    def from_parts(self, keys: Sequence[Coded], values: Sequence[Coded]) -> tuple[Coded, Coded]:
        (coded_k,), (coded_v,) = keys, values
        return coded_k, coded_v

    def code_far(self, state: NearFarState, new: NewTokens) -> tuple[Coded, Coded]:
        k, v = new.k.keys, new.v
        stored, parts = self._pair_codes(state.far), (k[..., : self.R], v[..., : self.Z])
        if pools_of(state.far)[1] is not None:
            put = partial(_put_in_pages, positions=new.positions, end=new.end)
            coded_k, coded_v = (put(*each, x) for each, x in zip(stored, parts, strict=True))
            return coded_k, coded_v
        sinks, window = state.near.near

        def put_complete_blocks(code: Code, stored: Coded, ring: Array, x: Array, width: int) -> Coded:
            """Return `stored` with the blocks that the new tokens' vectors x [B, T, K, _] complete."""
            start, block = new.start, code.block
            first, blocks, rows = start // block, x.shape[1], x.swapaxes(1, 2)
            if block > 1:
                blocks = x.shape[1] // block + 1
                rows = recent_rows(ring, x, start, first * block, sinks=sinks, window=window, past=block - 1)
                rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % block), (0, 0)))
            rows = rows[:, :, : blocks * block, :width].reshape(*rows.shape[:2], blocks, block, width)
            complete = (first[:, None] + jnp.arange(blocks) + 1) * block <= new.end[:, None]
            put = partial(put_blocks, first=first, complete=complete)
            return jax.tree.map(put, stored, code.encode(rows))

        codes, rings = (self.key_code, self.value_code), (state.near.ring_k, state.near.ring_v)
        return tuple(map(put_complete_blocks, codes, state.far, rings, (k, v), (self.R, self.Z)))

    def attend_far(
        self, far: tuple[Coded, Coded], q: Array, positions: Array, call: Call
    ) -> tuple[Array, Array]:
        """Compute attention to the far tokens.

        Kernels decode from the quantized store. For chunks of prompts, they dequantize it first.
        """
        pools, table = pools_of(far)
        if q.shape[1] > 1:
            if self._can_dequantize(pools, table, q, call):
                planes = self._convert_planes(pools)
                # Later slots have arbitrary values, which the kernels of `attend_rows` do not read.
                ends = positions[:, -1] + 1 - self.window
                k, v = dequantise(planes, ends, dtype=self.dtype, block_table=table)
            else:
                k, v = self.read(far)
            return self.attend_rows(q, k, v, positions, call)
        stored = kernel_planes(self._pair_codes(pools))
        refusal = partial(coded_decode_refusal, q, stored, table=table)
        if takes_kernels("coded decode", call.implementation, refusal):
            read, _ = self.far_pass(far, q, positions, call, None)
            return attend_passes(q, read, scale=call.scale)
        return self.attend_rows(q, *self.read(far), positions, replace(call, implementation="xla"))

    def attend_jointly(self, state: NearFarState, q: Array, new: NewTokens, call: Call) -> Attended | None:
        if not self._can_join(state, q, call):
            return None
        means = _find_means(new, call)
        near, trailing = self.near.join_prompt(state.near, new, means)
        return self._attend_joined(NearFarState(near, state.far), trailing, means, q, new, call)

    def attend_in_place(
        self,
        state: NearFarState,
        rows: Array,
        q: Array,
        new: NewTokens,
        call: Call,
        snapshots: Snapshots | None = None,
    ) -> tuple[Attended, list[Array]] | None:
        ring = self.near
        if not isinstance(ring, CodedRing) or not self._can_join(state, q, call):
            return None
        new, call = move_shift(new, replace(call, end=new.end), self.capacity(state.far))
        q, new = new.rotate(q, call, by_token=True)
        means = _find_means(new, call)
        placed = ring.put_prompt(state.near, rows, new, means, snapshots)
        if placed is None:
            return None
        near, trailing, copies = placed
        return self._attend_joined(NearFarState(near, state.far), trailing, means, q, new, call), copies

    @property
    def stores_in_place(self) -> bool:
        return self._is_joinable and isinstance(self.near_code, FittedIntegers)

    @property
    def codes_in_place(self) -> bool:
        planes = jax.eval_shape(lambda: self._convert_planes(self.create_far(1, self.block)))
        return self.stores_in_place and all(planes)

    @property
    def _is_joinable(self) -> bool:
        """Whether near and far tokens have the same coordinates, and a kernel supports the near ones."""
        return self.R == self.Z == self.head_dim and 0 < self.window <= NEAR_WINDOW

    def _can_join(self, state: NearFarState, q: Array, call: Call) -> bool:
        """Return whether one kernel computes attention of a chunk to near and to dequantized far tokens."""
        if q.shape[1] == 1 or not self._is_joinable or state.near.near != (self.sinks, self.window):
            return False
        return self._can_dequantize(*pools_of(state.far), q, call)

    def _attend_joined(
        self,
        state: NearFarState,
        trailing: Trailing,
        means: BlockMeans | None,
        q: Array,
        new: NewTokens,
        call: Call,
    ) -> Attended:
        """Write new tokens to the store and attend to it and to the near tokens `trailing`.

        With `means`, older keys regain them, as `trailing` has, and block scores are not needed.
        """
        far = self.write_far(state, new)
        pools, table = pools_of(far)
        planes = self._convert_planes(pools)
        of_sinks = [x.astype(self.dtype) for x in (trailing.sink_k, trailing.sink_v) if x is not None]
        far_k, far_v = dequantise(
            planes,
            new.positions[:, -1] + 1 - self.window,
            dtype=self.dtype,
            block_table=table,
            sinks=self.sinks,
            sink_values=of_sinks,
            means=means,
        )
        o, lse = prefill_attention(
            q,
            far_k,
            far_v,
            scale=call.scale,
            starts=new.start,
            lengths=new.end,
            needed_from=call.needed_from,
            window=self.window,
            keys="far",
            near=trailing._replace(sink_k=None, sink_v=None),
            block_scores=call.block_scores if means is None else None,
        )
        return Attended(NearFarState(state.near, far), o, lse, None)

    def far_pass(
        self,
        far: tuple[Coded, Coded],
        q: Array,
        positions: Array,
        call: Call,
        aux: Any,
        arranged: ArrangedQueries | None = None,
    ) -> tuple[CodedPass, Any]:
        (pools, table), near = pools_of(far), (self.sinks, self.window)
        stored = kernel_planes(self._pair_codes(pools))
        options: dict[str, Any] = {"table": table, "arranged": arranged}
        return far_pass(q, stored, positions, near, block_scores=call.block_scores, **options), aux

    def reads_pages(self, state: NearFarState, q: Array, v: Any, call: Call) -> bool:
        (pools, table), q = pools_of(state.far), q[..., : self.R]
        if q.shape[1] > 1:
            return self._can_dequantize(pools, table, q, call)
        refusal = partial(coded_decode_refusal, q, kernel_planes(self._pair_codes(pools)), table=table)
        return takes_kernels("coded decode", call.implementation, refusal)

    def capacity(self, far: tuple[Coded, Coded]) -> int:
        return super().capacity(far) * self.value_code.block

    def read(self, far: tuple[Coded, Coded]) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """Return all keys and values of the store, dequantized, slot = position."""

        def decode(code: Code, coded: Coded, width: int) -> Array:
            x = code.decode(coded, width)
            return x.reshape(*x.shape[:2], -1, width).astype(self.dtype)

        return decode(self.key_code, far[0], self.R), decode(self.value_code, far[1], self.Z)

    def _can_dequantize(
        self, pools: tuple[Coded, Coded], table: Int[Array, "B n"] | None, q: Array, call: Call
    ) -> bool:
        """Return whether kernels dequantize the store for a chunk of a prompt and attend to the result.

        Raises:
          NotImplementedError: the requested implementation cannot serve this call; the message says why.
        """
        planes = self._convert_planes(pools)
        if not all(planes):  # The kernels do not support a code.
            return False
        k, v = (
            jax.ShapeDtypeStruct(
                (*rows_of(each[0].reach, table), sum(plane.width for plane in each)), self.dtype
            )
            for each in planes
        )
        refusal = partial(stored_attention_refusal, q, k, v, sinks=self.sinks, window=self.window)
        if not takes_kernels("far prompt", call.implementation, refusal):
            return False
        row = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
        refusal = partial(dequantise_refusal, planes, row, dtype=self.dtype, block_table=table)
        return takes_kernels("dequantising", None, refusal)

    def _convert_planes(self, pools: tuple[Coded, Coded]) -> list[list[Plane]]:
        """Return the planes of keys and those of values."""
        return [kernel_planes([part]) for part in self._pair_codes(pools)]

    def _pair_codes(self, far: tuple[Coded, Coded]) -> tuple[tuple[Code, Coded], ...]:
        return (self.key_code, far[0]), (self.value_code, far[1])


def _find_means(new: NewTokens, call: Call) -> BlockMeans | None:
    """Return the means that keys regain for queries of a chunk; None if keys are whole, or have block scores.

    Means are relative to that of the block in the middle of the new tokens. Near it little is added to keys,
    so that rounding loses little. Far from it they are at most twice as large as the mean.
    """
    if call.means_of_keys is None:
        return None
    return BlockMeans(call.means_of_keys, (new.start + new.end) // 2 // BLOCK)


def _put_in_pages(code: Code, stored: Coded, x: Array, *, positions: Array, end: Array) -> Coded:
    """Write x [B, T, K, C] below `end` into the pages `stored`, on any device.

    The code must quantize single tokens.
    """

    def put(pages: Pages, new: Array) -> Pages:
        flat_pages = Pages(_flatten_slots(pages.pool), pages.table)
        written = put_tokens(flat_pages, _flatten_slots(new), positions, end)
        assert isinstance(written, Pages)
        return Pages(written.pool.reshape(pages.pool.shape), pages.table)

    new = code.encode(x[..., None, :])
    return jax.tree.map(put, stored, new, is_leaf=lambda leaf: isinstance(leaf, Pages))


def put_blocks(buffer: Any, new: Any, first: Array, complete: Array) -> Array:
    """Write `new` [B, K, blocks, …] into `buffer` [B, K, n, …] from block `first` on, where complete."""
    written = put_rows(_flatten_slots(buffer), _flatten_slots(new).swapaxes(1, 2), first, complete)
    return written.reshape(buffer.shape)


def _flatten_slots(x: Array) -> Array:
    """Merge all axes after the third: the contents of a slot."""
    return x.reshape(*x.shape[:3], -1)
