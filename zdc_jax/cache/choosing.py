"""Stores of far tokens from which decoding reads few: an index says which (after Quest and Loki).

Far tokens are chosen by pages of consecutive positions, anew for each query. All queries of a KV head share
what is read: pages are ordered by the probability that the index gives them, a softmax over pages for each
query head, summed over the group. A constant that one head adds to all its scores thus counts for nothing, as
in attention itself, and no head drowns the others. With one query head a KV head the order is that of the
scores. Of equal pages the lower is taken. Attention to what is chosen is exact; what is not chosen counts as
if it were not there.

One decoded token reads the index, and of keys and values only what is chosen. On XLA pieces of prompts read
everything, and drop what each of their queries did not choose: they give the same and save nothing. Where
kernels choose and read (`zdc_jax.cache.coded_choosing`), each query of a piece reads what it would alone.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.near_far import NearFar, NearFarState
from zdc_jax.cache.prefix_ring import recent_rows
from zdc_jax.cache.spec import Call, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.selection import among_largest
from zdc_jax.ops.stored import takes_kernels
from zdc_jax.ops.xla import chosen_attention, in_query_blocks, query_block

GATHERED = "kernels read single tokens in codes"
MASKED = "pieces of prompts read all on xla, and drop what is not chosen"


class FarTokens(NamedTuple):
    """k [B, K, S, R], v [B, K, S, Z] of all tokens, slot = position; index: what else choosing reads.

    Methods with codes keep trees of arrays [B, K, S, …] instead.
    """

    k: Any
    v: Any
    index: Any = ()


@dataclass(frozen=True, kw_only=True)
class Choosing(NearFar):
    """`NearFar` whose queries read `read` far tokens a KV head, by pages of `page`.

    Raises:
      PlanError: `read` is not a multiple of `page`, and above 0.
    """

    read: int
    page: int = 1

    def __post_init__(self) -> None:
        if self.read < 1 or self.read % self.page:
            raise PlanError(f"read={self.read} must be a multiple of page={self.page} tokens, and above 0")

    @abstractmethod
    def page_scores(
        self, far: FarTokens, q: Float[Array, "B T K G R"], scale: float
    ) -> Float[Array, "B T K G pages"]:
        """What the index says of the scaled score of each page, float32."""

    @abstractmethod
    def index_bytes(self, tokens: int) -> int:
        """Bytes that choosing among so many tokens reads."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a far token's keys and values that are read once it is chosen, in all heads."""
        return self.num_kv_heads * (self.R + self.Z) * jnp.dtype(self.dtype).itemsize

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        """Keys [B, K, n, R] and values [B, K, n, Z] in these slots, and no others read."""

        def take(x):
            return jnp.take_along_axis(x, slots[..., None], axis=2)

        return take(far.k), take(far.v)

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """Keys and values of the whole store."""
        return far.k, far.v

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        def empty(width):
            return jnp.zeros((batch, self.num_kv_heads, capacity, width), self.dtype)

        return FarTokens(empty(self.R), empty(self.Z))

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        start, kept = positions[:, 0], positions < end[:, None]

        def put(buffer, x):
            return put_rows(buffer, x[..., : buffer.shape[-1]], start, kept)

        return state.far._replace(k=put(state.far.k, k), v=put(state.far.v, v))

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        if q.shape[1] == 1:
            return self.attend_pages(far, q, positions, self.chosen(far, q, positions, call), call)

        def are_chosen(q, positions):
            return self.are_chosen(far, q, positions, call.scale)

        return self._attend_masked(far, call, are_chosen, q, positions)

    def attend_pages(
        self, far: FarTokens, q: Array, positions: Array, pages: Int[Array, "B T K n"], call: Call
    ) -> tuple[Array, Array]:
        """`attend_far` to pages that were chosen before."""
        if q.shape[1] == 1:
            takes_kernels("decode of chosen tokens", call.implementation, lambda: GATHERED)
            return self._attend_gathered(far, q, positions, pages, call.scale)
        count = -(-self.capacity(far) // self.page)

        def are_chosen(q: Array, positions: Array, pages: Array) -> Array:
            none = jnp.zeros((*pages.shape[:3], count), bool)
            return jnp.put_along_axis(none, pages, True, axis=-1, inplace=False)

        return self._attend_masked(far, call, are_chosen, q, positions, pages)

    def chosen(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], call: Call
    ) -> Int[Array, "B T K n"]:
        """The pages that each query reads, in any order; those without a far token of its own come last."""
        shared = self.probabilities(far, q, positions, call.scale)
        return jax.lax.top_k(shared, min(self.read // self.page, shared.shape[-1]))[1]

    def are_chosen(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], scale: float
    ) -> Bool[Array, "B T K pages"]:
        """Whether a query reads a page: the same as `chosen`."""
        return among_largest(self.probabilities(far, q, positions, scale), self.read // self.page)

    def probabilities(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], scale: float
    ) -> Float[Array, "B T K pages"]:
        """Logarithms of what the index says of each page, summed over the query heads of a KV head."""
        q = q.reshape(*q.shape[:2], self.num_kv_heads, -1, q.shape[-1])
        scores = self.page_scores(far, q, scale)
        first, t = jnp.arange(scores.shape[-1]) * self.page, positions[:, :, None, None, None]
        has_far = (first + self.page > self.sinks) & (first <= t - self.window)
        scores = jnp.where(has_far, scores, jnp.finfo(jnp.float32).min)
        # Logarithms of probabilities, for these vanish where pages are far apart.
        return logsumexp(scores - self.denominators(scores), axis=3)

    def denominators(self, scores: Float[Array, "B T K G pages"]) -> Float[Array, "B T K G 1"]:
        """Logarithms of the sums of exponentials of each query head's scores."""
        return logsumexp(scores, axis=-1, keepdims=True)

    def capacity(self, far: FarTokens) -> int:
        """Slots of the store."""
        return jax.tree.leaves(far.v)[0].shape[2]

    @property
    def queries_apart(self) -> bool:
        return True

    def bytes_read(self, tokens: int) -> int:
        """`LayerCacheSpec.bytes_read`: the ring, the index, and the keys and values that are chosen."""
        chosen = min(self.read, tokens) * self.token_bytes
        return self.near.bytes(tokens) + self.index_bytes(tokens) + chosen

    def _attend_gathered(
        self, far: FarTokens, q: Array, positions: Array, pages: Array, scale: float
    ) -> tuple[Array, Array]:
        """Attention of single queries to pages [B, 1, K, n], which alone are read."""
        slots = pages[:, 0, :, :, None] * self.page + jnp.arange(self.page)
        slots = slots.reshape(*slots.shape[:2], -1)
        # Slots past the last are of no far token; what stands for them must be a number.
        k, v = self.rows(far, jnp.minimum(slots, self.capacity(far) - 1))
        visible = self._is_far(slots, positions[:, :, None])
        return chosen_attention(q, k, v, visible[:, :, None], scale=scale)

    def _attend_masked(
        self, far: FarTokens, call: Call, are_chosen: Callable[..., Array], q: Array, *of_queries: Array
    ) -> tuple[Array, Array]:
        """Attention that reads all, to the pages that `are_chosen(q, *of_queries)`, positions first."""
        takes_kernels("prompt of chosen tokens", call.implementation, lambda: MASKED)
        B, T, N, _ = q.shape
        k, v = self.all_rows(far)
        S = k.shape[2]

        def one_block(q: Array, positions: Array, *others: Array) -> tuple[Array, Array]:
            visible = jnp.repeat(are_chosen(q, positions, *others), self.page, axis=-1)[..., :S]
            visible &= self._is_far(jnp.arange(S), positions[:, :, None, None])
            return chosen_attention(q, k, v, visible.swapaxes(1, 2), scale=call.scale)

        # The index has scores of its own, at most as many as attention.
        return in_query_blocks(one_block, query_block(2 * B * N * S, T), q, *of_queries)

    def _is_far(self, j: Array, t: Array) -> Array:
        return (j >= self.sinks) & (j <= t - self.window)


@dataclass(frozen=True, kw_only=True)
class PageBounds(Choosing):
    """Pages by a bound of their scores (Tang et al. 2024, Quest: Query-Aware Sparsity for KV Cache).

    Of each page the index keeps the least and the largest value of every key coordinate, in the model's
    dtype, [B, K, ⌈S/page⌉, R] each; no key of the page scores above Σ max(q · least, q · largest). Both are
    of all tokens of the page, which is complete before any of them is far.

    Raises:
      PlanError: a page is not 2 tokens to the window, or what `Choosing` refuses.
    """

    def __post_init__(self) -> None:
        if not 2 <= self.page <= self.window:
            raise PlanError(
                f"page={self.page} must be 2 to {self.window} tokens, the window: it is chosen once complete"
            )
        super().__post_init__()

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        shape = batch, self.num_kv_heads, -(-capacity // self.page), self.R
        bounds = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return super().create_far(batch, capacity)._replace(index=bounds)

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        """`NearFar.write_far`: also the bounds of pages that the new tokens complete."""
        far = super().write_far(state, k, v, positions, end)
        page, (sinks, window), start = self.page, state.near.near, positions[:, 0]
        first, pages = start // page, k.shape[1] // page + 1
        # A page's older tokens are in the ring.
        rows = recent_rows(
            state.near.ring_k, k, start, first * page, sinks=sinks, window=window, past=page - 1
        )
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % page), (0, 0)))
        rows = rows[:, :, : pages * page, : self.R].reshape(*rows.shape[:2], pages, page, self.R)
        complete = (first[:, None] + jnp.arange(pages) + 1) * page <= end[:, None]

        def put(buffer, new):
            return put_rows(buffer, new.swapaxes(1, 2), first, complete)

        least, largest = far.index
        return far._replace(index=(put(least, rows.min(3)), put(largest, rows.max(3))))

    def page_scores(self, far: FarTokens, q: Array, scale: float) -> Array:
        # max(q · least, q · largest) is q · largest where q is positive, else q · least.
        ends = zip((jnp.minimum(q, 0), jnp.maximum(q, 0)), far.index, strict=True)
        least, largest = (einsum_f32("BTKGR,BKSR->BTKGS", part, end) for part, end in ends)
        return scale * (least + largest)

    def index_bytes(self, tokens: int) -> int:
        coordinates = 2 * -(-tokens // self.page) * self.R
        return self.num_kv_heads * coordinates * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class LeadingScores(Choosing):
    """Single tokens by the score of their first `index` coordinates (Singhania et al. 2024, Loki).

    They are columns of the store itself, an array of rows of R: a kernel that is to read them alone wants
    them in an array of their own, or a copy. `bytes_read` counts them once, and again where chosen.

    Raises:
      PlanError: `index` is not 1 to R, or what `Choosing` refuses.
    """

    index: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.index <= self.R:
            raise PlanError(f"index={self.index} must be 1 to {self.R}, the rank of the layer's keys")

    def page_scores(self, far: FarTokens, q: Array, scale: float) -> Array:
        return scale * einsum_f32("BTKGR,BKSR->BTKGS", q[..., : self.index], far.k[..., : self.index])

    def index_bytes(self, tokens: int) -> int:
        return self.num_kv_heads * tokens * self.index * jnp.dtype(self.dtype).itemsize
