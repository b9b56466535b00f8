"""New tokens from the projections into the cache in one launch: rotated, quantized and stored (ours).

    grid: (K, B, parts), Triton; 4 warps per program, 8 for heads of 256; no explicit barriers
    G parts:                       queries of one head:   RoPE → basis → store, also as attention reads them
    planes of the store, and ring: keys of one KV head:   RoPE → basis → quantize → plane or ring
    planes of the store, and ring: values of one KV head: quantize → plane or ring
    G parts per 64 blocks:         what scores of one head gain in them, if keys leave out their mean

A program with C coordinates of a query or key reads 2 H C bytes of a basis and computes 2 H C FLOP. Those
of a KV head and sequence have at most (G + 2)·2 H² of each together. Only 4 H² bytes of the bases differ.
Each plane then costs what it does in `encode`.

Queries and keys get rotary embedding and basis as in `post_rope`. Keys and values are rounded to planes of
integers as in `encode`, and written to their slots of the store and of the ring of near tokens. No other pass
over the new tokens follows.

The kernel serves one token per sequence, where latency is all. Probably the weights of a layer push its code
out of the GPU's cache, so that each instruction comes from memory, once per layer. A program therefore has a
single token, and tries all scales at once, in one tile. Tiles of 16 rows, as tensor cores want them, needed
twice the code, and 20 instead of 4 µs (H100, one sequence, preset `3bit`). Each plane and the ring have their
own program, although several then compute the same product. A program issues all loads before it waits for
any.

JAX plans to drop Pallas' Triton back end. Without it `check_turn_and_store` raises, and `post_rope` and XLA
do the work.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, LOG2_E
from kernels_pallas.lowering import lower_once
from kernels_pallas.quantized.encode import coded_token, packed
from kernels_pallas.quantized.inputs import Plane, rows_of
from kernels_pallas.quantized.queries import columns_of
from kernels_pallas.quantized.turn_inputs import Stored, TurnedQueries, Turning, check_turn_and_store
from kernels_pallas.rope.score_blocks import BLOCKS_OF_ONE, MeanTurns, score_token
from kernels_pallas.triton import in_pages, plt


class _Operands(NamedTuple):
    """Arrays of a launch except those that are written, or references to them.

    `table`, `first_ring` [1] and `means` may be None.
    """

    heads: Sequence[Any]
    q_basis: Any
    k_basis: Any
    cos: Any
    sin: Any
    starts: Any
    ends: Any
    table: Any
    first_ring: Any
    means: Any


class _Geometry(NamedTuple):
    """Static shape of a launch.

    Attributes:
      S: slots of a sequence.
      G: query heads per KV head.
      H: coordinates of a query.
      sinks: sinks of the rings.
      window: window of the rings.
      scale: factor on the scores.
      programs: programs of a KV head and sequence, except those for gains.
    """

    S: int
    G: int
    H: int
    sinks: int
    window: int
    scale: float
    programs: int


@lower_once("sinks", "window", "scale", "interpret")
@common.checked_by(check_turn_and_store)
def turn_and_store(
    heads: Sequence[Float[Array, "B _ _"]],
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
    block_table: Int[Array, "B pages"] | None = None,
    first_ring: Int[Array, ""] | None = None,
    means: MeanTurns | None = None,
    scale: float = 1.0,
    interpret: bool = False,
) -> tuple[TurnedQueries, Stored, Stored]:
    """Rotate new queries and keys, and store keys and values; other slots keep their contents.

    Each sequence's token goes to its start, if that is below `ends`. Other sequences are idle: nothing is
    read or written, and their queries have any values.

    Args:
      heads: queries [B, N, H], keys [B, K, H] and values [B, K, Hv] as projected, bfloat16 or float16; or all
        in this order in one array (`join_heads`).
      turning: rotary embedding and basis.
      k_stored: cache of rotated keys.
      v_stored: cache of values.
      starts: slot of the new token of each sequence, int32.
      ends: end of the slots of each sequence, int32; nothing is written to the stores from S on.
      sinks: sinks of the rings; sink p is in slot window + p.
      window: window of the rings; position p is in slot p mod window.
      block_table: table of pools of pages (`Plane`) of any size, for the stores. A token with an invalid
        entry is not written there. Rings are not paged.
      first_ring: ring of the first sequence; the others' follow. Default 0.
      means: mean that keys have left out, for the gains of the scores; default none.
      scale: factor on the scores, and thus on the gains; default 1.
      interpret: whether to run on any device, slowly.

    Returns:
      Rotated queries in all forms that attention reads, and both caches, in the same memory if their arrays
      are donated.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    (B, heads_of_first, _), (K, H) = heads[0].shape, turning.k.shape[:2]
    G = heads_of_first // K - (2 if len(heads) == 1 else 0)
    g = _Geometry(
        S=rows_of(k_stored.planes[0].reach, block_table)[2],
        G=G,
        H=H,
        sinks=sinks,
        window=window,
        scale=scale,
        programs=G + k_stored.programs + v_stored.programs,
    )
    operands = _Operands(
        heads=heads,
        q_basis=turning.q,
        k_basis=turning.k,
        cos=turning.cos,
        sin=turning.sin,
        starts=starts.astype(jnp.int32),
        ends=ends.astype(jnp.int32),
        table=block_table,
        first_ring=None if first_ring is None else first_ring.astype(jnp.int32).reshape(1),
        means=means,
    )
    columns, blocks = columns_of(G), 0 if means is None else means.turns.shape[0]
    like: Any = jax.ShapeDtypeStruct
    queries = TurnedQueries(
        plain=like((B, K * G, H), heads[0].dtype),
        far=like((B, K, columns, k_stored.width), heads[0].dtype),
        near=like((B, K, columns, H), heads[0].dtype) if isinstance(k_stored.ring, Plane) else None,
        gains=like((B, K, blocks, columns), jnp.float32) if blocks else None,
    )
    caches = k_stored, v_stored
    stored = jax.tree.map(lambda x: like(x.shape, x.dtype), caches)
    first, before, count = (len(jax.tree.leaves(x)) for x in (operands, queries, caches))
    return pl.pallas_call(
        functools.partial(_kernel, g=g),
        out_shape=(queries, *stored),
        grid=(K, B, g.programs + G * pl.cdiv(blocks, BLOCKS_OF_ONE)),
        input_output_aliases={first + i: before + i for i in range(count)},
        compiler_params=plt.CompilerParams(num_warps=max(4, H // 32)),
        interpret=interpret,
        name="zdc_turn_and_store",
    )(operands, caches)


def _kernel(refs: _Operands, _before: Any, queries: Any, *stored: Stored, g: _Geometry) -> None:
    # `_before` shares memory with `stored`.
    kv, b, part = (pl.program_id(axis) for axis in range(3))

    @pl.when(refs.starts[b] < refs.ends[b])
    def _() -> None:
        _store_share(_Token(b, refs), kv, part, queries, stored, g)


def _store_share(
    token: "_Token", kv: Array, part: Array, queries: Any, stored: Sequence[Stored], g: _Geometry
) -> None:
    """Store one program's share of a new token, or rotate one query head."""
    refs, K = token.refs, token.refs.q_basis.shape[0]
    q_ref, k_ref, v_ref = refs.heads if len(refs.heads) == 3 else [*refs.heads] * 3
    first_k, first_v = (0, 0) if len(refs.heads) == 3 else (K * g.G, K * (g.G + 1))
    k_stored, v_stored = stored

    @pl.when(part < g.G)
    def _queries() -> None:
        head = kv * g.G + part
        x = token.turn(q_ref, head, refs.q_basis, kv, (0, g.H))
        column = lax.iota(jnp.int32, g.H)
        plt.store(queries.plain.at[token.b, head, column], x.astype(queries.plain.dtype))
        for out in (queries.far, queries.near):
            if out is not None:
                token.put_arranged(out, kv, part, x.astype(out.dtype))
                token.fill_missing(out, kv, part, g.G)

    def put_keys(index: int) -> None:
        span = _find_span(k_stored, g.H, index)
        x = token.turn(k_ref, first_k + kv, refs.k_basis, kv, span).astype(k_ref.dtype)
        _put(token.find_places(k_stored, g), kv, x, span[1], k_stored, index)

    def put_values(index: int) -> None:
        begin, width = _find_span(v_stored, v_ref.shape[2], index)
        column = lax.iota(jnp.int32, pl.next_power_of_2(width))
        x = plt.load(v_ref.at[token.b, first_v + kv, begin + column], mask=column < width, other=0.0)
        _put(token.find_places(v_stored, g), kv, x, width, v_stored, index)

    if refs.means is not None:
        put_gains = functools.partial(_put_gains, token, q_ref, kv, part - g.programs, queries.gains, g)
        pl.when(part >= g.programs)(put_gains)
    for index in range(k_stored.programs):
        pl.when(part == g.G + index)(functools.partial(put_keys, index))
    for index in range(v_stored.programs):
        pl.when(part == g.G + k_stored.programs + index)(functools.partial(put_values, index))


def _find_span(stored: Stored, width: int, index: int) -> tuple[int, int]:
    """Return the first coordinate, and the number of coordinates of `width`, that a program writes."""
    if index == len(stored.planes):
        return 0, width
    return sum(plane.width for plane in stored.planes[:index]), stored.planes[index].width


def _put_gains(token: "_Token", q_ref: Any, kv: Array, part: Array, out: Any, g: _Geometry) -> None:
    """Store what the scores of a query head gain in a tile of blocks."""
    start, (blocks, columns) = token.refs.starts[token.b], out.shape[2:]
    member, first = lax.rem(part, jnp.int32(g.G)), lax.div(part, jnp.int32(g.G)) * BLOCKS_OF_ONE

    @pl.when(first * GAIN_BLOCK <= start)
    def _() -> None:
        block = first + lax.iota(jnp.int32, BLOCKS_OF_ONE)
        score = score_token(token.refs.means, q_ref, (token.b, kv * g.G + member), kv, start, block)
        plt.store(out.at[token.b, kv, block, member], g.scale * LOG2_E * score, mask=block < blocks)
        for column in range(g.G, columns, g.G):  # Missing heads get zeros.
            mask = (block < blocks) & (member + column < columns)
            plt.store(out.at[token.b, kv, block, member + column], jnp.zeros_like(score), mask=mask)


class _Places(NamedTuple):
    """Destinations of a token.

    Attributes:
      far: sequence or page, and slot in the store.
      kept: whether the token is written to the store.
      near: sequence, and slot in the ring.
      recent: whether the token is written to the ring.
    """

    far: tuple[Array, Array]
    kept: Array
    near: tuple[Array, Array]
    recent: Array


class _Token(NamedTuple):
    """Token of a program: that of sequence `b`."""

    b: Array
    refs: _Operands

    def turn(self, ref: Any, head: Array, basis: Any, kv: Array, span: tuple[int, int]) -> Array:
        """Return coordinates of RoPE(x) A from a begin on, float32; a power of two, with zeros at the end."""
        (begin, width), half = span, basis.shape[1] // 2
        row, column = lax.iota(jnp.int32, half), lax.iota(jnp.int32, pl.next_power_of_2(width))[None]
        tiles = [
            plt.load(basis.at[kv, (i * half + row)[:, None], begin + column], mask=column < width, other=0.0)
            for i in range(2)
        ]
        low, high = (plt.load(ref.at[self.b, head, i * half + row]).astype(jnp.float32) for i in range(2))
        cos, sin = (plt.load(each.at[self.b, row]) for each in (self.refs.cos, self.refs.sin))
        halves = low * cos - high * sin, high * cos + low * sin
        # Products of 16-bit numbers are exact in float32, as on tensor cores.
        products = (
            x.astype(basis.dtype).astype(jnp.float32)[:, None] * tile.astype(jnp.float32)
            for x, tile in zip(halves, tiles, strict=True)
        )
        return functools.reduce(jnp.add, products).sum(0)

    def put_arranged(self, ref: Any, kv: Array, member: Array, x: Array) -> None:
        """Store one head of a group into arranged queries [B, K, columns, R]."""
        coordinate = lax.iota(jnp.int32, x.shape[0])
        at = ref.at[self.b, kv, member, coordinate]
        plt.store(at, x, mask=coordinate < ref.shape[3])

    def fill_missing(self, ref: Any, kv: Array, member: Array, groups: int) -> None:
        """Store zeros into a share of the columns of arranged queries that no head has."""
        _, _, count, R = ref.shape
        place = lax.iota(jnp.int32, pl.next_power_of_2(R))
        for column in range(groups, count, groups):
            mask = (place < R) & (member + column < count)
            zeros = jnp.zeros(place.shape, ref.dtype)
            plt.store(ref.at[self.b, kv, member + column, place], zeros, mask=mask)

    def find_places(self, stored: Stored, g: _Geometry) -> _Places:
        """Return where the new token at its start goes."""
        position = self.refs.starts[self.b]
        kept, lead, slot = position < g.S, self.b, position
        if self.refs.table is not None:
            pool = stored.planes[0].levels.shape
            lead, slot, is_valid = in_pages(self.refs.table, self.b, position, pool)
            kept &= is_valid
        recent = lax.rem(position, jnp.int32(max(g.window, 1)))
        near_slot = jnp.where(position < g.sinks, g.window + position, recent)
        first = 0 if self.refs.first_ring is None else self.refs.first_ring[0]
        return _Places((lead, slot), kept, (first + self.b, near_slot), (position < g.sinks) | (g.window > 0))


def _put(places: _Places, kv: Array, x: Array, width: int, stored: Stored, index: int) -> None:
    """Write coordinates of a key or value to one destination: a plane of the store, or the ring."""
    is_far = index < len(stored.planes)
    (lead, slot), kept = (places.far, places.kept) if is_far else (places.near, places.recent)
    to = stored.planes[index] if is_far else stored.ring
    if not isinstance(to, Plane):
        column = lax.iota(jnp.int32, x.shape[0])
        plt.store(to.at[lead, kv, slot, column], x, mask=kept & (column < width))
        return
    levels, reach = coded_token(x.astype(jnp.float32), width, to.bits)
    for place, size, part in packed(levels, width, 0, to.bits):
        byte = lax.iota(jnp.int32, part.shape[0])
        plt.store(to.levels.at[lead, kv, slot, place + byte], part, mask=kept & (byte < size))
    plt.store(to.reach.at[lead, kv, slot], reach, mask=kept)
