"""Far tokens in codes, of which an index of few coordinates chooses those that are read (ours).

The first coordinates of keys, which a calibrated basis orders by energy, have a plane of their own: it is the
index, and part of the answer. The other coordinates of keys, and values, are planes that decoding reads of
chosen tokens alone. What is chosen answers with all its coordinates.

On kernels queries of a piece of a prompt are as many decoded tokens that share one store: each has a row of
its own in a block table. A piece thus chooses and gives what its tokens would one by one, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Float, Int

from kernels_pallas import Parts, Plane
from kernels_pallas.coded_scan import in_sample
from zdc_jax.axes import Array
from zdc_jax.cache.choosing import Choosing, FarTokens
from zdc_jax.cache.coded_far import CodedFar, Made
from zdc_jax.cache.codes import Code, Coded, coded_shapes, decode_tokens, empty_tokens, encode_tokens
from zdc_jax.cache.fitted_integers import kernel_planes
from zdc_jax.cache.near_far import NearFarState
from zdc_jax.cache.pages import Pages, pools_of
from zdc_jax.cache.prefix_ring import put_tokens
from zdc_jax.cache.spec import Call
from zdc_jax.errors import PlanError
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.stored import (
    choice_refusal,
    choose_by_index,
    coded_decode,
    coded_decode_refusal,
    merge_parts,
    queries_at_once,
    slots_for,
    takes_kernels,
)
from zdc_jax.ops.xla import by_query_blocks, in_query_blocks, query_block


@dataclass(frozen=True, kw_only=True)
class CodedChoosing(CodedFar, Choosing):
    """`Choosing` by the first `index` coordinates of keys, of tokens in codes. Each is coded when it comes.

    The store is `FarTokens` of coded [B, K, S, …] arrays: k of the coordinates from `index` on, v, and the
    index. A page counts by the probability of all its tokens. Pages chosen are handed on where `leads`; a
    layer with `index=0` takes those of the layer that handed on last, which reads as many.

    Raises:
      PlanError: an index that is not below R, a code that cannot hold its coordinates, pages longer than the
        window, or what `Choosing` refuses.
    """

    index: int
    index_code: Code
    key_code: Code
    value_code: Code
    leads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.index < self.R:
            raise PlanError(f"index={self.index} must be 0 to below {self.R}, the rank of the layer's keys")
        if 1 < self.page > self.window:
            raise PlanError(f"page={self.page} must be at most {self.window} tokens, the window, or 1")
        for code, width in self._planes():
            if reason := code.refusal(width):
                raise PlanError(reason)

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        """`NearFar.create_far`."""
        slots = batch, self.num_kv_heads, slots_for(capacity)

        def empty(code, width):
            return empty_tokens(code, slots, width, self.dtype) if width else ()

        index, k, v = (empty(code, width) for code, width in self._planes())
        return FarTokens(k, v, index)

    def made(self, far: FarTokens) -> Made:
        """`CodedFar.made`."""
        index = [(self.index_code, far.index)] if self.index else []
        return [*index, (self.key_code, far.k)], [(self.value_code, far.v)]

    def of_made(self, keys: Sequence[Coded], values: Sequence[Coded]) -> FarTokens:
        """`CodedFar.of_made`."""
        (*index, coded_k), (coded_v,) = keys, values
        return FarTokens(coded_k, coded_v, *index)

    def code_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        """`CodedFar.code_far`."""
        far = state.far
        put = partial(put_coded, positions=positions, end=end)
        return FarTokens(
            put(far.k, self.key_code, k[..., self.index : self.R]),
            put(far.v, self.value_code, v[..., : self.Z]),
            put(far.index, self.index_code, k[..., : self.index]),
        )

    def far_part(
        self, far: FarTokens, q: Array, k: Any, positions: Array, call: Call, aux: Any
    ) -> tuple[Array, Array, Any]:
        """`NearFar.far_part`: hands on what was chosen, or takes it."""
        q = q[..., : self.R]
        if self.index and not self.leads:
            return *self.attend_far(far, q, positions, call), aux
        pages = self._all_chosen(far, q, positions, call) if self.index else aux
        return *self.attend_pages(far, q, positions, pages, call), pages

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        """`Choosing.attend_far`; on kernels, where these choose and read, block by block of queries."""
        if not self._is_on_kernels(far, q, call):
            # The log has the reason by now. For a single token kernels may still choose.
            on_xla = replace(call, implementation="xla")
            return super().attend_far(far, q, positions, call if q.shape[1] == 1 else on_xla)

        def one_block(q: Array, positions: Array) -> tuple[Array, Array]:
            return self.attend_pages(far, q, positions, self.chosen(far, q, positions, call), call)

        return in_query_blocks(one_block, self._at_once(far, q), q, positions)

    def chosen(self, far: FarTokens, q: Array, positions: Array, call: Call) -> Int[Array, "B T K n"]:
        """`Choosing.chosen`, of all queries at once; kernels choose single tokens."""
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
        """`Choosing.attend_pages`; kernels read tokens in codes."""
        if not self._reads_on_kernels(far, q, pages, call):
            return super().attend_pages(far, q, positions, pages, replace(call, implementation="xla"))

        def one_block(q: Array, positions: Array, pages: Array) -> tuple[Array, Array]:
            return merge_parts(q, self._parts(far, q, positions, pages, call))

        return in_query_blocks(one_block, self._at_once(far, q), q, positions, pages)

    def decode_parts(
        self, far: FarTokens, q: Array, positions: Array, call: Call, aux: Any
    ) -> tuple[Parts, Any]:
        """`CodedFar.decode_parts`."""
        pages = self.chosen(far, q, positions, call) if self.index else aux
        parts = self._parts(far, q, positions, pages, call)
        return parts, pages if self.leads or not self.index else aux

    def _parts(
        self, far: FarTokens, q: Array, positions: Array, slots: Int[Array, "B T K n"], call: Call
    ) -> Parts:
        """What each query gets of the tokens in its `slots`, on the kernel."""
        pools, table = pools_of(far)
        planes, near = self._kernel_planes(pools), (self.sinks, self.window)
        return coded_decode(q, planes, positions, near, scale=call.scale, slots=slots, table=table)

    def reads_pages(self, state: NearFarState, q: Array, v: Any, call: Call) -> bool:
        """`LayerCacheSpec.reads_pages`: where kernels choose and read."""
        return self._is_on_kernels(state.far, q[..., : self.R], call)

    def _is_on_kernels(self, far: FarTokens, q: Array, call: Call) -> bool:
        """Whether kernels choose, unless another layer does, and attend to what is chosen."""
        slots = jax.ShapeDtypeStruct((*q.shape[:2], self.num_kv_heads, self.read), jnp.int32)
        reads = self._reads_on_kernels(far, q, slots, call)
        return reads and (not self.index or self._chooses_on_kernels(far, q, call))

    def _chooses_on_kernels(self, far: FarTokens, q: Array, call: Call) -> bool:
        """Whether the index chooses there."""
        index, table = pools_of(far.index)

        def refusal() -> str | None:
            if self.page > 1:
                return f"kernels choose single tokens, not pages of {self.page}"
            planes = kernel_planes([(self.index_code, index)])
            return choice_refusal(q[..., : self.index], planes, self.read, table)

        return takes_kernels("choice", call.implementation, refusal)

    def _reads_on_kernels(self, far: FarTokens, q: Array, slots: Any, call: Call) -> bool:
        """Whether they attend there to what is in `slots`."""
        refusal = partial(self._read_refusal, far, q, slots)
        return takes_kernels("attention to chosen tokens", call.implementation, refusal)

    def _read_refusal(self, far: FarTokens, q: Array, slots: Any) -> str | None:
        """Why kernels cannot attend to what is in `slots`."""
        if self.page > 1:
            return f"kernels read single tokens, not pages of {self.page}"
        pools, table = pools_of(far)
        return coded_decode_refusal(q, self._kernel_planes(pools), slots=slots, table=table)

    def _at_once(self, far: FarTokens, q: Array) -> int:
        """Queries of a row that kernels take at once."""
        B, T = q.shape[:2]
        return queries_at_once(B, self.num_kv_heads, self.capacity(far), T)

    def capacity(self, far: FarTokens) -> int:
        """`Choosing.capacity`, of pages, too."""
        first = jax.tree.leaves(far.v, is_leaf=lambda x: isinstance(x, Pages))[0]
        return first.slots if isinstance(first, Pages) else first.shape[2]

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        """`Choosing.rows`."""

        def take(x):
            return jnp.take_along_axis(x, slots[..., None], axis=2)

        return self.all_rows(jax.tree.map(take, far))

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """`Choosing.all_rows`."""

        def decoded(code, coded, width):
            return decode_tokens(code, coded, width).astype(self.dtype)

        k = decoded(self.key_code, far.k, self.R - self.index)
        if self.index:
            k = jnp.concatenate([decoded(self.index_code, far.index, self.index), k], axis=-1)
        return k, decoded(self.value_code, far.v, self.Z)

    def page_scores(self, far: FarTokens, q: Array, scale: float) -> Array:
        """`Choosing.page_scores`: logarithms of the sums of exponentials of a page's scores."""
        index = decode_tokens(self.index_code, far.index, self.index).astype(self.dtype)
        scores = scale * einsum_f32("BTKGR,BKSR->BTKGS", q[..., : self.index], index)
        if self.page == 1:
            return scores
        lowest = jnp.finfo(jnp.float32).min
        padded = jnp.pad(
            scores, ((0, 0),) * 4 + ((0, -scores.shape[-1] % self.page),), constant_values=lowest
        )
        return self.of_pages(padded.reshape(*scores.shape[:-1], -1, self.page))

    def denominators(self, scores: Array) -> Array:
        """`Choosing.denominators`, of single tokens those of a sample: the kernel need not read all twice."""
        if self.page == 1:
            sampled = in_sample(jnp.arange(scores.shape[-1]), jnp.int32(self.sinks))
            scores = jnp.where(sampled, scores, jnp.finfo(jnp.float32).min)
        return super().denominators(scores)

    def of_pages(self, scores: Float[Array, "B T K G pages page"]) -> Float[Array, "B T K G pages"]:
        """Scores of pages by those of their tokens: by the sum of what they weigh."""
        return logsumexp(scores, axis=-1)

    def index_bytes(self, tokens: int) -> int:
        """`Choosing.index_bytes`."""
        return tokens * self._plane_bytes(self._planes()[:1])

    @property
    def token_bytes(self) -> int:
        """`Choosing.token_bytes`: of a layer that chooses itself, without the index, which is read anyway."""
        return self._plane_bytes(self._planes()[1:])

    def _kernel_planes(self, far: FarTokens) -> list[Plane]:
        parts = (far.index, far.k, far.v)
        return kernel_planes(
            (code, coded) for (code, width), coded in zip(self._planes(), parts, strict=True) if width
        )

    def _all_chosen(self, far: FarTokens, q: Array, positions: Array, call: Call) -> Array:
        """`chosen`, block by block of queries."""
        B, T, N, _ = q.shape
        on_kernels = self._chooses_on_kernels(far, q, call)
        block = self._at_once(far, q) if on_kernels else query_block(2 * B * N * self.capacity(far), T)

        def chosen(q, positions):
            return self.chosen(far, q, positions, call)

        return by_query_blocks(chosen, block, q, positions)

    def _planes(self) -> tuple[tuple[Code, int], ...]:
        """Codes of index, keys and values, and how many coordinates each has."""
        widths = self.index, self.R - self.index, self.Z
        return tuple(zip((self.index_code, self.key_code, self.value_code), widths, strict=True))

    def _plane_bytes(self, planes: tuple[tuple[Code, int], ...]) -> int:
        """Bytes of a token in these planes, in all heads."""

        def plane(code: Code, width: int) -> int:
            leaves = jax.tree.leaves(coded_shapes(code, width, self.dtype))
            return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

        return self.num_kv_heads * sum(plane(code, width) for code, width in planes if width)


def put_coded(held: Coded, code: Code, x: Float[Array, "B T K C"], *, positions: Array, end: Array) -> Coded:
    """Coded arrays [B, K, S, …], or pages, with x at `positions` below `end`; those of C = 0 are none."""
    if not x.shape[-1]:
        return held

    def put(buffer, new):
        return put_tokens(buffer, new, positions, end)

    return jax.tree.map(put, held, encode_tokens(code, x), is_leaf=lambda leaf: isinstance(leaf, Pages))
