"""Stores of far tokens from which a query reads only a few, chosen by an index (after Quest and Loki).

Far tokens are chosen for each query, by pages of consecutive positions. All queries of a KV head share the
chosen pages. The order of pages is that of their probability under the index: a softmax over pages for each
query head, summed over the group. A constant that a head adds to all its scores therefore has no effect, as
in attention itself, and no head dominates the others. With one query head per KV head, the order is that of
the scores. Ties go to the lower page. Attention to the chosen tokens is exact, and ignores all others.

A decoded token reads the index and the chosen keys and values only. On XLA, chunks of prompts read everything
and mask what their queries did not choose: the result is the same, without savings. Where kernels choose and
read (`zdc_jax.cache.specs.coded_choosing`), each query of a chunk reads only its own choice.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Bool, Float, Int, Shaped

from zdc_jax.axes import Array
from zdc_jax.cache.specs.near_far import NearFar, NearFarState
from zdc_jax.cache.specs.prefix_ring import recent_rows
from zdc_jax.cache.specs.spec import Call, NewTokens, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.cache_attention import takes_kernels
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.selection import among_largest
from zdc_jax.ops.xla import chosen_attention, in_query_blocks, query_block

GATHERED = "kernels read chosen tokens only from quantized stores"
"""Reason why kernels do not decode chosen tokens of a store that is not quantized."""
MASKED = "chunks of prompts read the whole store on xla and mask tokens that are not chosen"
"""Reason why kernels do not compute chunks of prompts."""


class FarTokens(NamedTuple):
    """Store of far tokens, slot = position. Quantized stores have trees of arrays [B, K, S, …] instead.

    Attributes:
      k: keys of all tokens, [B, K, S, R].
      v: values of all tokens, [B, K, S, Z].
      index: further arrays that the choice of tokens reads.
    """

    k: Any
    v: Any
    index: Any = ()


@dataclass(frozen=True, kw_only=True)
class Choosing(NearFar):
    """`NearFar` whose queries read only `read` far tokens per KV head.

    Attributes:
      read: number of far tokens that a query reads per KV head.
      page: tokens that are chosen together.

    Raises:
      PlanError: `read` is not a positive multiple of `page`.
    """

    read: int
    page: int = 1

    def __post_init__(self) -> None:
        if self.read < 1 or self.read % self.page:
            raise PlanError(f"read={self.read} must be a positive multiple of page={self.page} tokens")

    @abstractmethod
    def page_scores(
        self, far: FarTokens, q: Float[Array, "B T K G R"], call: Call
    ) -> Float[Array, "B T K G pages"]:
        """Estimate the scaled score of each page from the index, in float32."""

    @abstractmethod
    def index_bytes(self, tokens: int) -> int:
        """Return the bytes read to choose among `tokens` tokens."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one far token in all heads, which are read once it is chosen."""
        return self.num_kv_heads * (self.R + self.Z) * jnp.dtype(self.dtype).itemsize

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        """Read the keys [B, K, n, R] and values [B, K, n, Z] in these slots, and no others."""
        return take_slots(far.k, slots), take_slots(far.v, slots)

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """Return keys and values of the whole store."""
        return far.k, far.v

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        return FarTokens(*super().create_far(batch, capacity))

    def write_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        def put(buffer: Array, x: Array) -> Array:
            return put_rows(buffer, x[..., : buffer.shape[-1]], new.start, new.kept)

        return state.far._replace(k=put(state.far.k, new.k.keys), v=put(state.far.v, new.v))

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        if q.shape[1] == 1:
            return self.attend_pages(far, q, positions, self.chosen(far, q, positions, call), call)

        def are_chosen(q: Array, positions: Array, call: Call) -> Array:
            return self.are_chosen(far, q, positions, call)

        return self._attend_masked(far, call, are_chosen, q, positions)

    def attend_pages(
        self, far: FarTokens, q: Array, positions: Array, pages: Int[Array, "B T K n"], call: Call
    ) -> tuple[Array, Array]:
        """Compute `attend_far` for pages that are already chosen."""
        if q.shape[1] == 1:
            takes_kernels("decode of chosen tokens", call.implementation, lambda: GATHERED)
            return self._attend_gathered(far, q, positions, pages, call)
        count = -(-self.capacity(far) // self.page)

        def are_chosen(q: Array, positions: Array, call: Call, pages: Array) -> Array:
            mask = jnp.zeros((*pages.shape[:3], count), bool)
            return jnp.put_along_axis(mask, pages, True, axis=-1, inplace=False)

        return self._attend_masked(far, call, are_chosen, q, positions, pages)

    def chosen(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], call: Call
    ) -> Int[Array, "B T K n"]:
        """Return the pages that each query reads, in any order; pages without far tokens come last."""
        shared = self.probabilities(far, q, positions, call)
        return jax.lax.top_k(shared, min(self.read // self.page, shared.shape[-1]))[1]

    def are_chosen(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], call: Call
    ) -> Bool[Array, "B T K pages"]:
        """Return whether each query reads each page: the result of `chosen` as a mask."""
        return among_largest(self.probabilities(far, q, positions, call), self.read // self.page)

    def probabilities(
        self, far: FarTokens, q: Float[Array, "B T N R"], positions: Int[Array, "B T"], call: Call
    ) -> Float[Array, "B T K pages"]:
        """Return the log-probability of each page, summed over the query heads of a KV head."""
        q = q.reshape(*q.shape[:2], self.num_kv_heads, -1, q.shape[-1])
        scores = self.page_scores(far, q, call)
        first, t = jnp.arange(scores.shape[-1]) * self.page, positions[:, :, None, None, None]
        has_far = (first + self.page > self.sinks) & (first <= t - self.window)
        scores = jnp.where(has_far, scores, jnp.finfo(jnp.float32).min)
        # Logarithms, because probabilities underflow where scores of pages differ widely.
        return logsumexp(scores - self.denominators(scores), axis=3)

    def denominators(self, scores: Float[Array, "B T K G pages"]) -> Float[Array, "B T K G 1"]:
        """Return the log-sum-exp of each query head's scores."""
        return logsumexp(scores, axis=-1, keepdims=True)

    @property
    def queries_apart(self) -> bool:
        return True

    def bytes_read(self, tokens: int) -> int:
        """Return the bytes read to decode one token: the ring, the index, and the chosen keys and values."""
        chosen = min(self.read, tokens) * self.token_bytes
        return self.near.bytes(tokens) + self.index_bytes(tokens) + chosen

    def _attend_gathered(
        self, far: FarTokens, q: Array, positions: Array, pages: Array, call: Call
    ) -> tuple[Array, Array]:
        """Compute attention of single queries to pages [B, 1, K, n], and read only these pages."""
        slots = pages[:, 0, :, :, None] * self.page + jnp.arange(self.page)
        slots = slots.reshape(*slots.shape[:2], -1)
        # Slots past the last one are invisible, but the values read for them must be finite.
        k, v = self.rows(far, jnp.minimum(slots, self.capacity(far) - 1))
        visible = self._is_far(slots, positions[:, :, None])
        shift: dict[str, Any] = {"slots": slots, "block_scores": call.block_scores}
        return chosen_attention(q, k, v, visible[:, :, None], scale=call.scale, **shift)

    def _attend_masked(
        self, far: FarTokens, call: Call, are_chosen: Callable[..., Array], q: Array, *per_query: Array
    ) -> tuple[Array, Array]:
        """Compute attention that reads the whole store and masks the pages that are not chosen.

        Args:
          far: store of far tokens.
          call: options of the call.
          are_chosen: function of `q`, positions, the call, and blocks of the other `per_query` that returns a
            mask of pages.
          q: queries.
          per_query: further arrays with one entry per query; positions come first.
        """
        takes_kernels("prompt of chosen tokens", call.implementation, lambda: MASKED)
        B, T, N, _ = q.shape
        k, v = self.all_rows(far)
        S = k.shape[2]

        def one_block(q: Array, positions: Array, *others: Array) -> tuple[Array, Array]:
            block_call, others = take_scores(call, others)
            visible = jnp.repeat(are_chosen(q, positions, block_call, *others), self.page, axis=-1)[..., :S]
            visible &= self._is_far(jnp.arange(S), positions[:, :, None, None])
            shift: dict[str, Any] = {"slots": jnp.arange(S), "block_scores": block_call.block_scores}
            return chosen_attention(q, k, v, visible.swapaxes(1, 2), scale=call.scale, **shift)

        # Twice the scores of attention, because the index has at most as many scores of its own.
        block = query_block(2 * B * N * S, T)
        return in_query_blocks(one_block, block, q, *per_query, *scores_of(call))

    def _is_far(self, j: Array, t: Array) -> Array:
        return (j >= self.sinks) & (j <= t - self.window)


def take_slots(x: Shaped[Array, "B K S C"], slots: Int[Array, "B K n"]) -> Shaped[Array, "B K n C"]:
    """Return what is in these slots of each head."""
    return jnp.take_along_axis(x, slots[..., None], axis=2)


def scores_of(call: Call) -> list[Array]:
    """Return the block scores of a call, to be cut into blocks of queries; nothing if it has none."""
    return [] if call.block_scores is None else [call.block_scores]


def take_scores(call: Call, per_query: tuple[Array, ...]) -> tuple[Call, tuple[Array, ...]]:
    """Return the call of a block of queries, whose scores `scores_of` put last, and the other arrays."""
    if call.block_scores is None:
        return call, per_query
    return replace(call, block_scores=per_query[-1]), per_query[:-1]


@dataclass(frozen=True, kw_only=True)
class PageBounds(Choosing):
    """Pages chosen by a bound of their scores, as in Quest (Tang et al. 2024).

    For each page, the index stores the least and the largest value of every key coordinate, [B, K, ⌈S/page⌉,
    R] each, in the model's dtype. No key of the page scores above Σ max(q · least, q · largest). The bounds
    cover all tokens of the page, which is complete before any of its tokens is far.

    Raises:
      PlanError: `page` is below 2 or above the window; see also `Choosing`.
    """

    def __post_init__(self) -> None:
        if self.page < 2:
            raise PlanError(f"page={self.page} must be at least 2 tokens")
        if self.window < self.page:
            raise PlanError(
                f"window={self.window} must be at least page={self.page}, because only complete pages can be "
                "chosen"
            )
        super().__post_init__()

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        shape = batch, self.num_kv_heads, -(-capacity // self.page), self.R
        bounds = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return super().create_far(batch, capacity)._replace(index=bounds)

    def write_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        """Return the store with the new tokens and the bounds of the pages that they complete."""
        far = super().write_far(state, new)
        page, (sinks, window), start, keys = self.page, state.near.near, new.start, new.k.keys
        first, pages = start // page, keys.shape[1] // page + 1
        # The older tokens of a page are still in the ring.
        rows = recent_rows(
            state.near.ring_k, keys, start, first * page, sinks=sinks, window=window, past=page - 1
        )
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % page), (0, 0)))
        rows = rows[:, :, : pages * page, : self.R].reshape(*rows.shape[:2], pages, page, self.R)
        complete = (first[:, None] + jnp.arange(pages) + 1) * page <= new.end[:, None]

        def put(buffer: Array, new: Array) -> Array:
            return put_rows(buffer, new.swapaxes(1, 2), first, complete)

        least, largest = far.index
        return far._replace(index=(put(least, rows.min(3)), put(largest, rows.max(3))))

    def page_scores(self, far: FarTokens, q: Array, call: Call) -> Array:
        # max(q · least, q · largest) is q · largest where q is positive, else q · least.
        bounds = zip((jnp.minimum(q, 0), jnp.maximum(q, 0)), far.index, strict=True)
        least, largest = (einsum_f32("BTKGR,BKSR->BTKGS", part, bound) for part, bound in bounds)
        return call.scale * (least + largest)

    def index_bytes(self, tokens: int) -> int:
        coordinates = 2 * -(-tokens // self.page) * self.R
        return self.num_kv_heads * coordinates * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class LeadingScores(Choosing):
    """Single tokens chosen by the score of their first coordinates, as in Loki (Singhania et al. 2024).

    These coordinates are columns of the stored keys. A kernel that reads them alone would need them in a
    separate array. `bytes_read` counts them once for the index, and again for chosen tokens.

    Attributes:
      index: number of coordinates that choose.

    Raises:
      PlanError: `index` is not from 1 to R; see also `Choosing`.
    """

    index: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.index <= self.R:
            raise PlanError(f"index={self.index} must be from 1 to {self.R}, the rank of the layer's keys")

    def page_scores(self, far: FarTokens, q: Array, call: Call) -> Array:
        return call.scale * einsum_f32("BTKGR,BKSR->BTKGS", q[..., : self.index], far.k[..., : self.index])

    def index_bytes(self, tokens: int) -> int:
        return self.num_kv_heads * tokens * self.index * jnp.dtype(self.dtype).itemsize
