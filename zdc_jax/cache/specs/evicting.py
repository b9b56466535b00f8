"""Recent tokens exactly, and a fixed number of slots for the older tokens that score highest.

This file is shared by the eviction methods (H2O, SnapKV, TOVA, ‖k‖). It defines which tokens a query reads,
when tokens are evicted, and the arrays, which do not grow with the context. A method only defines the scores
(`Scoring`). Near tokens are the sinks and the window; far tokens are all others. Two parts are ours: far
slots store the first R and Z coordinates of a token, so that eviction combines with low ranks, and evictions
depend on positions alone, block by block.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.specs.prefix_ring import ring_of_piece
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.importance import received_attention
from zdc_jax.ops.slots import EMPTY


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores of tokens: the attention that they receive, unless a method changes it.

    Attributes:
      observed: number of queries that count, the last ones of a block, or of a prompt whose attention is
        exact. Their scores are reset once the block is complete. None counts all queries without reset; 0
        counts none.
      shared: whether scores are averaged over the heads of the layer, so that all heads keep the same tokens.
    """

    observed: int | None = None
    shared: bool = False

    def score_new(self, k: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        """Return the scores of new tokens before any query attends to them, in float32."""
        return jnp.zeros(k.shape[:3], jnp.float32)

    def finalize(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B #K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        """Return the scores by which candidates are chosen.

        Args:
          scores: sums of the attention that each candidate received.
          positions: positions of the candidates, ascending, with `EMPTY` for empty slots.
          length: tokens of each sequence so far.
        """
        return scores


class Sizes(NamedTuple):
    """Slots of the near arrays.

    Attributes:
      sinks: slots of sinks.
      window: slots of the window.
      block: slots of the current block.
    """

    sinks: int
    window: int
    block: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["near_k", "near_v", "near_scores", "far_k", "far_v", "far_scores", "positions"],
    meta_fields=["sizes"],
)
@dataclass(frozen=True)
class EvictingState:
    """Arrays of one layer. K' is K, or 1 if all heads keep the same tokens.

    Attributes:
      near_k, near_v: near tokens at full width, [B, K, M, H]. Sink p is in slot p. The window and the current
        block follow, from position block·⌊length/block⌋ - window on.
      near_scores: scores of the near tokens without sinks, [B, K', M - sinks] float32.
      far_k, far_v: kept far tokens, [B, K, S, R] and [B, K, S, Z], ascending by position after the empty
        slots.
      far_scores: scores of the far tokens, [B, K', S] float32.
      positions: positions of the far tokens, [B, K', S] int32.
      sizes: slots of the near arrays.
    """

    near_k: Array
    near_v: Array
    near_scores: Array
    far_k: Array
    far_v: Array
    far_scores: Array
    positions: Array
    sizes: Sizes


@dataclass(frozen=True, kw_only=True)
class Evicting(LayerCacheSpec):
    """Spec that stores near tokens at H coordinates, and R and Z coordinates of `kept` far tokens.

    Positions form blocks of E = `block`. Query t reads {j < sinks} ∪ {E·⌊t/E⌋ - window ≤ j ≤ t} at full width
    and the far slots of its KV head, under one softmax. When a block is complete, the E oldest tokens of
    window and block compete with the far slots by score; later queries read only the winners. Ties go to the
    later token. Sinks never compete. With sinks or a window, q, k and v have full width; otherwise the stored
    width.

    Attributes:
      R: coordinates of the keys of far tokens.
      Z: coordinates of the values of far tokens.
      kept: number of far tokens per KV head.
      scoring: scores of tokens.
      block: positions of a block.
      sinks: number of first tokens that are near.
      window: number of tokens before the current block that are near.

    Raises:
      PlanError: `scoring.observed` exceeds the window or the block.
    """

    R: int
    Z: int
    kept: int
    scoring: Scoring
    block: int
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        observed = self.scoring.observed or 0
        for name in ("window", "block"):
            if observed > (size := getattr(self, name)):
                raise PlanError(f"{name}={size} must be at least {observed}, the number of observed queries")

    @property
    def alignment(self) -> int:
        return self.block

    def create(self, batch: int, capacity: int) -> EvictingState:
        """Create an empty cache; `capacity` matters only if it is below the number of slots."""
        sizes = Sizes(*(min(tokens, capacity) for tokens in (self.sinks, self.window, self.block)))
        near, far = sum(sizes), min(self.kept, capacity)
        full_width = bool(self.sinks or self.window)
        Hq, Hv = (self.head_dim, self.head_dim) if full_width else (self.R, self.Z)
        K = self.num_kv_heads
        choosing_heads = 1 if self.scoring.shared else K

        def empty(slots: int, width: int) -> Array:
            return jnp.zeros((batch, K, slots, width), self.dtype)

        def zero_scores(slots: int) -> Array:
            return jnp.zeros((batch, choosing_heads, slots), jnp.float32)

        return EvictingState(
            near_k=empty(near, Hq),
            near_v=empty(near, Hv),
            near_scores=zero_scores(near - sizes.sinks),
            far_k=empty(far, self.R),
            far_v=empty(far, self.Z),
            far_scores=zero_scores(far),
            positions=jnp.full((batch, choosing_heads, far), EMPTY, jnp.int32),
            sizes=sizes,
        )

    def write(self, state: EvictingState, new: NewTokens) -> EvictingState:
        """Raise `NotImplementedError`: which tokens are kept depends on attention."""
        raise NotImplementedError("an evicting layer stores tokens only in `attend`; call `attend` instead")

    def attend(
        self, state: EvictingState, q: Float[Array, "B T N Hq"], new: NewTokens, aux: Any, call: Call
    ) -> Attended:
        """Store new tokens and attend to the cache; runs on XLA only."""
        if call.implementation not in (None, "xla"):
            raise NotImplementedError(
                f"implementation={call.implementation!r}: an evicting cache runs on xla; use None or 'xla'"
            )
        attend = self._attend_token if q.shape[1] == 1 else self._attend_chunk
        state = _put_sinks(state, new)
        state, o, lse = attend(state, q, new.k.keys, new.v, new.start, new.end, call.scale)
        return Attended(state, o, lse, aux)

    def keep_prompt(
        self,
        q: Float[Array, "B T N Hq"],
        new: NewTokens,
        lse: Float[Array, "B N T"],
        capacity: int,
        call: Call,
    ) -> EvictingState:
        """Choose once among all far tokens of a prompt, by its exact attention."""
        keys, v, positions, end = new.k.keys, new.v, new.positions, new.end
        state = _put_sinks(self.create(len(end), capacity), new)
        (sinks, window, block), T = state.sizes, positions.shape[1]
        first = end // block * block - window
        scores, carried = self._score_prompt(q, keys, lse, positions, end, block, call.scale)
        j = jnp.where((positions >= sinks) & (positions < first[:, None]), positions, EMPTY)[:, None]
        far = highest(self.scoring.finalize(scores, j, end), j != EMPTY, state.positions.shape[2])
        near = jnp.clip(first[:, None] + jnp.arange(window + block), 0, T - 1)[:, None]
        keys, v = keys.swapaxes(1, 2), v.swapaxes(1, 2)

        def take(x: Array, at: Array, width: int | None) -> Array:
            return _take(x, at)[..., :width].astype(self.dtype)

        def append_near(old: Array, x: Array) -> Array:
            return jnp.concatenate([old[:, :, :sinks], take(x, near, None)], 2)

        return replace(
            state,
            near_k=append_near(state.near_k, keys),
            near_v=append_near(state.near_v, v),
            near_scores=_take(carried, near),
            far_k=take(keys, far, self.R),
            far_v=take(v, far, self.Z),
            far_scores=_take(carried, far),
            positions=far,
        )

    def release(self, state: EvictingState, rows: Array) -> EvictingState:
        """Empty the sequences `rows`: mark their far slots as empty."""
        return replace(state, positions=jnp.where(rows[:, None, None], EMPTY, state.positions))

    def _attend_chunk(
        self, state: EvictingState, q: Array, k: Array, v: Array, start: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """Process blocks one after another; evict tokens after each block."""
        (B, T), block = q.shape[:2], state.sizes.block
        pad = -T % block

        def split_blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
            return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

        def step(state: EvictingState, new: tuple[Array, ...]) -> tuple[EvictingState, tuple[Array, Array]]:
            q, k, v, first = new
            state = self._put_block(state, k, v, first < end)
            state, o, lse = self._attend_stored(state, q, first[:, None] + jnp.arange(block), end, scale)
            return self._evict(state, first + block, first + block <= end), (o, lse)

        firsts = start + block * jnp.arange((T + pad) // block)[:, None]
        state, (o, lse) = jax.lax.scan(step, state, (*map(split_blocks, (q, k, v)), firsts))
        o = jnp.moveaxis(o, 0, 1).reshape(B, T + pad, *o.shape[3:])[:, :T]
        lse = jnp.moveaxis(lse, 0, 2).reshape(B, -1, T + pad)[:, :, :T]
        aligned = (start % self.alignment == 0) | (start >= end)
        return state, jnp.where(aligned[:, None, None, None], o, jnp.nan), lse

    def _attend_token(
        self, state: EvictingState, q: Array, k: Array, v: Array, start: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """Process one token per sequence; evict tokens only if a sequence completes a block."""
        (sinks, window, block), new = state.sizes, (start < end)[:, None]
        slot = window + start % block
        scores = put_rows(state.near_scores[..., None], self._score_new(k)[..., None], slot, new)
        state = replace(
            state,
            near_k=put_rows(state.near_k, k, sinks + slot, new),
            near_v=put_rows(state.near_v, v, sinks + slot, new),
            near_scores=scores[..., 0],
        )
        state, o, lse = self._attend_stored(state, q, start[:, None], end, scale)
        length = start + 1
        complete = new[:, 0] & (length % block == 0)

        def evict(state: EvictingState) -> EvictingState:
            return self._evict(state, length, complete)

        return jax.lax.cond(complete.any(), evict, lambda state: state, state), o, lse

    def _attend_stored(
        self, state: EvictingState, q: Array, positions: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """Compute attention of queries of one block, whose tokens are stored, and add to the scores.

        Returns:
          The state with new scores, and the attention's o and lse.
        """
        (sinks, _, block), (B, T, N, _), K = state.sizes, q.shape, self.num_kv_heads
        near_j = _list_near_positions(state.sizes, positions[:, 0])[:, None]  # [B, 1, M]
        near_visible = (near_j != EMPTY) & (near_j <= positions[:, :, None])
        far_visible = (state.positions != EMPTY)[:, :, None, None]
        q = q.reshape(B, T, K, N // K, -1)

        def score(q: Array, k: Array, visible: Array) -> Array:
            return jnp.where(visible, scale * einsum_f32("BTKGH,BKSH->BKGTS", q, k), -jnp.inf)

        logits = jnp.concatenate(
            [
                score(q, state.near_k, near_visible[:, None, None]),
                score(q[..., : self.R], state.far_k, far_visible),
            ],
            -1,
        )
        lse = logsumexp(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - lse)
        near, far = jnp.split(weights, [near_j.shape[2]], axis=-1)

        def mix(weights: Array, v: Array) -> Array:
            return einsum_f32("BKGTS,BKSH->BTKGH", weights.astype(v.dtype), v)

        o, far_o = mix(near, state.near_v), mix(far, state.far_v)
        o += jnp.pad(far_o, [(0, 0)] * 4 + [(0, o.shape[-1] - self.Z)])
        o, lse = o.reshape(B, T, N, -1).astype(self.dtype), lse.reshape(B, N, T)
        if (observed := self.scoring.observed) == 0:
            return state, o, lse
        counts = positions < end[:, None]
        if observed is not None:
            counts &= positions % block >= block - observed
        received = (weights * counts[:, None, None, :, None]).sum((2, 3)) / (N // K)
        near, far = jnp.split(self._reduce_heads(received, 1), [near_j.shape[2]], axis=-1)
        scored = replace(
            state, near_scores=state.near_scores + near[..., sinks:], far_scores=state.far_scores + far
        )
        return scored, o, lse

    def _put_block(self, state: EvictingState, k: Array, v: Array, active: Array) -> EvictingState:
        """Store a block of new tokens in the sequences where `active`."""
        block = state.sizes.block

        def put(old: Array, new: Array) -> Array:
            new = jnp.concatenate([old[:, :, :-block], new.swapaxes(1, 2).astype(old.dtype)], 2)
            return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return replace(
            state,
            near_k=put(state.near_k, k),
            near_v=put(state.near_v, v),
            near_scores=put(state.near_scores, self._score_new(k)),
        )

    def _evict(self, state: EvictingState, length: Array, complete: Array) -> EvictingState:
        """Evict tokens in the sequences of `length` tokens whose block is complete."""
        (sinks, window, block), slots = state.sizes, state.positions.shape[2]
        complete = complete[:, None, None]
        leaving = length[:, None] - block - window + jnp.arange(block)
        leaving = jnp.broadcast_to(
            jnp.where(leaving >= sinks, leaving, EMPTY)[:, None], (*state.positions.shape[:2], block)
        )

        def append_leaving(far: Array, near: Array) -> Array:
            return jnp.concatenate([far, near[:, :, :block]], 2)

        positions = append_leaving(state.positions, leaving)
        scores = append_leaving(state.far_scores, state.near_scores)
        chosen = highest(self.scoring.finalize(scores, positions, length), positions != EMPTY, slots)
        chosen = jnp.where(complete, chosen, jnp.arange(slots))
        # The near slots shift by one block. The slots of the next block are free, so any content is fine.
        shifted = jnp.minimum(jnp.arange(window + block) + block, window + block - 1)
        near = jnp.where(complete, shifted, jnp.arange(window + block))
        sink_slots = jnp.broadcast_to(jnp.arange(sinks), (*near.shape[:2], sinks))
        near_slots = jnp.concatenate([sink_slots, sinks + near], 2)

        def reset(scores: Array) -> Array:
            return jnp.where(complete, 0.0, scores) if self.scoring.observed else scores

        return EvictingState(
            near_k=_take(state.near_k, near_slots),
            near_v=_take(state.near_v, near_slots),
            near_scores=reset(_take(state.near_scores, near)),
            far_k=_take(append_leaving(state.far_k, state.near_k[:, :, sinks:, : self.R]), chosen),
            far_v=_take(append_leaving(state.far_v, state.near_v[:, :, sinks:, : self.Z]), chosen),
            far_scores=reset(_take(scores, chosen)),
            positions=jnp.where(chosen == EMPTY, EMPTY, _take(positions, chosen)),
            sizes=state.sizes,
        )

    def _score_prompt(
        self, q: Array, k: Array, lse: Array, positions: Array, end: Array, block: int, scale: float
    ) -> tuple[Array, Array]:
        """Return two scores [B, K', T] of all tokens of prompts.

        The first one chooses the far tokens. The second one is stored for later choices: it counts only the
        queries of the current block, unless `observed` is None.
        """
        initial, observed = self._score_new(k).swapaxes(1, 2), self.scoring.observed
        if observed == 0:
            return initial, initial
        if observed is not None:
            positions = end[:, None] - observed + jnp.arange(observed)
            at = jnp.clip(positions, 0, q.shape[1] - 1)
            q = jnp.take_along_axis(q, at[:, :, None, None], axis=1)
            lse = jnp.take_along_axis(lse, at[:, None], axis=2)

        def sum_received(counts: Array) -> Array:
            # A query whose lse is infinite has no weight.
            masked_lse = jnp.where(counts[:, None], lse, jnp.inf)
            sums = received_attention(q, k, masked_lse, positions, scale=scale)
            return initial + self._reduce_heads(sums / (q.shape[2] // k.shape[2]), 1)

        counts = (positions >= 0) & (positions < end[:, None])
        scores = sum_received(counts)
        if observed is None:
            return scores, scores
        first_observed = end // block * block + block - observed
        return scores, sum_received(counts & (positions >= first_observed[:, None]))

    def _score_new(self, k: Array) -> Array:
        return self._reduce_heads(self.scoring.score_new(k), 2)

    def _reduce_heads(self, scores: Array, axis: int) -> Array:
        """Return scores of the heads that choose: each KV head, or the mean of all."""
        return scores.mean(axis, keepdims=True) if self.scoring.shared else scores


def highest(
    scores: Float[Array, "B K S"], valid: Bool[Array, "B #K S"], count: int
) -> Int[Array, "B K {count}"]:
    """Return the indices of the `count` highest valid scores, ascending, with `EMPTY` for missing ones.

    Ties go to the later index.
    """
    S = scores.shape[2]
    masked = jnp.where(valid, scores, -jnp.inf)
    _, index = jax.lax.top_k(masked[..., ::-1], min(count, S))  # Reversed, because ties go to the first.
    index = S - 1 - index
    is_valid = jnp.take_along_axis(jnp.broadcast_to(valid, scores.shape), index, axis=2)
    index = jnp.sort(jnp.where(is_valid, index, EMPTY), axis=2)
    return jnp.pad(index, ((0, 0), (0, 0), (max(0, count - S), 0)), constant_values=EMPTY)


def _take(x: Array, index: Array) -> Array:
    """Return x [B, K, S, ...] at index [B, K or 1, S'], where `EMPTY` selects the first entry."""
    index = jnp.maximum(index, 0).reshape(*index.shape, *[1] * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2)


def _put_sinks(state: EvictingState, new: NewTokens) -> EvictingState:
    """Store the sinks among the new tokens in their slots."""
    if not (sinks := state.sizes.sinks):
        return state

    def put(near: Array, x: Array) -> Array:
        head = ring_of_piece(near[:, :, :sinks], x, new.positions, new.end, sinks=sinks, window=0)
        return jnp.concatenate([head.astype(near.dtype), near[:, :, sinks:]], 2)

    return replace(state, near_k=put(state.near_k, new.k.keys), near_v=put(state.near_v, new.v))


def _list_near_positions(sizes: Sizes, position: Int[Array, " B"]) -> Int[Array, "B M"]:
    """Return the positions of the near slots during the block of `position`, with `EMPTY` for empty slots."""
    sinks, window, block = sizes
    recent = (position // block * block - window)[:, None] + jnp.arange(window + block)
    recent = jnp.where(recent >= sinks, recent, EMPTY)
    head = jnp.broadcast_to(jnp.arange(sinks), (position.shape[0], sinks))
    return jnp.concatenate([head, recent], 1)
