"""Scores of all tokens by the index of a coded cache, in integers (ours).

A thread scores whole tokens: it takes the words of one from shared memory, 16 bytes at a time, and four
coordinates of a query head in an instruction (dp4a: four products of bytes, and their sum). Queries are made
integers of eight bits, with a step for each head.

Where a KV head has several query heads, a token is worth the probability that they give it together. Each
head's own denominator is needed first, so the index is read twice: of 17 bytes a token that is less than to
write and read scores of every head from three heads on, of 33 bytes from five.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.coded_inputs import MOST_HEADS, Plane, check_plane
from kernels_pallas.common import LOG2_E, NEVER, SHARED_MEMORY, Shaped, filled
from kernels_pallas.unpack import reaches

THREADS = 128
"""Of a CTA."""
BLOCKS = (128, 256)
"""Tokens a step: a copy takes at most 256, a thread has one or two."""
MOST_COORDINATES = 128
"""Of the index: a thread holds all words of its tokens in registers."""
MOST_IN_FLIGHT = SHARED_MEMORY - 8 * 1024
"""Bytes; queries, barriers and sums over threads need the rest."""
COPIED = 32
"""Words that a copy to shared memory must be a multiple of."""
LARGEST = 127
"""Magnitude of a coordinate of a query made integer."""

_WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 4), (32, 4))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""[tokens, words]: a thread holds whole tokens, in vectors of 16 bytes."""
_HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 1), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""[tokens, heads]: a thread holds all heads of its tokens."""
_TOKENS, _EACH_HEAD = _HEADS.reduce(1), _HEADS.reduce(0)


@dataclass(frozen=True)
class ScanConfig:
    """block: tokens a step, 128 or 256. stages: blocks in flight. splits: parts of a row's tokens."""

    block: int = 256
    stages: int = 4
    splits: int = 4

    def __post_init__(self) -> None:
        for name in ("stages", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block}: must be one of {BLOCKS}")


def default_scan_config(rows: int, S: int, token_bytes: int) -> ScanConfig:
    """Parts of B·K = `rows` caches for eight CTAs on each of 132 multiprocessors, of 1024 tokens or more; a
    fourth of a multiprocessor's shared memory."""
    block = math.gcd(S, max(BLOCKS))
    return ScanConfig(
        block=block,
        stages=max(2, min(4, SHARED_MEMORY // 4 // (block * token_bytes))),
        splits=max(1, min(8 * 132 // rows, S // 1024)),
    )


def index_scores(
    q: Float[Array, "B N C"],
    index: Plane,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    scale: float,
    config: ScanConfig | None = None,
) -> tuple[Float[Array, "B K S"], Float[Array, "B N"]]:
    """What each token is worth to each KV head, by the index alone; slots begin ≤ j < end alone are read.

    Args:
      q: bfloat16, the coordinates that the index has. Each head is rounded to 255 even levels.
      index: levels of 2, 4 or 8 bits that take a multiple of 16 bytes a token; C at most 128, S a multiple
        of 128.
      begin, end: of each row; slots below 0 and from S on count for nothing.
      scale: factor on the scores, 1/√H of the original head dim.
      config: how tokens are cut; None takes the default.

    Returns:
      scores in float32, -inf at slots that do not count. With one query head a KV head: scale · q · k. With
      G: log Σ exp(scale · q · k - lse) over them, the logarithm of the sum of their probabilities.
      lse: the natural log-sum-exp of a head's scaled scores, float32; -inf of a row of no slots.
      A token whose reach says that it is no number makes the lse of its KV head's queries so, and its own
      score; where G > 1, all of the KV head's scores.

    Raises:
      ValueError: a shape, dtype or number of bits not allowed, named with its value, before launch.
      NotImplementedError: on a GPU not of compute capability 9.0.
    """
    check_scan(q, index, begin, end, config=config)
    if config is None:
        B, K, S = index.reach.shape
        config = default_scan_config(B * K, S, index.levels.shape[-1] + 1)
    return _launch(
        q, index.levels, index.reach, begin, end, bits=index.bits, scale=float(scale), config=config
    )


def check_scan(q: Shaped, index: Plane, begin: Shaped, end: Shaped, *, config: ScanConfig | None) -> None:
    """Raises what `index_scores` says it raises; arrays and options are those given to it."""
    common.check_device()
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q has dtype {q.dtype}: must be bfloat16")
    if index.reach.ndim != 3:
        raise ValueError(f"index.reach has shape {index.reach.shape}: must be [B, K, S]")
    B, K, S = index.reach.shape
    check_plane("index", index, (B, K, S))
    if index.width > MOST_COORDINATES:
        raise ValueError(f"index has {index.width} coordinates: must be at most {MOST_COORDINATES}")
    common.check_shape("q", q, (B, None, index.width), "B, N, C")
    common.check_groups(q.shape[1], K)
    if q.shape[1] // K > MOST_HEADS:
        raise ValueError(f"q has {q.shape[1] // K} heads a KV head: must be at most {MOST_HEADS}")
    if S % (step := config.block if config else THREADS):
        raise ValueError(f"S={S} slots: must be a multiple of {step}")
    if config and (used := config.stages * config.block * (index.levels.shape[-1] + 1)) > MOST_IN_FLIGHT:
        raise ValueError(
            f"stages={config.stages} of block={config.block} tokens take {used} bytes of shared memory: "
            f"must be at most {MOST_IN_FLIGHT}"
        )
    for name, x in (("begin", begin), ("end", end)):
        common.check_shape(name, x, (B,), "B")


class _Geometry(NamedTuple):
    """Static shape of a launch. words: 32 bits each, of a token. writes: scores; sums: log-sum-exp."""

    K: int
    G: int
    S: int
    words: int
    bits: int
    block: int
    stages: int
    parts: int
    writes: bool
    sums: bool


@functools.partial(jax.jit, static_argnames=("bits", "scale", "config"))
def _launch(
    q: Array,
    levels: Array,
    reach: Array,
    begin: Array,
    end: Array,
    *,
    bits: int,
    scale: float,
    config: ScanConfig,
) -> tuple[Array, Array]:
    """`index_scores`, checked."""
    (B, N, C), (_, K, S) = q.shape, reach.shape
    cut = config.block, config.stages, config.splits
    g = _Geometry(K, N // K, S, C * bits // 32, bits, *cut, writes=N == K, sums=True)
    # Blocks outside would be written outside the scores.
    span = jnp.clip(jnp.stack([begin, end], 1), 0, S).astype(jnp.int32)
    heads, tokens = _integers(q, g, scale), (_words(levels), reach)
    if g.writes:
        scores, sums = _scan(g, span, heads, tokens)
        lse = _merged(sums)
    else:
        lse = _merged(*_scan(g, span, heads, tokens))
        g = g._replace(writes=True, sums=False)
        (scores,) = _scan(g, span, [*heads, lse * LOG2_E], tokens)
    return scores, lse[..., : g.G].reshape(B, N)


def _scan(g: _Geometry, span: Array, heads: Sequence[Array], tokens: Sequence[Array]) -> list[Array]:
    """One reading of the index: scores [B, K, S], or base-2 log-sum-exp [B, K, parts, max(G, 2)], or both."""
    B = span.shape[0]
    scores = jax.ShapeDtypeStruct((B, g.K, g.S), jnp.float32)
    sums = jax.ShapeDtypeStruct((B, g.K, g.parts, max(g.G, 2)), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, g=g),
        out_type=[scores] * g.writes + [sums] * g.sums,
        grid=(B * g.K, g.parts),
        grid_names=("head", "part"),
        kernel_name="zdc_coded_scan",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(span, *heads, *tokens)


def _words(levels: Array) -> Array:
    """Bytes [..., P] as words [..., P/4], little end first: the same memory."""
    return lax.bitcast_convert_type(levels.reshape(*levels.shape[:-1], -1, 4), jnp.uint32)


def _integers(q: Array, g: _Geometry, scale: float) -> list[Array]:
    """What the kernel takes of the query heads.

    Integers [B, K, rows, 32], C/4 of each head, four coordinates a word in `_dots`' order; what their
    products begin with, int32 [B, K, G]; the unit of products, which makes base-2 scores of them, float32
    [B, K, G].
    """
    whole, step = _rounded(q.reshape(q.shape[0], g.K, g.G, -1))
    each = 8 // g.bits
    # Coordinate of a token: vector of four words, word, byte, place in the byte.
    bytes_ = whole.reshape(*whole.shape[:-1], -1, 4, 4, each)
    words = lax.bitcast_convert_type(jnp.moveaxis(bytes_, -1, -3), jnp.int32).reshape(*whole.shape[:-1], -1)
    words = words.reshape(*words.shape[:2], -1)
    words = jnp.pad(words, ((0, 0), (0, 0), (0, -words.shape[-1] % COPIED)))
    words = words.reshape(*words.shape[:2], -1, COPIED)
    total = whole.astype(jnp.int32).sum(-1)
    # A level n stands for 2n + 1 - 2^bits; `_fields` has n · 2^(8 - bits). Products are 2^(7 - bits) times
    # those of what levels stand for; those of eight bits are doubled.
    starts = -((2**g.bits - 1) << max(7 - g.bits, 0)) * total
    return [words, starts, step * (scale * LOG2_E / 2 ** max(7, g.bits))]


def _rounded(q: Array) -> tuple[Array, Array]:
    """int8 [..., C], and their step in float32 [...]: what is no number is left to the step."""
    x = q.astype(jnp.float32)
    largest = jnp.abs(x).max(-1)
    whole = jnp.round(x * LARGEST / jnp.where(largest > 0, largest, 1.0)[..., None])
    return jnp.nan_to_num(whole).astype(jnp.int8), largest / LARGEST


def _merged(sums: Array) -> Array:
    """Base-2 log-sum-exp [B, K, P, G] of parts as one, natural."""
    highest = jnp.maximum(sums.max(2), NEVER)
    return (highest + jnp.log2(jnp.exp2(sums - highest[:, :, None]).sum(2))) / LOG2_E


def _kernel(*refs: Any, g: _Geometry) -> None:
    tile = math.gcd(32, g.words)
    # Rows of 16 bytes, or of an odd number of them, meet no bank twice; others are swizzled.
    shape = (g.stages, g.block, g.words)
    levels = plgpu.SMEM(shape, jnp.uint32) if tile < 8 else common.tiled(*shape, dtype=jnp.uint32, width=tile)
    pl.run_scoped(
        functools.partial(_part, refs, g),
        _Buffers(
            queries=plgpu.SMEM(refs[1].shape[-2:], jnp.int32),
            levels=levels,
            reach=plgpu.SMEM((g.stages, g.block), jnp.uint8),
            queries_ready=plgpu.Barrier(),
            ready=plgpu.Barrier(num_barriers=g.stages, num_arrivals=2),
        ),
    )


class _Buffers(NamedTuple):
    """Shared memory of a CTA."""

    queries: Any
    levels: Any
    reach: Any
    queries_ready: Any
    ready: Any


class _Heads(NamedTuple):
    """Of the query heads of a KV head: queries in shared memory, the others [G] in registers."""

    queries: Any
    starts: Array
    units: Array
    lse: Array | None


def _part(refs: Any, g: _Geometry, at: _Buffers) -> None:
    """One CTA: its share of the blocks of one KV head of one row."""
    count = 4 if g.sums else 5
    (span_ref, queries_ref, *per_head), (words_ref, reach_ref, *out) = refs[:count], refs[count:]
    head, part = lax.axis_index("head"), lax.axis_index("part")
    b, kv = lax.div(head, jnp.int32(g.K)), lax.rem(head, jnp.int32(g.K))
    span = _Span.of(span_ref[b, 0], span_ref[b, 1], part, g)
    plgpu.copy_gmem_to_smem(queries_ref.at[b, kv], at.queries, at.queries_ready)

    def load(step: Array) -> None:
        slot = lax.rem(step - span.first, jnp.int32(g.stages))
        plgpu.copy_gmem_to_smem(words_ref.at[b, kv, _rows(step, g)], at.levels.at[slot], at.ready.at[slot])
        plgpu.copy_gmem_to_smem(reach_ref.at[b, kv, _rows(step, g)], at.reach.at[slot], at.ready.at[slot])

    @pl.loop(span.first, jnp.minimum(span.first + g.stages, span.last))
    def _fill(step: Array) -> None:
        load(step)

    if g.writes:
        _write_outside(out[0].at[b, kv], span, part, g)
    starts, units, *given = (plgpu.load(x.at[b, kv], layout=_EACH_HEAD, optimized=False) for x in per_head)
    plgpu.barrier_wait(at.queries_ready)
    heads = _Heads(at.queries, starts, units, given[0] if given else None)

    def body(step: Array, carry: Any) -> Any:
        slot = lax.rem(step - span.first, jnp.int32(g.stages))
        plgpu.barrier_wait(at.ready.at[slot])
        scores = _scores(at.levels.at[slot], at.reach.at[slot], heads, g)
        if g.writes:
            worth = span.only(_worth(scores, heads.lse), step, _TOKENS)
            out[0].at[b, kv, _rows(step, g)][...] = worth

        @pl.when(step + g.stages < span.last)
        def _() -> None:
            load(step + g.stages)

        if not g.sums:
            return carry
        m, l = carry
        return _add(m, l, span.only(scores, step, _HEADS))

    start = [filled((THREADS, g.G), value, _HEADS) for value in (NEVER, 0)] if g.sums else []
    carry = lax.fori_loop(span.first, span.last, body, tuple(start))
    if g.sums:
        m, l = carry
        highest = m.max(axis=0)
        l = (l * jnp.exp2(m - _over_tokens(highest, m.shape))).sum(axis=0)
        lse = jnp.where(l == 0, -jnp.inf, highest + jnp.log2(l))
        # One number of one head alone cannot be stored.
        out[-1].at[b, kv, part][...] = jnp.concatenate([lse, lse]) if g.G == 1 else lse


class _Span(NamedTuple):
    """Blocks first ≤ i < last of a part, of the `blocks` from `low` on that hold slots begin ≤ j < end."""

    first: Array
    last: Array
    low: Array
    blocks: Array
    begin: Array
    end: Array

    @classmethod
    def of(cls, begin: Array, end: Array, part: Array, g: _Geometry) -> "_Span":
        """Equal shares of the blocks that hold any."""
        low = lax.div(begin, jnp.int32(g.block))
        count = jnp.where(end > begin, lax.div(end + (g.block - 1), jnp.int32(g.block)) - low, 0)
        first, last = _share(count, part, g)
        return cls(low + first, low + last, low, count, begin, end)

    def only(self, x: Array, step: Array, layout: Any) -> Array:
        """Numbers of a block's tokens, and -inf at those that do not count."""
        j = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + step * x.shape[0]
        return jnp.where((j >= self.begin) & (j < self.end), x, -jnp.inf)


def _share(count: Array, part: Array, g: _Geometry) -> tuple[Array, Array]:
    """The part's of `count` things."""
    each = lax.div(count + (g.parts - 1), jnp.int32(g.parts))
    first = jnp.minimum(part * each, count)
    return first, jnp.minimum(first + each, count)


def _rows(step: Array, g: _Geometry) -> Any:
    return pl.ds(pl.multiple_of(step * g.block, g.block), g.block)


def _write_outside(scores: Any, span: _Span, part: Array, g: _Geometry) -> None:
    """-inf to the part's share of the blocks that hold no slot that counts."""

    @pl.loop(*_share(g.S // g.block - span.blocks, part, g))
    def _(i: Array) -> None:
        step = jnp.where(i < span.low, i, i + span.blocks)
        scores.at[_rows(step, g)][...] = filled((g.block,), -jnp.inf, _TOKENS)


def _scores(levels: Any, reach: Any, heads: _Heads, g: _Geometry) -> Array:
    """Base-2 scores of a block [block, G]."""
    words = plgpu.load(levels, layout=_WORDS, optimized=False)
    dots = _dots(_fields(words, g.bits), heads.queries, heads.starts, g.bits).astype(jnp.float32)
    sizes = reaches(plgpu.load(reach, layout=_TOKENS, optimized=False))
    return dots * _over_tokens(heads.units, dots.shape) * _over_heads(sizes, dots.shape)


def _fields(words: Array, bits: int) -> list[Array]:
    """Levels in the upper bits of bytes, those first in their byte first."""
    mask = jnp.uint32(((2**bits - 1) << (8 - bits)) * 0x01010101)
    shifts = range(8 - bits, -1, -bits)
    return [(words << jnp.uint32(shift) if shift else words) & mask for shift in shifts]


def _dots(fields: Sequence[Array], queries: Any, starts: Array, bits: int) -> Array:
    """Products int32 [M, G] of bytes uint32 [M, W], F times, with W·F integers a head in shared memory."""
    (M, W), F, (G,) = fields[0].shape, len(fields), starts.shape

    @plgpu.inline_mgpu(
        arg_types=([_WORDS] * F, plgpu.RefType(), _EACH_HEAD),
        return_type=plgpu.ShapeDtypeStruct((M, G), jnp.int32, layout=_HEADS),
    )
    def dots(_: Any, fields: Any, queries: Any, starts: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        four, one = (ir.VectorType.get((n,), i32) for n in (4, 1))
        pointer, zero = mgpu.utils.memref_ptr(queries), mgpu.utils.c(0, i32)
        registers = np.empty((M // THREADS, G, 1, 1, 1, 1), dtype=object)
        for g in range(G):
            start = llvm.extractelement(starts.registers.reshape(-1)[g], zero)
            found = [zero if bits == 8 else start] * (M // THREADS)
            for vector, field in np.ndindex(W // 4, F):
                begin = mgpu.utils.c(g * W * F + (vector * F + field) * 4, i32)
                taken = llvm.load(four, mgpu.utils.getelementptr(pointer, [begin], i32))
                for i, e in np.ndindex(M // THREADS, 4):
                    word = fields[field].registers[i, vector, 0, 0, 0, 0]
                    own, other = (llvm.extractelement(x, mgpu.utils.c(e, i32)) for x in (word, taken))
                    found[i] = _dp4a(own, other, found[i])
            for i, value in enumerate(found):
                result = arith.addi(arith.addi(value, value), start) if bits == 8 else value
                registers[i, g, 0, 0, 0, 0] = mgpu.utils.bitcast(result, one)
        return mgpu.FragmentedArray(_registers=registers, _layout=_HEADS.to_mgpu(), _is_signed=True)

    return dots(list(fields), queries, starts)


def _dp4a(levels: Any, queries: Any, so_far: Any) -> Any:
    """Plus the four products of unsigned bytes with signed ones."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [levels, queries, so_far], "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r")


def _worth(scores: Array, lse: Array | None) -> Array:
    """What is returned of a block's base-2 scores [block, G]: [block]."""
    if lse is None:
        return scores.sum(axis=1) / LOG2_E
    logs = scores - _over_tokens(lse, scores.shape)
    highest = logs.max(axis=1)
    return (highest + jnp.log2(jnp.exp2(logs - _over_heads(highest, logs.shape)).sum(axis=1))) / LOG2_E


def _add(m: Array, l: Array, scores: Array) -> tuple[Array, Array]:
    """Maxima and sums of each thread [128, G], with base-2 scores [block, G] more."""
    pieces = [scores[i : i + THREADS] for i in range(0, scores.shape[0], THREADS)]
    highest = functools.reduce(jnp.maximum, pieces, m)
    return highest, functools.reduce(
        lambda total, piece: total + jnp.exp2(piece - highest), pieces, l * jnp.exp2(m - highest)
    )


def _over_tokens(x: Array, shape: tuple[int, ...]) -> Array:
    """A number of each head, for all tokens."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), _HEADS)


def _over_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """A number of each token, for all heads."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), _HEADS)
