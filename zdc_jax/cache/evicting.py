"""Near tokens whole, and of the far ones a fixed number of slots for those that score highest.

What methods of eviction share (H2O, SnapKV, TOVA, ‖k‖): who is seen, when tokens are let go, and the arrays,
which do not grow with the context. A method says how tokens score (`Scoring`). That far slots hold the first
R and Z coordinates of a token, so that eviction and ranks go together, and that all of it follows from
positions alone, block by block, is ours.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import ring_of_piece
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.importance import received_attention
from zdc_jax.ops.slots import EMPTY


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How tokens score: by the attention that they receive, as it is, unless a method changes it.

    Attributes:
      observed: how many queries count, the last of a block, or of a prompt that is read exactly; what they
        gave is forgotten once the block is settled. None: all queries, and nothing is forgotten. 0: none.
      shared: scores are the mean over the heads of the layer, so that all heads keep the same tokens.
    """

    observed: int | None = None
    shared: bool = False

    def arriving(self, k: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        """What new tokens score before any query has seen them, float32."""
        return jnp.zeros(k.shape[:3], jnp.float32)

    def final(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B #K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        """What candidates are chosen by, of the sums of attention that they received.

        Candidates stand by position; `EMPTY` is the position of none. A row holds `length` tokens so far.
        """
        return scores


class Sizes(NamedTuple):
    """Whole tokens that an array has room for: of sinks, of the window, of the block in progress."""

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
    """Arrays of one layer; K' is K, or 1 where all heads keep the same tokens.

    near_k [B, K, M, H], near_v: the sinks, position p in slot p; behind them the window and the block in
    progress, from position block·⌊length/block⌋ - window on; near_scores [B, K', M - sinks] float32 of those.
    far_k [B, K, S, R], far_v [B, K, S, Z], far_scores [B, K', S] float32, positions [B, K', S] int32: the
    tokens that were kept, by position, empty slots first.
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
    """The sinks and recent tokens at H coordinates, R and Z of the `kept` far tokens that score highest.

    Positions go in blocks of E = `block`. Query t sees {j < sinks} ∪ {E·⌊t/E⌋ - window ≤ j ≤ t} whole, and
    those that are in the far slots of its KV head, under one softmax. When a block is complete the E tokens
    that no later query is near to compete with those in the slots, by what they score until then; of equals
    the later one stays. Sinks never compete. With sinks or a window q, k and v come at full width, without as
    they are kept.

    Raises:
      PlanError: queries are observed that the window, or the block, does not hold.
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
            if observed > (most := getattr(self, name)):
                raise PlanError(f"{name}={most} must be at least {observed}, the queries that are observed")

    @property
    def alignment(self) -> int:
        """`LayerCacheSpec.alignment`: pieces begin with a block."""
        return self.block

    def create(self, batch: int, capacity: int) -> EvictingState:
        """`LayerCacheSpec.create`; `capacity` matters only where it is less than what may be kept."""
        sizes = Sizes(*(min(tokens, capacity) for tokens in (self.sinks, self.window, self.block)))
        near, far = sum(sizes), min(self.kept, capacity)
        whole = bool(self.sinks or self.window)
        Hq, Hv = (self.head_dim, self.head_dim) if whole else (self.R, self.Z)
        K, choosing = self.num_kv_heads, 1 if self.scoring.shared else self.num_kv_heads

        def empty(slots, width):
            return jnp.zeros((batch, K, slots, width), self.dtype)

        def scores(slots):
            return jnp.zeros((batch, choosing, slots), jnp.float32)

        return EvictingState(
            near_k=empty(near, Hq),
            near_v=empty(near, Hv),
            near_scores=scores(near - sizes.sinks),
            far_k=empty(far, self.R),
            far_v=empty(far, self.Z),
            far_scores=scores(far),
            positions=jnp.full((batch, choosing, far), EMPTY, jnp.int32),
            sizes=sizes,
        )

    def write(self, state: EvictingState, k: Array, v: Array, positions: Array, end: Array) -> EvictingState:
        """Refused: what is kept of tokens comes from the attention to them."""
        raise NotImplementedError("a layer that evicts stores tokens as it attends to them, not before")

    def attend(
        self,
        state: EvictingState,
        q: Float[Array, "B T N Hq"],
        k: Float[Array, "B T K Hq"],
        v: Float[Array, "B T K Hv"],
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: Any,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`; hands `aux` on. It runs on XLA."""
        if call.implementation not in (None, "xla"):
            raise NotImplementedError(
                f"implementation={call.implementation!r}: this cache is read on xla alone"
            )
        attend = self._attend_token if positions.shape[1] == 1 else self._attend_piece
        state = _with_sinks(state, k, v, positions, end)
        state, o, lse = attend(state, q, k, v, positions[:, 0], end, call.scale)
        return Attended(state, o, lse, aux)

    def keep_prompt(
        self,
        q: Float[Array, "B T N Hq"],
        k: Float[Array, "B T K Hq"],
        v: Float[Array, "B T K Hv"],
        lse: Float[Array, "B N T"],
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        capacity: int,
        call: Call,
    ) -> EvictingState:
        """`LayerCacheSpec.keep_prompt`: chosen once, by exact attention, among all far tokens."""
        state = _with_sinks(self.create(positions.shape[0], capacity), k, v, positions, end)
        (sinks, window, block), T = state.sizes, positions.shape[1]
        first = end // block * block - window
        choosing, carried = self._prompt_scores(q, k, lse, positions, end, block, call.scale)
        j = jnp.where((positions >= sinks) & (positions < first[:, None]), positions, EMPTY)[:, None]
        far = highest(self.scoring.final(choosing, j, end), j != EMPTY, state.positions.shape[2])
        near = jnp.clip(first[:, None] + jnp.arange(window + block), 0, T - 1)[:, None]
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

        def take(x, at, width):
            return _take(x, at)[..., :width].astype(self.dtype)

        def join(old, x):
            return jnp.concatenate([old[:, :, :sinks], take(x, near, None)], 2)

        return replace(
            state,
            near_k=join(state.near_k, k),
            near_v=join(state.near_v, v),
            near_scores=_take(carried, near),
            far_k=take(k, far, self.R),
            far_v=take(v, far, self.Z),
            far_scores=_take(carried, far),
            positions=far,
        )

    def release(self, state: EvictingState, rows: Array) -> EvictingState:
        """`LayerCacheSpec.release`: what far slots hold is told by their positions."""
        return replace(state, positions=jnp.where(rows[:, None, None], EMPTY, state.positions))

    def _attend_piece(
        self, state: EvictingState, q: Array, k: Array, v: Array, start: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """Blocks one after another, each settled before the next is read."""
        (B, T), block = q.shape[:2], state.sizes.block
        pad = -T % block

        def blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
            return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

        def step(state: EvictingState, new: tuple[Array, ...]) -> tuple[EvictingState, tuple[Array, Array]]:
            q, k, v, first = new
            state = self._with_block(state, k, v, first < end)
            state, o, lse = self._see(state, q, first[:, None] + jnp.arange(block), end, scale)
            return self._settled(state, first + block, first + block <= end), (o, lse)

        firsts = start + block * jnp.arange((T + pad) // block)[:, None]
        state, (o, lse) = jax.lax.scan(step, state, (*map(blocks, (q, k, v)), firsts))
        o = jnp.moveaxis(o, 0, 1).reshape(B, T + pad, *o.shape[3:])[:, :T]
        lse = jnp.moveaxis(lse, 0, 2).reshape(B, -1, T + pad)[:, :, :T]
        aligned = (start % self.alignment == 0) | (start >= end)
        return state, jnp.where(aligned[:, None, None, None], o, jnp.nan), lse

    def _attend_token(
        self, state: EvictingState, q: Array, k: Array, v: Array, start: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """One token a row; blocks are settled only when some row completes one."""
        (sinks, window, block), new = state.sizes, (start < end)[:, None]
        slot = window + start % block
        state = replace(
            state,
            near_k=put_rows(state.near_k, k, sinks + slot, new),
            near_v=put_rows(state.near_v, v, sinks + slot, new),
            near_scores=put_rows(state.near_scores[..., None], self._arriving(k)[..., None], slot, new)[
                ..., 0
            ],
        )
        state, o, lse = self._see(state, q, start[:, None], end, scale)
        length = start + 1
        complete = new[:, 0] & (length % block == 0)

        def settle(state):
            return self._settled(state, length, complete)

        return jax.lax.cond(complete.any(), settle, lambda state: state, state), o, lse

    def _see(
        self, state: EvictingState, q: Array, positions: Array, end: Array, scale: float
    ) -> tuple[EvictingState, Array, Array]:
        """Queries of one block, whose own tokens are held: what they add to the scores, o and lse."""
        (sinks, _, block), (B, T, N, _), K = state.sizes, q.shape, self.num_kv_heads
        near_j = _near_positions(state.sizes, positions[:, 0])[:, None]  # [B, 1, M]
        near_seen = (near_j != EMPTY) & (near_j <= positions[:, :, None])
        far_seen = (state.positions != EMPTY)[:, :, None, None]
        q = q.reshape(B, T, K, N // K, -1)

        def score(q, k, seen):
            return jnp.where(seen, scale * einsum_f32("BTKGH,BKSH->BKGTS", q, k), -jnp.inf)

        logits = jnp.concatenate(
            [
                score(q, state.near_k, near_seen[:, None, None]),
                score(q[..., : self.R], state.far_k, far_seen),
            ],
            -1,
        )
        lse = logsumexp(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - lse)
        near, far = jnp.split(weights, [near_j.shape[2]], axis=-1)

        def mix(part, v):
            return einsum_f32("BKGTS,BKSH->BTKGH", part.astype(v.dtype), v)

        o, more = mix(near, state.near_v), mix(far, state.far_v)
        o += jnp.pad(more, [(0, 0)] * 4 + [(0, o.shape[-1] - self.Z)])
        o, lse = o.reshape(B, T, N, -1).astype(self.dtype), lse.reshape(B, N, T)
        if (observed := self.scoring.observed) == 0:
            return state, o, lse
        counts = positions < end[:, None]
        if observed is not None:
            counts &= positions % block >= block - observed
        received = (weights * counts[:, None, None, :, None]).sum((2, 3)) / (N // K)
        near, far = jnp.split(self._chosen_by(received, 1), [near_j.shape[2]], axis=-1)
        scored = replace(
            state, near_scores=state.near_scores + near[..., sinks:], far_scores=state.far_scores + far
        )
        return scored, o, lse

    def _with_block(self, state: EvictingState, k: Array, v: Array, active: Array) -> EvictingState:
        """A block of new tokens in its place, in the rows that have any."""
        block = state.sizes.block

        def put(old: Array, new: Array) -> Array:
            new = jnp.concatenate([old[:, :, :-block], new.swapaxes(1, 2).astype(old.dtype)], 2)
            return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return replace(
            state,
            near_k=put(state.near_k, k),
            near_v=put(state.near_v, v),
            near_scores=put(state.near_scores, self._arriving(k)),
        )

    def _settled(self, state: EvictingState, length: Array, complete: Array) -> EvictingState:
        """What stays in the rows of `length` tokens whose block is complete; other rows are as they were."""
        (sinks, window, block), slots = state.sizes, state.positions.shape[2]
        complete = complete[:, None, None]
        leaving = length[:, None] - block - window + jnp.arange(block)
        leaving = jnp.broadcast_to(
            jnp.where(leaving >= sinks, leaving, EMPTY)[:, None], (*state.positions.shape[:2], block)
        )

        def join(far, near):
            return jnp.concatenate([far, near[:, :, :block]], 2)

        held, scores = join(state.positions, leaving), join(state.far_scores, state.near_scores)
        chosen = highest(self.scoring.final(scores, held, length), held != EMPTY, slots)
        chosen = jnp.where(complete, chosen, jnp.arange(slots))
        # The window and the block move on by a block, whose own slots are free.
        shifted = jnp.minimum(jnp.arange(window + block) + block, window + block - 1)
        near = jnp.where(complete, shifted, jnp.arange(window + block))
        sunk = jnp.broadcast_to(jnp.arange(sinks), (*near.shape[:2], sinks))
        whole = jnp.concatenate([sunk, sinks + near], 2)
        known = (lambda x: jnp.where(complete, 0.0, x)) if self.scoring.observed else lambda x: x

        def recent(x):
            return x[:, :, sinks:]

        return EvictingState(
            near_k=_take(state.near_k, whole),
            near_v=_take(state.near_v, whole),
            near_scores=known(_take(state.near_scores, near)),
            far_k=_take(join(state.far_k, recent(state.near_k)[..., : self.R]), chosen),
            far_v=_take(join(state.far_v, recent(state.near_v)[..., : self.Z]), chosen),
            far_scores=known(_take(scores, chosen)),
            positions=jnp.where(chosen == EMPTY, EMPTY, _take(held, chosen)),
            sizes=state.sizes,
        )

    def _prompt_scores(
        self, q: Array, k: Array, lse: Array, positions: Array, end: Array, block: int, scale: float
    ) -> tuple[Array, Array]:
        """Of all tokens of prompts [B, K', T]: scores at their end, and of the block that is in progress."""
        arriving, observed = self._arriving(k).swapaxes(1, 2), self.scoring.observed
        if observed == 0:
            return arriving, arriving
        if observed is not None:
            positions = end[:, None] - observed + jnp.arange(observed)
            at = jnp.clip(positions, 0, q.shape[1] - 1)
            q = jnp.take_along_axis(q, at[:, :, None, None], axis=1)
            lse = jnp.take_along_axis(lse, at[:, None], axis=2)

        def collected(counts: Array) -> Array:
            counted = jnp.where(counts[:, None], lse, jnp.inf)
            sums = received_attention(q, k, counted, positions, scale=scale)
            return arriving + self._chosen_by(sums / (q.shape[2] // k.shape[2]), 1)

        counts = (positions >= 0) & (positions < end[:, None])
        scores = collected(counts)
        if observed is None:
            return scores, scores
        opened = end // block * block + block - observed
        return scores, collected(counts & (positions >= opened[:, None]))

    def _arriving(self, k: Array) -> Array:
        return self._chosen_by(self.scoring.arriving(k), 2)

    def _chosen_by(self, scores: Array, axis: int) -> Array:
        """Scores of those that choose: each KV head, or all together."""
        return scores.mean(axis, keepdims=True) if self.scoring.shared else scores


def highest(
    scores: Float[Array, "B K S"], valid: Bool[Array, "B #K S"], count: int
) -> Int[Array, "B K {count}"]:
    """Indices of the `count` highest valid scores, ascending, of equals later ones; `EMPTY` where none is."""
    S = scores.shape[2]
    masked = jnp.where(valid, scores, -jnp.inf)
    _, found = jax.lax.top_k(masked[..., ::-1], min(count, S))  # Of equals it takes the first.
    found = S - 1 - found
    there = jnp.take_along_axis(jnp.broadcast_to(valid, scores.shape), found, axis=2)
    found = jnp.sort(jnp.where(there, found, EMPTY), axis=2)
    return jnp.pad(found, ((0, 0), (0, 0), (max(0, count - S), 0)), constant_values=EMPTY)


def _take(x: Array, index: Array) -> Array:
    """x [B, K, S, ...] at index [B, K or 1, S']; for `EMPTY` what stands first."""
    index = jnp.maximum(index, 0).reshape(*index.shape, *[1] * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2)


def _with_sinks(state: EvictingState, k: Array, v: Array, positions: Array, end: Array) -> EvictingState:
    """The sinks among the new tokens, in their slots."""
    if not (sinks := state.sizes.sinks):
        return state

    def put(near: Array, x: Array) -> Array:
        head = ring_of_piece(near[:, :, :sinks], x, positions, end, sinks=sinks, window=0)
        return jnp.concatenate([head.astype(near.dtype), near[:, :, sinks:]], 2)

    return replace(state, near_k=put(state.near_k, k), near_v=put(state.near_v, v))


def _near_positions(sizes: Sizes, position: Int[Array, " B"]) -> Int[Array, "B M"]:
    """Positions of the near slots while the block of `position` is in progress; `EMPTY` for none."""
    sinks, window, block = sizes
    recent = (position // block * block - window)[:, None] + jnp.arange(window + block)
    recent = jnp.where(recent >= sinks, recent, EMPTY)
    head = jnp.broadcast_to(jnp.arange(sinks), (position.shape[0], sinks))
    return jnp.concatenate([head, recent], 1)
