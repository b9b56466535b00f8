"""Attention to the far tokens of a cache's store: whole, in integers, or those that an index chooses.

Far of a query at position t are the slots sinks ≤ j ≤ t - window, slot = position; near ones are attended to
apart. As in `zdc_jax.ops.attention`, an explicit implementation that cannot serve a call raises, and None
takes the kernels where they can.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from kernels_pallas import (
    Parts,
    Plane,
    Stored,
    Turning,
    coded_parts,
    coded_refusal,
    dequantise,
    dequantise_refusal,
    device_refusal,
    encode,
    encode_refusal,
    index_scores,
    largest,
    merged,
    merged_at_once,
    prefill_attention,
    prefill_refusal,
    scan_refusal,
    select_refusal,
    turn_and_store,
    turn_and_store_refusal,
)
from kernels_pallas.coded_inputs import rows_of
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation, choose_implementation
from zdc_jax.ops.rotary import UnturnedKeys
from zdc_jax.ops.slots import EMPTY, ring_positions
from zdc_jax.ops.xla import xla_attention

SLOTS = 128
"""Kernels that choose take a multiple of so many, those that read a whole store of half as many."""
AT_ONCE = 256 * 2**20
"""Bytes of scores by an index that queries may have written at once.

So many are work for an H100 several times over, beside which launches take little; fewer, that would stay in
its second-level cache, are not.
"""
LEAST_NUMBERS = 4096
"""Of a query and KV head where a store has fewer slots: results of 256 values in 16 heads, or a list."""
NO_CUDNN = "it does not read this cache"
NOT_INTEGERS = "kernels know only integers with one step a token"


def takes_kernels(
    kind: str, implementation: Implementation | None, refusal: Callable[[], str | None]
) -> bool:
    """Whether a call runs on kernels, and not on XLA; `refusal` says why they cannot, or None.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    refusals: dict[Implementation, Callable[[], str | None]] = {"pallas": refusal, "cudnn": lambda: NO_CUDNN}
    return choose_implementation(kind, implementation, refusals) == "pallas"


def slots_for(tokens: int) -> int:
    """Slots of a store with room for so many tokens: as many as kernels take, a multiple of 128."""
    return -(-max(tokens, 1) // SLOTS) * SLOTS


def far_span(
    positions: Int[Array, "B T"], sinks: int, window: int
) -> tuple[Int[Array, " B*T"], Int[Array, " B*T"]]:
    """The far slots begin ≤ j < end of each query."""
    t = positions.ravel()
    return jnp.full_like(t, sinks), t + 1 - window


def table_of_queries(
    positions: Int[Array, "B T"], table: Int[Array, "B pages"] | None
) -> Int[Array, "B*T _"] | None:
    """The block table of kernels that take one query a row, where T queries of a row read the same tokens.

    Without a table a store [B, K, S, …] is a pool of B pages of S slots, of which each query has one. One
    query a row needs no other table than its row has.
    """
    B, T = positions.shape
    if T == 1:
        return table
    return jnp.repeat(jnp.arange(B, dtype=jnp.int32)[:, None] if table is None else table, T, axis=0)


def queries_at_once(B: int, K: int, S: int, T: int) -> int:
    """How many of T queries of each row kernels take at once, a power of two unless all: see `AT_ONCE`.

    All rows' are taken together, so that decoding, which has one query a row, is one launch.
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
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attention to far keys that are read as numbers, and its log-sum-exp; kernels take pieces of prompts.

    Args:
      positions: consecutive in each row.
      scale, sinks, window, implementation: as in `zdc_jax.ops.attention.self_attention`.
      end: queries at or past it are padding, whose results are unspecified; kernels leave them out.

    Returns:
      zeros and -inf for queries without far keys.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    near: dict[str, Any] = {"sinks": sinks, "window": window}
    refusal = partial(stored_attention_refusal, q, k, v, **near)
    if takes_kernels("far prompt", implementation, refusal):
        rows = {"starts": positions[:, 0], "lengths": end}
        return prefill_attention(q, k, v, scale=scale, keys="far", **rows, **near)
    return xla_attention(q, k, v, positions, scale=scale, near=None, **near)


def stored_attention_refusal(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B K S R"] | jax.ShapeDtypeStruct,
    v: Float[Array, "B K S Z"] | jax.ShapeDtypeStruct,
    *,
    sinks: int,
    window: int,
) -> str | None:
    """Why `stored_attention` cannot run on kernels; of keys and values shapes are enough."""
    if q.shape[1] == 1:
        return "single queries of far keys alone run on xla"
    starts = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
    return device_refusal(q) or prefill_refusal(
        q, k, v, starts=starts, keys="far", sinks=sinks, window=window
    )


def takes_numbers(
    q: Float[Array, "B T N R"],
    planes: Sequence[Sequence[Plane]],
    *,
    sinks: int,
    window: int,
    dtype: DTypeLike,
    implementation: Implementation | None = None,
    table: Int[Array, "B pages"] | None = None,
) -> bool:
    """Whether `stored_attention` of q runs on kernels that read `numbers` of these planes.

    planes: of keys and of values; empty if kernels do not know a code. With a table of pages they are pools.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    if not all(planes):
        return False
    k, v = (
        jax.ShapeDtypeStruct((*rows_of(each[0].reach, table), sum(plane.width for plane in each)), dtype)
        for each in planes
    )
    refusal = partial(stored_attention_refusal, q, k, v, sinks=sinks, window=window)
    if not takes_kernels("far prompt", implementation, refusal):
        return False
    row = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
    refusal = partial(dequantise_refusal, planes, row, dtype=dtype, block_table=table)
    return takes_kernels("dequantising", None, refusal)


def numbers(
    planes: Sequence[Sequence[Plane]],
    positions: Int[Array, "B T"],
    *,
    window: int,
    dtype: DTypeLike,
    table: Int[Array, "B pages"] | None = None,
) -> list[Float[Array, "B K S _"]]:
    """What planes of keys and of values say, as far as queries at `positions` see far tokens, by one kernel.

    What is behind is any number, which attention on XLA would not do with: `takes_numbers` tells.

    positions: consecutive in each row.
    """
    return dequantise(planes, positions[:, -1] + 1 - window, dtype=dtype, block_table=table)


def coded_decode_refusal(
    q: Float[Array, "B T N R"],
    planes: Sequence[Plane],
    *,
    slots: Int[Array, "B T K n"] | jax.ShapeDtypeStruct | None = None,
    table: Int[Array, "B pages"] | None = None,
) -> str | None:
    """Why `coded_decode` cannot run; `planes` are empty if kernels do not read one of the codes."""
    if not planes:
        return NOT_INTEGERS
    *keys, values = planes
    queries, row, pages = _query_shapes(q, table)
    listed = None if slots is None else jax.eval_shape(_flat, slots)
    return device_refusal(q) or coded_refusal(
        queries, keys, values, row, row, slots=listed, block_table=pages
    )


def coded_decode(
    q: Float[Array, "B T N R"],
    planes: Sequence[Plane],
    positions: Int[Array, "B T"],
    near: tuple[int, int],
    *,
    scale: float,
    slots: Int[Array, "B T K n"] | None = None,
    table: Int[Array, "B pages"] | None = None,
) -> Parts:
    """Attention of each query by itself to far tokens in integers on the kernel, all or those in `slots`.

    planes: of keys, then one of values; with a table of pages, pools of them. near: sinks and window.
    """
    *keys, values = planes
    return coded_parts(
        _flat(q),
        keys,
        values,
        *far_span(positions, *near),
        scale=scale,
        slots=None if slots is None else _flat(slots),
        block_table=table_of_queries(positions, table),
    )


def of_parts(
    q: Float[Array, "B T N R"], *parts: Parts
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """What each query gets from parts of its keys, and the log-sum-exp."""
    (B, T, N, _), K = q.shape, parts[0].o.shape[1]
    given = N // K, q.dtype
    o, lse = merged(*parts, *given) if len(parts) == 1 else merged_at_once(parts, *given)
    return o.reshape(B, T, N, -1), lse.reshape(B, T, N).swapaxes(1, 2)


def coded_ring_decode(
    q: Float[Array, "B 1 N H"],
    planes: Sequence[Plane],
    positions: Int[Array, "B 1"],
    *,
    scale: float,
    sinks: int,
    window: int,
) -> Parts:
    """Attention of one query a row to near tokens in integers on the kernel, the query's own among them.

    planes: of keys and of values, as a ring stands (`zdc_jax.ops.slots`).
    """
    keys, values = planes
    B, K, M = values.reach.shape
    held, row = ring_positions(M, positions, sinks=sinks, window=window), jnp.zeros(B, jnp.int32)
    slots = jnp.broadcast_to(jnp.where(held == EMPTY, M, jnp.arange(M))[:, None], (B, K, M))
    return coded_parts(q[:, 0], [keys], values, row, row + M, scale=scale, slots=slots)


def choice_refusal(
    q: Float[Array, "B T N C"],
    planes: Sequence[Plane],
    count: int,
    table: Int[Array, "B pages"] | None = None,
) -> str | None:
    """Why `choose_by_index` cannot run; `planes` has the index alone, or nothing."""
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
    """The far slots of the largest probability by the index, summed over a KV head's queries, on the kernels.

    Each query has its own. They ascend, and are followed by S where fewer are far. Queries are rounded to 255
    levels. Where query heads share a KV head, a sample of the slots gives their denominators
    (`kernels_pallas.coded_scan.in_sample`). Scores of all are in memory at once: `queries_at_once` says how
    many to give.
    """
    (index,), span = planes, far_span(positions, sinks, window)
    pages = table_of_queries(positions, table)
    scores, _ = index_scores(_flat(q), index, *span, scale=scale, block_table=pages)
    found = largest(scores, *span, k=count)
    return found.reshape(*positions.shape, *found.shape[1:])


def _flat(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B*T *rest"]:
    """Queries, or what each of them has, as rows of kernels that take one a row."""
    return x.reshape(-1, *x.shape[2:])


def _query_shapes(
    q: Array, table: Array | None
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
    """Shapes of queries as such rows, of where their tokens begin or end, and of their table."""
    positions = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    row = jax.eval_shape(_flat, positions)
    return jax.eval_shape(_flat, q), row, jax.eval_shape(table_of_queries, positions, table)


def encoded(
    x: Sequence[Float[Array, "B T K _"]],
    planes: Sequence[Sequence[Plane]],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
    table: Int[Array, "B pages"] | None = None,
) -> list[list[Plane]] | None:
    """Planes with the tokens x at `positions` below `end`, written by one kernel; None where it cannot.

    How attention is implemented says nothing of it: the codes are the same.

    planes: for each array of x those that take its coordinates; empty if kernels do not know a code. With a
    table of pages they are pools.
    """
    row = jax.ShapeDtypeStruct(x[0].shape[:1], jnp.int32)

    def refusal() -> str | None:
        if not all(planes):
            return NOT_INTEGERS
        return device_refusal(x[0]) or encode_refusal(x, planes, row, row, block_table=table)

    if not takes_kernels("coding", None, refusal):
        return None
    return encode(x, planes, positions[:, 0], end, block_table=table)


def turned_and_stored(
    q: Float[Array, "B 1 N H"],
    k: UnturnedKeys,
    v: Float[Array, "B 1 K Hv"],
    stored: tuple[Stored, Stored],
    positions: Int[Array, "B 1"],
    end: Int[Array, " B"],
    near: tuple[int, int],
    implementation: Implementation | None,
    table: Int[Array, "B pages"] | None = None,
) -> tuple[Float[Array, "B 1 N H"], Stored, Stored] | None:
    """Turned queries of single tokens, and what keeps keys and values with these, written by one kernel; None
    where it cannot, whatever the implementation, or XLA is to turn them.

    stored: of keys and of values; planes are none if kernels do not know a code. With a table of pages they
    are pools. near: sinks and window.
    """
    options: dict[str, Any] = dict(zip(("sinks", "window"), near, strict=True), block_table=table)

    def given(q: Array, k: UnturnedKeys, v: Array) -> tuple[Array, Array, Array, Turning]:
        cos, sin = k.angles()
        turning = Turning(cos[:, 0], sin[:, 0], k.q_basis, k.k_basis, k.k_shift)
        return q[:, 0], k.keys[:, 0], v[:, 0], turning

    def refusal() -> str | None:
        if not all(each.planes for each in stored):
            return NOT_INTEGERS
        new, keys, values, turning = jax.eval_shape(given, q, k, v)
        row = jax.ShapeDtypeStruct(q.shape[:1], jnp.int32)
        return device_refusal(q) or turn_and_store_refusal(
            new, keys, values, turning, *stored, row, row, **options
        )

    # Where it cannot, other kernels do its parts, and the log tells of them.
    if implementation not in (None, "pallas") or refusal() is not None:
        return None
    takes_kernels("new token", None, refusal)
    turned, kept_k, kept_v = turn_and_store(*given(q, k, v), *stored, positions[:, 0], end, **options)
    return turned[:, None], kept_k, kept_v
