"""A cache whose queries attend to lists of key blocks: for quality alone, its attention is plain XLA."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from benchmarks.quality.key_blocks import BlockChoice, as_lists, block_lists, visible_blocks
from kernels_pallas import BlockLists
from zdc_jax.axes import Array
from zdc_jax.cache.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.spec import Attended, Call
from zdc_jax.ops.contract import einsum_f32


class ListedState(NamedTuple):
    """kept: keys and values, all coordinates. listed [B, K, ⌈S/Q⌉] int32: blocks that each block of queries
    attended to, at the block of its first position."""

    kept: PrefixRingState
    listed: Array


@dataclass(frozen=True, kw_only=True)
class ListedBlocks(PrefixRing):
    """The plain cache, read by lists; without a `choice` every list holds all blocks."""

    choice: BlockChoice | None = None
    blocks: tuple[int, int] = (128, 128)

    def create(self, batch: int, capacity: int) -> Any:
        """`LayerCacheSpec.create`."""
        count = -(-capacity // self.blocks[0])
        listed = jnp.zeros((batch, self.num_kv_heads, count), jnp.int32)
        return ListedState(super().create(batch, capacity), listed)

    def attend(
        self,
        state: Any,
        q: Float[Array, "B T N H"],
        k: Any,
        v: Any,
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: Any,
        call: Call,
    ) -> Attended:
        """`LayerCacheSpec.attend`."""
        kept = self.write(state.kept, k, v, positions, end)
        start = positions[:, 0]
        lists = self.lists(q, kept.k, start, end, call.scale)
        o, lse = list_attention(q, kept.k, kept.v, lists, start, scale=call.scale, blocks=self.blocks)

        def put(row, new, at):
            return jax.lax.dynamic_update_slice(row, new, (0, at))

        width = state.listed.shape[-1]
        listed = jax.vmap(put)(state.listed, lists.counts[..., :width], start // self.blocks[0])
        return Attended(ListedState(kept, listed), o, lse, aux)

    def lists(self, q: Array, k: Array, start: Array, end: Array, scale: float) -> BlockLists:
        """What queries attend to."""
        if self.choice is not None:
            return block_lists(q, k, start, end, scale=scale, choice=self.choice)
        visible = visible_blocks(start, end, q.shape[1], k.shape[2], self.blocks)
        return as_lists(jnp.repeat(visible[:, None], self.num_kv_heads, axis=1))


def list_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Z"],
    lists: BlockLists,
    start: Int[Array, " B"],
    *,
    scale: float,
    blocks: tuple[int, int],
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Causal attention to the keys of listed blocks alone, list after list; and the log-sum-exp.

    A query that sees no key gives zeros and a log-sum-exp of -inf.
    """
    (B, T, N, H), (K, S, Z) = q.shape, v.shape[1:]
    (Q, P), G, nq = blocks, N // K, lists.counts.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, nq * Q - T), (0, 0), (0, 0))).reshape(B, nq, Q, K, G, H)
    q = jnp.moveaxis(q, 1, 3).transpose(0, 2, 3, 4, 1, 5).reshape(B * K * nq, G * Q, H)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -S % P), (0, 0))).reshape(B * K, -1, x.shape[-1]) for x in (k, v))
    flat = BlockLists(lists.blocks.reshape(B * K * nq, -1), lists.counts.reshape(-1))
    first = jnp.repeat(start[:, None] + jnp.arange(nq) * Q, K, axis=0).reshape(-1)

    def one(given: tuple[Array, Array, BlockLists, Array]) -> tuple[Array, Array]:
        index, queries, own, first = given
        t = first + jnp.tile(jnp.arange(Q), G)[:, None]
        cut = partial(jax.lax.dynamic_slice, slice_sizes=(1, P, H))

        def step(n: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = so_far
            j = own.blocks[n] * P
            scores = scale * einsum_f32("QH,PH->QP", queries, cut(k, (index // nq, j, 0))[0])
            scores = jnp.where(j + jnp.arange(P) <= t, scores, -jnp.inf)
            higher = jnp.maximum(highest, scores.max(-1, keepdims=True))
            finite = jnp.maximum(higher, jnp.finfo(jnp.float32).min)
            weights, kept = jnp.exp(scores - finite), jnp.exp(highest - finite)
            seen = jax.lax.dynamic_slice(v, (index // nq, j, 0), (1, P, Z))[0]
            out = out * kept + einsum_f32("QP,PZ->QZ", weights.astype(v.dtype), seen)
            return higher, total * kept + weights.sum(-1, keepdims=True), out

        rows = jnp.full((G * Q, 1), -jnp.inf), jnp.zeros((G * Q, 1)), jnp.zeros((G * Q, Z))
        highest, total, out = jax.lax.fori_loop(0, own.counts, step, rows)
        return (out / jnp.where(total == 0, 1, total)).astype(v.dtype), highest + jnp.log(total)

    out, lse = jax.lax.map(one, (jnp.arange(B * K * nq), q, flat, first))
    out = out.reshape(B, K, nq, G, Q, Z).transpose(0, 2, 4, 1, 3, 5).reshape(B, nq * Q, N, Z)
    lse = lse.reshape(B, K, nq, G, Q).transpose(0, 1, 3, 2, 4).reshape(B, N, nq * Q)
    return out[:, :T], lse[..., :T]
