"""A store of far tokens in codes, every token coded when its block of tokens is complete (ours)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import Parts, Plane
from zdc_jax.axes import Array
from zdc_jax.cache.coded_far import CodedFar, Made
from zdc_jax.cache.codes import Code, Coded, empty_blocks
from zdc_jax.cache.fitted_integers import kernel_planes
from zdc_jax.cache.near_far import NearFarState
from zdc_jax.cache.pages import Pages, pools_of
from zdc_jax.cache.prefix_ring import put_tokens, recent_rows
from zdc_jax.cache.spec import Call, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.stored import (
    can_dequantize_far,
    coded_decode,
    coded_decode_refusal,
    dequantize_far,
    merge_parts,
    slots_for,
    takes_kernels,
)


@dataclass(frozen=True, kw_only=True)
class CodedStore(CodedFar):
    """`NearFar` whose far keys and values are read through `key_code` and `value_code`.

    The store is a pair of trees of leaves [B, K, S/block, …], of as many tokens as both codes complete; the
    longer block is a multiple of the other. On XLA attention reads all of it in the model's dtype.

    Raises:
      PlanError: a code cannot hold vectors of R or Z coordinates; or the window is shorter than a block, or
        coded, whose tokens must be whole until it is complete.
    """

    key_code: Code
    value_code: Code

    def __post_init__(self) -> None:
        for code, width in ((self.key_code, self.R), (self.value_code, self.Z)):
            if reason := code.refusal(width):
                raise PlanError(reason)
        if self.block > 1 and self.near_code is not None:
            raise PlanError(f"{self.near_code} of near tokens: {self.block} of them are to be coded together")
        if self.block > 1 and self.window < self.block:
            raise PlanError(f"window={self.window} must be at least {self.block}, the tokens coded together")

    @property
    def block(self) -> int:
        """Tokens that are coded together, of keys or of values."""
        return max(self.key_code.block, self.value_code.block)

    def create_far(self, batch: int, capacity: int) -> tuple[Coded, Coded]:
        """`NearFar.create_far`."""
        # A last block that never completes is always near; one there must be, for attention wants keys.
        tokens = max(1, capacity // self.block) * self.block if self.block > 1 else slots_for(capacity)

        def empty(code: Code, width: int) -> Coded:
            blocks = batch, self.num_kv_heads, tokens // code.block
            return empty_blocks(code, blocks, width, self.dtype)

        return empty(self.key_code, self.R), empty(self.value_code, self.Z)

    def made(self, far: tuple[Coded, Coded]) -> Made:
        """`CodedFar.made`."""
        keys, values = self._stored(far)
        return [keys], [values]

    def of_made(self, keys: Sequence[Coded], values: Sequence[Coded]) -> tuple[Coded, Coded]:
        """`CodedFar.of_made`."""
        (coded_k,), (coded_v,) = keys, values
        return coded_k, coded_v

    def code_far(
        self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array
    ) -> tuple[Coded, Coded]:
        """`CodedFar.code_far`."""
        stored, new = self._stored(state.far), (k[..., : self.R], v[..., : self.Z])
        if pools_of(state.far)[1] is not None:
            put = partial(_put_in_pages, positions=positions, end=end)
            coded_k, coded_v = (put(*each, x) for each, x in zip(stored, new, strict=True))
            return coded_k, coded_v
        rings = state.near.ring_k, state.near.ring_v
        codes, widths = (self.key_code, self.value_code), (self.R, self.Z)
        return tuple(
            self._coded(code, held, ring, x, width, state, positions, end)
            for code, held, ring, x, width in zip(codes, state.far, rings, (k, v), widths, strict=True)
        )

    def attend_far(
        self, far: tuple[Coded, Coded], q: Array, positions: Array, call: Call
    ) -> tuple[Array, Array]:
        """`NearFar.attend_far`; kernels decode from the codes, and pieces of prompts from what they say."""
        pools, table = pools_of(far)
        if q.shape[1] > 1:
            if self._takes_numbers(pools, table, q, call):
                planes = self._planes(pools)
                k, v = dequantize_far(planes, positions, window=self.window, dtype=self.dtype, table=table)
            else:
                k, v = self.read(far)
            return self.attend_rows(q, k, v, positions, call)
        stored = kernel_planes(self._stored(pools))
        refusal = partial(coded_decode_refusal, q, stored, table=table)
        if takes_kernels("coded decode", call.implementation, refusal):
            return merge_parts(q, self.decode_parts(far, q, positions, call, None)[0])
        return self.attend_rows(q, *self.read(far), positions, replace(call, implementation="xla"))

    def decode_parts(
        self, far: tuple[Coded, Coded], q: Array, positions: Array, call: Call, aux: Any
    ) -> tuple[Parts, Any]:
        """`CodedFar.decode_parts`."""
        (pools, table), near = pools_of(far), (self.sinks, self.window)
        stored = kernel_planes(self._stored(pools))
        return coded_decode(q, stored, positions, near, scale=call.scale, table=table), aux

    def reads_pages(self, state: NearFarState, q: Array, v: Any, call: Call) -> bool:
        """`LayerCacheSpec.reads_pages`: where kernels attend to codes, or to what they say."""
        (pools, table), q = pools_of(state.far), q[..., : self.R]
        if q.shape[1] > 1:
            return self._takes_numbers(pools, table, q, call)
        refusal = partial(coded_decode_refusal, q, kernel_planes(self._stored(pools)), table=table)
        return takes_kernels("coded decode", call.implementation, refusal)

    def read(self, far: tuple[Coded, Coded]) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """All keys and values that the codes hold, slot = position."""

        def decoded(code: Code, coded: Coded, width: int) -> Array:
            x = code.decode(coded, width)
            return x.reshape(*x.shape[:2], -1, width).astype(self.dtype)

        return decoded(self.key_code, far[0], self.R), decoded(self.value_code, far[1], self.Z)

    def _takes_numbers(
        self, pools: tuple[Coded, Coded], table: Int[Array, "B n"] | None, q: Array, call: Call
    ) -> bool:
        """Whether kernels read what the codes say for a piece of a prompt, and attend to it."""
        return can_dequantize_far(
            q,
            self._planes(pools),
            sinks=self.sinks,
            window=self.window,
            dtype=self.dtype,
            implementation=call.implementation,
            table=table,
        )

    def _planes(self, pools: tuple[Coded, Coded]) -> list[list[Plane]]:
        """Planes of keys and of values."""
        return [kernel_planes([each]) for each in self._stored(pools)]

    def _stored(self, far: tuple[Coded, Coded]) -> tuple[tuple[Code, Coded], ...]:
        return (self.key_code, far[0]), (self.value_code, far[1])

    def _coded(
        self,
        code: Code,
        held: Coded,
        ring: Array,
        x: Array,
        width: int,
        state: NearFarState,
        positions: Array,
        end: Array,
    ) -> Coded:
        """The codes `held` with those of the blocks that the new tokens x [B, T, K, _] complete."""
        start, block = positions[:, 0], code.block
        first, blocks = start // block, x.shape[1]
        rows = x.swapaxes(1, 2)
        if block > 1:
            sinks, window = state.near.near
            blocks = x.shape[1] // block + 1
            rows = recent_rows(ring, x, start, first * block, sinks=sinks, window=window, past=block - 1)
            rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % block), (0, 0)))
        rows = rows[:, :, : blocks * block, :width].reshape(*rows.shape[:2], blocks, block, width)
        complete = (first[:, None] + jnp.arange(blocks) + 1) * block <= end[:, None]

        def put(buffer, new):
            return _put_blocks(buffer, new, first, complete)

        return jax.tree.map(put, held, code.encode(rows))


def _put_in_pages(code: Code, held: Coded, x: Array, *, positions: Array, end: Array) -> Coded:
    """Pages `held`, of a code of single tokens, with those of x [B, T, K, C] below `end`; on any device."""

    def put(pages: Pages, new: Array) -> Pages:
        def flat(array):
            return array.reshape(*array.shape[:3], -1)

        done = put_tokens(Pages(flat(pages.pool), pages.table), flat(new), positions, end)
        assert isinstance(done, Pages)
        return Pages(done.pool.reshape(pages.pool.shape), pages.table)

    return jax.tree.map(put, held, code.encode(x[..., None, :]), is_leaf=lambda leaf: isinstance(leaf, Pages))


def _put_blocks(buffer: Any, new: Any, first: Array, complete: Array) -> Array:
    """`buffer` [B, K, n, …] with new [B, K, blocks, …] from block `first` on, where complete."""

    def flat(x):
        return x.reshape(*x.shape[:3], -1)

    put = put_rows(flat(buffer), flat(new).swapaxes(1, 2), first, complete)
    return put.reshape(buffer.shape)
