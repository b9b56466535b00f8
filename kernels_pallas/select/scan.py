"""Scores of all tokens by the index of a quantized cache, in integer arithmetic (ours).

    grid: (B·K, parts); 128 threads per CTA, no barriers except for the queries in shared memory
    each thread, for each of its tokens:
        load the next tokens' levels and scales into registers (16 bytes at a time)
        G heads × C/4 dp4a: products of four levels with four query coordinates, and their sum
        write the score, or add it to the thread's log-sum-exp

Per token and KV head the kernel reads C·bits/8 + 1 bytes, writes 4 and issues G·C/4 dp4a. Queries are
quantized to eight bits, with a scale per head.

If a KV head has several query heads, a token's score is its probability summed over them, which needs each
head's denominator first. The denominator only weighs heads against each other, so one block of tokens in
eight suffices. Reading all tokens twice would take half as long again, without a better selection.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import LOG2_E, NEVER, filled
from kernels_pallas.lowering import lower_once
from kernels_pallas.quantized.inputs import Plane, rows_of
from kernels_pallas.quantized.short_scales import from_e5m3
from kernels_pallas.select.scan_bytes import (
    EACH_HEAD,
    HEADS,
    TOKENS,
    WORDS,
    dots,
    read_codes,
    read_levels,
)
from kernels_pallas.select.scan_inputs import (
    SAMPLE_BLOCK,
    SAMPLE_EVERY,
    THREADS,
    ScanConfig,
    check_scan,
    default_scan_config,
)

SAMPLE_PARTS = 16
"""Largest number of parts of a sequence's sample; all are read where scores are written."""
SAMPLE_AT_ONCE = 6
"""CTAs per multiprocessor that read the sample."""
COPIED = 32
"""Granularity of a copy to shared memory, in words."""
LARGEST = 127
"""Largest magnitude of a quantized query coordinate."""
SMALLEST = 1e-30
"""Lower bound on a query head's largest coordinate in quantization, so that its scale is not 0."""
UNSEEN = -(2.0**64)
"""Initial maximum of products: below all, and a power of two, whose product with a scale is exact."""


@lower_once("scale", "config")
@common.checked_by(check_scan)
def index_scores(
    q: Float[Array, "B N C"],
    index: Plane,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    block_table: Int[Array, "B pages"] | None = None,
    config: ScanConfig | None = None,
) -> tuple[Float[Array, "B K S"], Float[Array, "B N"]]:
    """Return the score of each token for each KV head, by the index alone.

    Only slots begin ≤ j < end are read.

    Args:
      q: queries, bfloat16, with the coordinates of the index. Each head is quantized to 255 levels.
      index: levels of 2, 4 or 8 bits with a multiple of 16 bytes per token. C is at most 128, S a multiple of
        128.
      begin: first slot of each sequence.
      end: end of the slots of each sequence; slots below 0 and from S on are ignored.
      scale: factor on the scores, 1/√H of the original head dimension.
      block_table: table of a pool of pages (`Plane`), whose size is a multiple of 128 and of the config's
        block.
      config: how tokens are divided; None uses the default.

    Returns:
      Scores in float32, -inf for slots out of range. With one query head per KV head they are scale · q · k.
      With G heads they are log Σ exp(scale · q · k - lse), the logarithm of the summed probabilities.

      The natural log-sum-exp of each head's scaled scores in float32; -inf without slots. With G > 1 it
      covers `in_sample` only.

      A token whose scale is NaN makes its own score NaN, and each log-sum-exp that covers it. With G > 1, if
      it is in the sample, all scores of the KV head become NaN.

    Raises:
      ValueError: a shape, dtype or number of bits is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    (_, N, C), (B, K, S) = q.shape, rows_of(index.reach, block_table)
    page = 0 if block_table is None else index.reach.shape[2]
    if config is None:
        config = default_scan_config(B * K, S, index.levels.shape[-1], page)
    g = _Geometry(
        K=K,
        G=N // K,
        S=S,
        page=page,
        words=C * index.bits // 32,
        bits=index.bits,
        block=config.block,
        parts=config.splits,
        every=1,
        writes=N == K,
        sums=N == K,
    )
    operands = _Operands(
        begin=begin.astype(jnp.int32),
        end=end.astype(jnp.int32),
        queries=_integers(q, g, scale),
        sums=None,
        words=_words(index.levels),
        reach=index.reach,
        table=block_table,
    )
    if g.writes:
        scores, sums = _scan(g, operands)
        lse = _merged(sums)
    else:
        parts = max(1, min(SAMPLE_PARTS, SAMPLE_AT_ONCE * common.SMS // (B * K)))
        sample = g._replace(block=SAMPLE_BLOCK, every=SAMPLE_EVERY, parts=parts, sums=True)
        (sums,) = _scan(sample, operands)
        lse, (scores,) = _merged(sums), _scan(g._replace(writes=True), operands._replace(sums=sums))
    return scores, lse[..., : g.G].reshape(B, N)


class _Geometry(NamedTuple):
    """Static shape of a launch.

    Attributes:
      K: KV heads.
      G: query heads per KV head.
      S: slots of a sequence.
      page: slots per page; 0 without a block table.
      words: 32-bit words per token.
      bits: bits per level.
      block: tokens per step.
      parts: parts of a sequence's tokens.
      every: stride in blocks; one block in `every` is read.
      writes: whether scores are written.
      sums: whether log-sum-exps are written.
    """

    K: int
    G: int
    S: int
    page: int
    words: int
    bits: int
    block: int
    parts: int
    every: int
    writes: bool
    sums: bool


class _Operands(NamedTuple):
    """Arrays of a launch, or references to them in the kernel; absent ones are None.

    Attributes:
      begin: first slot of each sequence.
      end: end of the slots of each sequence.
      queries: quantized queries and their scales (`_integers`).
      sums: base-2 log-sum-exps of the sample's parts, if scores of several heads are written.
      words: levels as 32-bit words.
      reach: scale of each token.
      table: block table.
    """

    begin: Any
    end: Any
    queries: Any
    sums: Any
    words: Any
    reach: Any
    table: Any


def _scan(g: _Geometry, operands: _Operands) -> list[Array]:
    """Read the index once; return scores [B, K, S], base-2 log-sum-exp [B, K, parts, max(G, 2)], or both."""
    B = len(operands.begin)
    scores = jax.ShapeDtypeStruct((B, g.K, g.S), jnp.float32)
    sums = jax.ShapeDtypeStruct((B, g.K, g.parts, max(g.G, 2)), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, g=g),
        out_type=[scores] * g.writes + [sums] * g.sums,
        grid=(B * g.K, g.parts),
        grid_names=("head", "part"),
        kernel_name="zdc_coded_scan",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No thread reads what another has written.
            unsafe_no_auto_barriers=True,
        ),
    )(operands)


def _words(levels: Array) -> Array:
    """View bytes [..., P] as little-endian words [..., P/4], without a copy."""
    return lax.bitcast_convert_type(levels.reshape(*levels.shape[:-1], -1, 4), jnp.uint32)


def _integers(q: Array, g: _Geometry, scale: float) -> Array:
    """Quantize the query heads into the kernel's input, int32 [B, K, rows, 32].

    Each head has C/4 words of four coordinates, in the order of `dots`. The last row holds, as bits of
    float32, the scales that turn products into base-2 scores.
    """
    whole, unit = _rounded(q, scale * LOG2_E)
    # A token's coordinates are indexed by vector of four words, word, byte, and place in the byte.
    bytes_ = (whole & 255).reshape(q.shape[0], g.K, g.G, -1, 4, 4, 8 // g.bits)
    words = functools.reduce(jnp.bitwise_or, (bytes_[..., i, :] << (8 * i) for i in range(4)))
    words = jnp.moveaxis(words, -1, -2).reshape(q.shape[0], g.K, -1)
    units = lax.bitcast_convert_type(unit / 2 ** max(7, g.bits), jnp.int32).reshape(q.shape[0], g.K, g.G)
    rows = [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % COPIED))) for x in (words, units)]
    return jnp.concatenate(rows, axis=-1).reshape(q.shape[0], g.K, -1, COPIED)


def _rounded(q: Array, factor: float) -> tuple[Array, Array]:
    """Quantize q · factor to int32 [..., C] from -127 to 127 with scales float32 [...].

    The scale is NaN if a coordinate is not finite.
    """
    x = q.astype(jnp.float32) * factor
    largest = jnp.maximum(jnp.abs(x).max(-1), SMALLEST)
    whole = jnp.round(x * LARGEST / largest[..., None])
    return jnp.nan_to_num(whole).astype(jnp.int32), largest / LARGEST


def _merged(sums: Array) -> Array:
    """Merge base-2 log-sum-exps [B, K, P, G] of parts into natural ones."""
    highest = jnp.maximum(sums.max(2), NEVER)
    return (highest + jnp.log2(jnp.exp2(sums - highest[:, :, None]).sum(2))) / LOG2_E


def _kernel(refs: _Operands, *out: Any, g: _Geometry) -> None:
    queries = plgpu.SMEM(refs.queries.shape[-2:], jnp.int32)
    pl.run_scoped(functools.partial(_part, refs, out, g), queries, plgpu.Barrier())


class _Heads(NamedTuple):
    """Query heads of a KV head.

    Attributes:
      queries: quantized queries, in shared memory.
      starts: initial values of products, int32 [128, G].
      units: scale of each head's products, [G].
      lse: base-2 log-sum-exp, [G], if scores of several heads are written.
    """

    queries: Any
    starts: Array
    units: Array
    lse: Array | None


def _part(refs: _Operands, out: Sequence[Any], g: _Geometry, queries: Any, ready: Any) -> None:
    """Run one CTA: its share of the blocks of one KV head of one sequence."""
    head, part = lax.axis_index("head"), lax.axis_index("part")
    b, kv = common.divide(head, g.K)
    plgpu.copy_gmem_to_smem(refs.queries.at[b, kv], queries, ready)

    # Blocks out of range would be written outside the scores.
    def inside(slot):
        return jnp.clip(slot, 0, g.S)

    span = _Span.of(inside(refs.begin[b]), inside(refs.end[b]), part, g)

    def read(step: Array) -> tuple[Array, Array]:
        block = jnp.clip(span.block(step, g), 0, g.S // g.block - 1)
        lead, rows = _place(refs, b, block, g)
        return read_levels(refs.words.at[lead, kv, rows]), read_codes(refs.reach.at[lead, kv, rows])

    first = read(span.first)
    if g.writes:
        _write_outside(out[0].at[b, kv], span, part, g)
    plgpu.barrier_wait(ready)
    heads = _heads(queries, None if refs.sums is None else refs.sums.at[b, kv], g)

    def body(step: Array, carry: Any) -> Any:
        (words, codes), sums = carry
        following = read(jnp.minimum(step + 1, span.last - 1))
        products = _products(words, codes, heads, g)
        if g.sums:
            products = span.only(products, span.block(step, g), HEADS)
            sums = _add(sums, products, heads.units)
        if g.writes:
            worth, block = _worth(products, heads), span.block(step, g)
            out[0].at[b, kv, _rows(block, g)][...] = worth if g.sums else span.only(worth, block, TOKENS)
        return following, sums

    start = [filled((THREADS, g.G), value, HEADS) for value in (UNSEEN, 0)] if g.sums else []
    _, sums = lax.fori_loop(span.first, span.last, body, (first, tuple(start)))
    if g.sums:
        lse = _over_threads(sums, heads.units)
        # A single value cannot be stored, so duplicate it.
        out[-1].at[b, kv, part][...] = jnp.concatenate([lse, lse]) if g.G == 1 else lse


def _heads(queries: Any, sums: Any, g: _Geometry) -> _Heads:
    units = plgpu.load(queries.at[queries.shape[0] - 1, pl.ds(0, g.G)], layout=EACH_HEAD, optimized=False)
    ones = plgpu.layout_cast(jnp.full((THREADS, g.words), 0x01010101, jnp.uint32), WORDS)
    totals = dots([ones] * (8 // g.bits), queries, _nothing(g))
    # A level n stands for 2n + 1 - 2^bits, and `_fields` has n · 2^(8 - bits). Products are therefore
    # 2^(7 - bits) times those of the dequantized values; with eight bits they are doubled.
    starts = -((2**g.bits - 1) << max(7 - g.bits, 0)) * totals
    lse = None if sums is None else _of_parts(sums)
    return _Heads(queries, starts, lax.bitcast_convert_type(units, jnp.float32), lse)


def _of_parts(sums: Any) -> Array:
    """Merge base-2 log-sum-exps [parts, G] of all parts into [G]."""
    parts = [plgpu.load(sums.at[i], layout=EACH_HEAD, optimized=False) for i in range(sums.shape[0])]
    highest = jnp.maximum(functools.reduce(jnp.maximum, parts), NEVER)
    return highest + jnp.log2(sum(jnp.exp2(part - highest) for part in parts))


class _Span(NamedTuple):
    """Steps first ≤ i < last of a part, over `blocks` from `low` on that contain slots begin ≤ j < end."""

    first: Array
    last: Array
    low: Array
    blocks: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, begin: Array, end: Array, part: Array, g: _Geometry) -> "_Span":
        """Divide the non-empty blocks into equal shares."""
        low = lax.div(begin, jnp.int32(g.block))
        count = jnp.where(end > begin, lax.div(end + (g.block - 1), jnp.int32(g.block)) - low, 0)
        first, last = _share(lax.div(count + (g.every - 1), jnp.int32(g.every)), part, g)
        return cls(first, last, low, count, begin, end)

    def block(self, step: Array, g: _Geometry) -> Array:
        """Return the block that a step reads."""
        return self.low + step * g.every

    def only(self, x: Array, block: Array, layout: Any) -> Array:
        """Set elements of tokens out of range to -inf."""
        size = x.shape[0]
        first = block * size
        count = (self.end - self.begin).astype(jnp.uint32)

        def cut(x: Array) -> Array:
            j = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + (first - self.begin)
            return jnp.where(j.astype(jnp.uint32) < count, x, -jnp.inf)

        inside = (first >= self.begin) & (first + size <= self.end)
        return lax.cond(inside, lambda x: x, cut, x)


def _share(count: Array, part: Array, g: _Geometry) -> tuple[Array, Array]:
    """Return the part's share of `count` items."""
    each = lax.div(count + (g.parts - 1), jnp.int32(g.parts))
    first = jnp.minimum(part * each, count)
    return first, jnp.minimum(first + each, count)


def _rows(step: Array, g: _Geometry) -> Any:
    return pl.ds(pl.multiple_of(step * g.block, g.block), g.block)


def _place(refs: _Operands, b: Array, block: Array, g: _Geometry) -> tuple[Array, Any]:
    """Return leading index and rows of a sequence's block, through a block table if any."""
    if refs.table is None:
        return b, _rows(block, g)
    per_page = jnp.int32(g.page // g.block)
    # A block is read even for a sequence without slots, whose table entries may have any value.
    page = jnp.clip(refs.table[b, lax.div(block, per_page)], 0, refs.reach.shape[0] - 1)
    return page, _rows(lax.rem(block, per_page), g)


def _write_outside(scores: Any, span: _Span, part: Array, g: _Geometry) -> None:
    """Write -inf to the part's share of the blocks without slots in range."""

    @pl.loop(*_share(g.S // g.block - span.blocks, part, g))
    def _(i: Array) -> None:
        step = jnp.where(i < span.low, i, i + span.blocks)
        scores.at[_rows(step, g)][...] = filled((g.block,), -jnp.inf, TOKENS)


def _products(words: Array, codes: Array, heads: _Heads, g: _Geometry) -> Array:
    """Return the products of a block [block, G], in units of their heads' scales."""
    fields = _fields(words, g.bits)
    if g.bits == 8:
        found = 2 * dots(fields, heads.queries, _nothing(g)) + _repeated(heads.starts, g)
    else:
        found = dots(fields, heads.queries, heads.starts)
    return found.astype(jnp.float32) * _over_heads(from_e5m3(codes), found.shape)


def _fields(words: Array, bits: int) -> list[Array]:
    """Extract levels into the upper bits of bytes, in their order within a byte."""
    mask = jnp.uint32(((2**bits - 1) << (8 - bits)) * 0x01010101)
    shifts = range(8 - bits, -1, -bits)
    return [(words << jnp.uint32(shift) if shift else words) & mask for shift in shifts]


def _worth(products: Array, heads: _Heads) -> Array:
    """Return the scores [block] of a block's products [block, G]."""
    if heads.lse is None:
        return (products * _over_tokens(heads.units / LOG2_E, products.shape)).sum(axis=1)
    logs = products * _over_tokens(heads.units, products.shape) - _over_tokens(heads.lse, products.shape)
    highest = logs.max(axis=1)
    return (highest + jnp.log2(jnp.exp2(logs - _over_heads(highest, logs.shape)).sum(axis=1))) / LOG2_E


def _add(sums: tuple[Array, ...], products: Array, units: Array) -> tuple[Array, ...]:
    """Add a block [block, G] to each thread's highest product and sum of 2^(score - highest), [128, G]."""
    m, l = sums
    pieces = [products[i : i + THREADS] for i in range(0, products.shape[0], THREADS)]
    highest = functools.reduce(jnp.maximum, pieces, m)
    unit = _over_tokens(units, m.shape)
    base = highest * unit
    # `base` is rounded but fused products are not. Without this the difference would accumulate in `l`.
    before = jnp.where(m == highest, l, l * jnp.exp2(m * unit - base))
    return highest, functools.reduce(lambda sum_, piece: sum_ + jnp.exp2(piece * unit - base), pieces, before)


def _over_threads(sums: tuple[Array, ...], units: Array) -> Array:
    """Merge the results of `_add` over all threads into a base-2 log-sum-exp [G]."""
    m, l = sums
    scores = m * _over_tokens(units, m.shape)
    highest = scores.max(axis=0)
    l = (l * jnp.exp2(scores - _over_tokens(highest, m.shape))).sum(axis=0)
    return jnp.where(l == 0, -jnp.inf, highest + jnp.log2(l))


def _nothing(g: _Geometry) -> Array:
    return plgpu.layout_cast(jnp.zeros((THREADS, g.G), jnp.int32), HEADS)


def _repeated(x: Array, g: _Geometry) -> Array:
    """Repeat each thread's values [128, G] for all its tokens of a block."""
    return jnp.concatenate([x] * (g.block // THREADS))


def _over_tokens(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast one value per head to all tokens."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), HEADS)


def _over_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast one value per token to all heads."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), HEADS)
