"""Quantized far tokens, from which an index of few coordinates chooses the tokens to read (ours).

The index is a plane of the store itself: the first coordinates of keys, which a calibrated basis orders by
energy. The remaining coordinates of keys and the values are planes that decoding reads for chosen tokens
only. A chosen token takes part in attention with all its coordinates.

On kernels, the queries of a chunk run like decoded tokens that share one store, each with its own row of the
block table. The result equals decoding the tokens one by one, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Float, Int

from kernels_pallas import CodedPass, Plane
from kernels_pallas.select.scan_inputs import in_sample
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import (
    Code,
    Coded,
    CodedParts,
    coded_shapes,
    decode_tokens,
    empty_tokens,
    encode_tokens,
)
from zdc_jax.cache.codes.fitted_integers import kernel_planes
from zdc_jax.cache.paging.pages import Pages, pools_of
from zdc_jax.cache.specs.choosing import Choosing, FarTokens, scores_of, take_scores, take_slots
from zdc_jax.cache.specs.coded_far import CodedFar
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.prefix_ring import put_tokens
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops.cache_attention import (
    ArrangedQueries,
    attend_passes,
    choice_refusal,
    choose_by_index,
    coded_decode_refusal,
    far_pass,
    queries_at_once,
    slots_for,
    takes_kernels,
)
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.shift import of_slots
from zdc_jax.ops.xla import by_query_blocks, in_query_blocks, query_block


@dataclass(frozen=True, kw_only=True)
class CodedChoosing(CodedFar, Choosing):
    """`Choosing` by the first `index` coordinates of quantized keys. Tokens are quantized as they arrive.

    The store is a `FarTokens` of quantized arrays [B, K, S, …]: k from coordinate `index` on, v, and the
    index. The score of a page combines the probabilities of all its tokens.

    Attributes:
      index: number of coordinates that choose. A layer with `index=0` reads the pages of the last layer
        before it with `leads`, which must read as many tokens.
      index_code: quantization of the index.
      key_code: quantization of the other coordinates of keys.
      value_code: quantization of values.
      leads: whether the chosen pages are passed on to the following layers.

    Raises:
      PlanError: the index is not below R; a code does not support its coordinates; a page is longer than the
        window; see also `Choosing`.
    """

    index: int
    index_code: Code
    key_code: Code
    value_code: Code
    leads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.index < self.R:
            raise PlanError(
                f"index={self.index} must be from 0 to {self.R - 1}, below the rank of the layer's keys"
            )
        if 1 < self.page > self.window:
            raise PlanError(f"page={self.page} must be 1, or at most {self.window} tokens, the window")
        for code, width in self._list_planes():
            if reason := code.refusal(width):
                raise PlanError(reason)

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        slots = batch, self.num_kv_heads, slots_for(capacity)

        def empty(code: Code, width: int) -> Coded:
            return empty_tokens(code, slots, width, self.dtype) if width else ()

        index, k, v = (empty(code, width) for code, width in self._list_planes())
        return FarTokens(k, v, index)

    def coded_parts(self, far: FarTokens) -> tuple[CodedParts, CodedParts]:
        index = [(self.index_code, far.index)] if self.index else []
        return [*index, (self.key_code, far.k)], [(self.value_code, far.v)]

    def from_parts(self, keys: Sequence[Coded], values: Sequence[Coded]) -> FarTokens:
        (*index, coded_k), (coded_v,) = keys, values
        return FarTokens(coded_k, coded_v, *index)

    def code_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        far, k = state.far, new.k.keys
        put = partial(put_coded, positions=new.positions, end=new.end)
        return FarTokens(
            put(far.k, self.key_code, k[..., self.index : self.R]),
            put(far.v, self.value_code, new.v[..., : self.Z]),
            put(far.index, self.index_code, k[..., : self.index]),
        )

    def far_part(
        self, far: FarTokens, q: Array, k: NewKeys | None, positions: Array, call: Call, aux: Any
    ) -> tuple[Array, Array, Any]:
        """Compute attention to chosen pages; pass them on as `aux`, or read them from it."""
        q = q[..., : self.R]
        if self.index and not self.leads:
            return *self.attend_far(far, q, positions, call), aux
        pages = self._choose_all(far, q, positions, call) if self.index else aux
        return *self.attend_pages(far, q, positions, pages, call), pages

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        """Compute attention to chosen tokens; on kernels, in blocks of queries."""
        if not self._is_on_kernels(far, q, call):
            # The reason is logged by now. For a single token, kernels may still choose.
            on_xla = replace(call, implementation="xla")
            return super().attend_far(far, q, positions, call if q.shape[1] == 1 else on_xla)

        def one_block(q: Array, positions: Array, *scores: Array) -> tuple[Array, Array]:
            own, _ = take_scores(call, scores)
            return self.attend_pages(far, q, positions, self.chosen(far, q, positions, own), own)

        block = self._count_queries_at_once(far, q)
        return in_query_blocks(one_block, block, q, positions, *scores_of(call))

    def chosen(self, far: FarTokens, q: Array, positions: Array, call: Call) -> Int[Array, "B T K n"]:
        """Return the pages that each query reads, for all queries at once; kernels choose single tokens."""
        if not self._chooses_on_kernels(far, q, call):
            return super().chosen(far, q, positions, call)
        index, table = pools_of(far.index)
        return choose_by_index(
            q[..., : self.index],
            kernel_planes([(self.index_code, index)]),
            positions,
            count=self.read,
            scale=call.scale,
            sinks=self.sinks,
            window=self.window,
            table=table,
        )

    def attend_pages(
        self, far: FarTokens, q: Array, positions: Array, pages: Int[Array, "B T K n"], call: Call
    ) -> tuple[Array, Array]:
        if not self._reads_on_kernels(far, q, pages, call):
            return super().attend_pages(far, q, positions, pages, replace(call, implementation="xla"))

        def one_block(q: Array, positions: Array, pages: Array, *scores: Array) -> tuple[Array, Array]:
            own, _ = take_scores(call, scores)
            read = self._pass_over_slots(far, q, positions, pages, own)
            return attend_passes(q, read, scale=call.scale)

        block = self._count_queries_at_once(far, q)
        return in_query_blocks(one_block, block, q, positions, pages, *scores_of(call))

    def far_pass(
        self,
        far: FarTokens,
        q: Array,
        positions: Array,
        call: Call,
        aux: Any,
        arranged: ArrangedQueries | None = None,
    ) -> tuple[CodedPass, Any]:
        pages = self.chosen(far, q, positions, call) if self.index else aux
        read = self._pass_over_slots(far, q, positions, pages, call, arranged)
        return read, pages if self.leads or not self.index else aux

    def _pass_over_slots(
        self,
        far: FarTokens,
        q: Array,
        positions: Array,
        slots: Int[Array, "B T K n"],
        call: Call,
        arranged: ArrangedQueries | None = None,
    ) -> CodedPass:
        """Return the kernel's pass from each query over the tokens in its `slots`."""
        pools, table = pools_of(far)
        planes, near = self._convert_planes(pools), (self.sinks, self.window)
        options: dict[str, Any] = {"slots": slots, "table": table, "arranged": arranged}
        return far_pass(q, planes, positions, near, block_scores=call.block_scores, **options)

    def reads_pages(self, state: NearFarState, q: Array, v: Any, call: Call) -> bool:
        return self._is_on_kernels(state.far, q[..., : self.R], call)

    def _is_on_kernels(self, far: FarTokens, q: Array, call: Call) -> bool:
        """Return whether kernels attend to the chosen tokens, and choose them unless another layer does."""
        slots = jax.ShapeDtypeStruct((*q.shape[:2], self.num_kv_heads, self.read), jnp.int32)
        reads = self._reads_on_kernels(far, q, slots, call)
        return reads and (not self.index or self._chooses_on_kernels(far, q, call))

    def _chooses_on_kernels(self, far: FarTokens, q: Array, call: Call) -> bool:
        """Return whether kernels choose tokens by the index."""
        index, table = pools_of(far.index)

        def refusal() -> str | None:
            if self.page > 1:
                return f"kernels choose single tokens, not pages of {self.page}"
            planes = kernel_planes([(self.index_code, index)])
            return choice_refusal(q[..., : self.index], planes, self.read, table, call.block_scores)

        return takes_kernels("choice", call.implementation, refusal)

    def _reads_on_kernels(self, far: FarTokens, q: Array, slots: Any, call: Call) -> bool:
        """Return whether kernels attend to the tokens in `slots`."""
        refusal = partial(self._read_refusal, far, q, slots)
        return takes_kernels("attention to chosen tokens", call.implementation, refusal)

    def _read_refusal(self, far: FarTokens, q: Array, slots: Any) -> str | None:
        """Return why kernels cannot attend to the tokens in `slots`, or None if they can."""
        if self.page > 1:
            return f"kernels read single tokens, not pages of {self.page}"
        pools, table = pools_of(far)
        return coded_decode_refusal(q, self._convert_planes(pools), slots=slots, table=table)

    def _count_queries_at_once(self, far: FarTokens, q: Array) -> int:
        """Return the number of queries per sequence that kernels process at once."""
        B, T = q.shape[:2]
        return queries_at_once(B, self.num_kv_heads, self.capacity(far), T)

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        return self.all_rows(jax.tree.map(partial(take_slots, slots=slots), far))

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        def decode(code: Code, coded: Coded, width: int) -> Array:
            return decode_tokens(code, coded, width).astype(self.dtype)

        k = decode(self.key_code, far.k, self.R - self.index)
        if self.index:
            k = jnp.concatenate([decode(self.index_code, far.index, self.index), k], axis=-1)
        return k, decode(self.value_code, far.v, self.Z)

    def page_scores(self, far: FarTokens, q: Array, call: Call) -> Array:
        """Return the log-sum-exp of the scores of each page's tokens."""
        index = decode_tokens(self.index_code, far.index, self.index).astype(self.dtype)
        scores = call.scale * einsum_f32("BTKGR,BKSR->BTKGS", q[..., : self.index], index)
        if call.block_scores is not None:
            gains = of_slots(call.block_scores, jnp.arange(scores.shape[-1]), self.num_kv_heads)
            scores += jnp.moveaxis(gains, 3, 1)
        if self.page == 1:
            return scores
        lowest = jnp.finfo(jnp.float32).min
        padded = jnp.pad(
            scores, ((0, 0),) * 4 + ((0, -scores.shape[-1] % self.page),), constant_values=lowest
        )
        return self.of_pages(padded.reshape(*scores.shape[:-1], -1, self.page))

    def denominators(self, scores: Array) -> Array:
        """Return the log-sum-exp of the scores; for single tokens, that of a sample.

        The sample saves the kernel a second pass over all scores.
        """
        if self.page == 1:
            sampled = in_sample(jnp.arange(scores.shape[-1]), jnp.int32(self.sinks))
            scores = jnp.where(sampled, scores, jnp.finfo(jnp.float32).min)
        return super().denominators(scores)

    def of_pages(self, scores: Float[Array, "B T K G pages page"]) -> Float[Array, "B T K G pages"]:
        """Return scores of pages from those of their tokens, as log-sum-exp."""
        return logsumexp(scores, axis=-1)

    def index_bytes(self, tokens: int) -> int:
        return tokens * self._count_plane_bytes(self._list_planes()[:1])

    @property
    def token_bytes(self) -> int:
        """Bytes of a chosen token, without the index, which is read for every token anyway."""
        return self._count_plane_bytes(self._list_planes()[1:])

    def _convert_planes(self, far: FarTokens) -> list[Plane]:
        parts = (far.index, far.k, far.v)
        return kernel_planes(
            (code, coded) for (code, width), coded in zip(self._list_planes(), parts, strict=True) if width
        )

    def _choose_all(self, far: FarTokens, q: Array, positions: Array, call: Call) -> Array:
        """Return `chosen`, computed in blocks of queries."""
        B, T, N, _ = q.shape
        on_kernels = self._chooses_on_kernels(far, q, call)
        block = (
            self._count_queries_at_once(far, q)
            if on_kernels
            else query_block(2 * B * N * self.capacity(far), T)
        )

        def choose(q: Array, positions: Array, *scores: Array) -> Array:
            return self.chosen(far, q, positions, take_scores(call, scores)[0])

        return by_query_blocks(choose, block, q, positions, *scores_of(call))

    def _list_planes(self) -> tuple[tuple[Code, int], ...]:
        """Return the codes of index, keys and values, each with its number of coordinates."""
        widths = self.index, self.R - self.index, self.Z
        return tuple(zip((self.index_code, self.key_code, self.value_code), widths, strict=True))

    def _count_plane_bytes(self, planes: tuple[tuple[Code, int], ...]) -> int:
        """Return the bytes of one token in these planes, in all heads."""
        shapes = [coded_shapes(code, width, self.dtype) for code, width in planes if width]
        return self.num_kv_heads * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def put_coded(
    stored: Coded, code: Code, x: Float[Array, "B T K C"], *, positions: Array, end: Array
) -> Coded:
    """Quantize x and write it at `positions` below `end` into coded arrays [B, K, S, …], or their pages.

    With C = 0 there are no arrays, and the result is `stored` unchanged.
    """
    if not x.shape[-1]:
        return stored
    put = partial(put_tokens, positions=positions, end=end)
    return jax.tree.map(put, stored, encode_tokens(code, x), is_leaf=lambda leaf: isinstance(leaf, Pages))
