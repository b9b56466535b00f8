"""Attention to the far tokens of a cache: all of them, quantized or not, or a selection by an index.

For a query at position t the far slots are sinks ≤ j ≤ t - window, and slot j stores position j. Near tokens
are attended to separately. Kernels take quantized values as planes (`kernels_pallas.Plane`), whose `reach` is
the scale of each token. As in `zdc_jax.ops.attention`, an explicit implementation that cannot serve a call
raises, and None uses the kernels where they can.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from kernels_pallas import (
    CodedPass,
    Parts,
    Plane,
    coded_parts,
    coded_refusal,
    device_refusal,
    index_scores,
    largest,
    merged,
    merged_at_once,
    prefill_attention,
    prefill_refusal,
    scan_refusal,
    select_refusal,
)
from kernels_pallas.quantized.inputs import rows_of
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, shift_refusal, takes_kernels
from zdc_jax.ops.xla import xla_attention

SLOTS = 128
"""Granularity of a store's slots for selection kernels; kernels over a whole store need half of it."""
AT_ONCE = 256 * 2**20
"""Limit on the bytes of index scores in memory at a time.

This much work fills an H100 several times over, so that launches cost little. A limit that kept the scores in
its second-level cache would not.
"""
LEAST_NUMBERS = 4096
"""Least number of score-sized values assumed per query and KV head, for stores with fewer slots.

It covers a result of 256 values in 16 heads, or a list of slots.
"""
NOT_INTEGERS = "kernels support only integer codes with one scale per token"


class ArrangedQueries(NamedTuple):
    """Queries for the kernel of quantized keys.

    Attributes:
      q: queries [Q, N, R], or arranged, [B, K, columns, R].
      gains: their block scores [Q, N, blocks], or arranged, [B, K, blocks, columns]; None for whole keys.
    """

    q: Array
    gains: Array | None


def slots_for(tokens: int) -> int:
    """Return the number of slots of a store for `tokens` tokens, a multiple of `SLOTS`."""
    return -(-max(tokens, 1) // SLOTS) * SLOTS


def far_span(
    positions: Int[Array, "B T"], sinks: int, window: int
) -> tuple[Int[Array, " B*T"], Int[Array, " B*T"]]:
    """Return the range of far slots, begin ≤ j < end, of each query."""
    t = positions.ravel()
    return jnp.full_like(t, sinks), t + 1 - window


def table_of_queries(
    positions: Int[Array, "B T"], table: Int[Array, "B pages"] | None
) -> Int[Array, "B*T _"] | None:
    """Return the block table for kernels that take one query per sequence.

    T queries of a sequence become T entries that read the same tokens. Without a table, a store [B, K, S, …]
    is a pool of B pages of S slots. With T = 1 the sequence's own table (or None) is returned.
    """
    B, T = positions.shape
    if T == 1:
        return table
    return jnp.repeat(jnp.arange(B, dtype=jnp.int32)[:, None] if table is None else table, T, axis=0)


def queries_at_once(B: int, K: int, S: int, T: int) -> int:
    """Return how many of the T queries of each sequence to process at a time, within `AT_ONCE`.

    The result is T or a power of two. All sequences are processed together, so that decoding is one launch.
    """
    most = AT_ONCE // (4 * B * K * max(S, LEAST_NUMBERS))
    return min(T, 1 << max(0, most.bit_length() - 1))


def stored_attention(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B K S R"],
    v: Float[Array, "B K S Z"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    sinks: int,
    window: int,
    implementation: Implementation | None = None,
    end: Int[Array, " B"] | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
    needed_from: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attend to far keys that are not quantized; the kernels serve prefill chunks.

    Args:
      q: queries, truncated to R coordinates.
      k: keys by slot.
      v: values by slot.
      positions: position of each query, consecutive within a sequence.
      scale, sinks, window, implementation: as in `zdc_jax.ops.attention.self_attention`.
      end: length of each sequence; queries at or after it are padding, and their results are unspecified.
      block_scores: what scaled scores gain in each block of positions (`zdc_jax.ops.shift`).
      needed_from: first position of each sequence whose result is needed, as in `prefill_attention`.

    Returns:
      The output and its log-sum-exp; zeros and -inf for queries without far keys.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    near: dict[str, Any] = {"sinks": sinks, "window": window}
    refusal = partial(stored_attention_refusal, q, k, v, **near)
    if takes_kernels("far prompt", implementation, refusal):
        rows: dict[str, Any] = {"starts": positions[:, 0], "lengths": end, "needed_from": needed_from}
        rows["block_scores"] = block_scores
        return prefill_attention(q, k, v, scale=scale, keys="far", **rows, **near)
    return xla_attention(q, k, v, positions, scale=scale, near=None, block_scores=block_scores, **near)


def stored_attention_refusal(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B K S R"] | jax.ShapeDtypeStruct,
    v: Float[Array, "B K S Z"] | jax.ShapeDtypeStruct,
    *,
    sinks: int,
    window: int,
) -> str | None:
    """Return why `stored_attention` cannot run on the kernels, or None; keys and values may be shapes."""
    if q.shape[1] == 1:
        return "it does not serve single queries of unquantized far keys"
    starts = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
    return device_refusal(q) or prefill_refusal(
        q, k, v, starts=starts, keys="far", sinks=sinks, window=window
    )


def coded_decode_refusal(
    q: Float[Array, "B T N R"],
    planes: Sequence[Plane],
    *,
    slots: Int[Array, "B T K n"] | jax.ShapeDtypeStruct | None = None,
    table: Int[Array, "B pages"] | None = None,
    ring: tuple[int, int] | None = None,
) -> str | None:
    """Return why the kernel cannot run `far_pass`, or None; `planes` are empty if a code is not supported.

    With a `ring` of sinks and window, it is the pass of `CodedRing.decode_stored`.
    """
    if not planes:
        return NOT_INTEGERS
    *keys, values = planes
    queries, row, pages = _query_shapes(q, table)
    listed = None if slots is None else jax.eval_shape(_flat, slots)
    wanted = CodedPass(queries, keys, values, row, row, slots=listed, block_table=pages, ring=ring)
    return device_refusal(q) or coded_refusal(wanted)


def far_pass(
    q: Float[Array, "B T N R"],
    planes: Sequence[Plane],
    positions: Int[Array, "B T"],
    near: tuple[int, int],
    *,
    slots: Int[Array, "B T K n"] | None = None,
    table: Int[Array, "B pages"] | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
    arranged: ArrangedQueries | None = None,
) -> CodedPass:
    """Return the kernel's pass from each query over its quantized far tokens.

    Args:
      q: queries.
      planes: planes of keys, then one of values; pools if there is a `table`.
      positions: position of each query.
      near: sinks and window.
      slots: slots to attend to; None for all far slots.
      table: block table of a paged cache.
      block_scores: what scaled scores gain in each block of positions (`zdc_jax.ops.shift`).
      arranged: single queries and their block scores as the kernel reads them, if other kernels wrote them
        so.
    """
    *keys, values = planes
    queries = get_queries(arranged, q, block_scores)
    return CodedPass(
        queries.q,
        keys,
        values,
        *far_span(positions, *near),
        slots=None if slots is None else _flat(slots),
        block_table=table_of_queries(positions, table),
        gains=queries.gains,
    )


def attend_passes(
    q: Float[Array, "B T N R"], *passes: CodedPass | Parts, scale: float, copies: int = 1
) -> tuple[Float[Array, "rows T N Z"], Float[Array, "B N T"]]:
    """Compute attention in passes over disjoint keys; return the output and its log-sum-exp.

    One launch computes all passes over quantized keys. Other kernels have computed those that are `Parts`.
    The output of a single sequence in several passes has `copies` equal rows.
    """
    launched = iter(coded_parts([each for each in passes if isinstance(each, CodedPass)], scale=scale))
    parts = [next(launched) if isinstance(each, CodedPass) else each for each in passes]
    (B, T, N, _), K = q.shape, parts[0].o.shape[1]
    if len(parts) == 1:
        o, lse = merged(parts[0], N // K, q.dtype)
    else:
        o, lse = merged_at_once(parts, N // K, q.dtype, copies=copies)
    return o.reshape(-1, T, N, o.shape[-1]), lse.reshape(B, T, N).swapaxes(1, 2)


def get_queries(arranged: ArrangedQueries | None, q: Array, block_scores: Array | None) -> ArrangedQueries:
    """Return queries as other kernels arranged them, or each query by itself."""
    return arranged or ArrangedQueries(_flat(q), None if block_scores is None else _flat(block_scores))


def table_of_rings(
    planes: Sequence[Plane], count: int, first: Int[Array, ""] | None
) -> Int[Array, "count 1"] | None:
    """Return the block table of some rings if there are more, as if rings were pages; else None."""
    if first is None and len(planes[-1].reach) == count:
        return None
    return jnp.arange(count, dtype=jnp.int32)[:, None] + (0 if first is None else first)


def choice_refusal(
    q: Float[Array, "B T N C"],
    planes: Sequence[Plane],
    count: int,
    table: Int[Array, "B pages"] | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> str | None:
    """Return why `choose_by_index` cannot run, or None; `planes` has only the index, or is empty."""
    if reason := shift_refusal(block_scores):
        return reason
    if not planes:
        return NOT_INTEGERS
    (index,) = planes
    queries, row, pages = _query_shapes(q, table)
    _, *slots = rows_of(index.reach, table)
    scores = jax.ShapeDtypeStruct((*row.shape, *slots), jnp.float32)
    return (
        device_refusal(q)
        or scan_refusal(queries, index, row, row, block_table=pages, config=None)
        or select_refusal(scores, row, row, k=count)
    )


def choose_by_index(
    q: Float[Array, "B T N C"],
    planes: Sequence[Plane],
    positions: Int[Array, "B T"],
    *,
    count: int,
    scale: float,
    sinks: int,
    window: int,
    table: Int[Array, "B pages"] | None = None,
) -> Int[Array, "B T K {count}"]:
    """Select the far slots of highest probability under the index, for each query, with the kernels.

    Probabilities are summed over the queries of a KV head. Queries are quantized to 255 levels. Where query
    heads share a KV head, a sample of the slots determines their denominators
    (`kernels_pallas.select.scan_inputs.in_sample`).
    All scores are in memory at once: pass at most `queries_at_once` queries.

    Returns:
      Slots in ascending order, padded with S where fewer than `count` are far.
    """
    (index,), span = planes, far_span(positions, sinks, window)
    pages = table_of_queries(positions, table)
    scores, _ = index_scores(_flat(q), index, *span, scale=scale, block_table=pages)
    slots = largest(scores, *span, k=count)
    return slots.reshape(*positions.shape, *slots.shape[1:])


def _flat(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B*T *rest"]:
    """Flatten the query axis into the batch axis, for kernels that take one query per sequence."""
    return x.reshape(-1, *x.shape[2:])


def _query_shapes(
    q: Array, table: Array | None
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
    """Return shapes of flattened queries, of the begin or end of their tokens, and of their block table."""
    positions = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    row = jax.eval_shape(_flat, positions)
    return jax.eval_shape(_flat, q), row, jax.eval_shape(table_of_queries, positions, table)
