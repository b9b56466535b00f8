"""Attention of one new token per sequence to the compressed cache: split-K, one softmax over prefix and ring.

    grid: (B·K, far parts + near parts); one warpgroup per CTA
    TMA: q → q_ready; blocks of prefix and ring → ready[slot]   (`stages` in flight)
    each block:  wait ready[slot] → S = Q Kᵀ → online softmax → O += P V → load the next block
    then write the partial output and log-sum-exp; `decode.merge` merges them
    a part without keys writes only its log-sum-exp

Per far token and KV head the kernel reads 2 (R + Z) bytes and computes 2 G (R + Z) FLOP; near tokens have H
coordinates instead. It is bound by memory bandwidth, so it maximizes bytes in flight: little shared memory
and several CTAs per multiprocessor. The G query heads of a KV head are rows of one tensor-core tile, so that
the cache is read once. Partial results merge by their log-sum-exp (Flash-Decoding, Dao et al., 2023).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import GAIN_BLOCK, LOG2_E, NEVER, check_scale, filled, scaled, tile_width, tiled
from kernels_pallas.decode.inputs import ROWS, DecodeConfig, Ring, check_decode, config_for
from kernels_pallas.decode.merge import Parts
from kernels_pallas.lowering import lower_once


@lower_once("scale", "sinks", "window", "config")
@common.checked_by(check_decode)
def decode_parts(
    q: Float[Array, "B N Hq"],
    k: Float[Array, "... K S R"],
    v: Float[Array, "... K S Z"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    ring: Ring | None = None,
    sinks: int = 0,
    window: int = 0,
    block_table: Int[Array, "B pages"] | None = None,
    block_scores: Float[Array, "B N blocks"] | None = None,
    config: DecodeConfig | None = None,
) -> Parts:
    """Compute attention of each sequence's last token, at position lengths - 1, over all its positions.

    Args:
      q: queries, bfloat16 or float16; Hq = H with `ring`, else R.
      k: first coordinates of the keys of all tokens, including the new one, [B, K, S, R]; slot = position.
        With `block_table`: [pages, K, page size, R]. R and Z are multiples of 16 up to 256. Slots after a
        sequence's length must be finite and are ignored. With `ring`, R = Z = 0 means that there are no far
        keys, and only the ring is read.
      v: first coordinates of the values, like `k` with Z.
      lengths: tokens of each sequence; length 0 has no visible keys. Lengths are capped at the slots of far
        keys.
      scale: factor on the scores, above 0; 1/√H of the original head dimension.
      ring: trailing coordinates of near keys, {j < sinks} ∪ {t - window < j ≤ t}, which count with all
        coordinates.
      sinks: number of sinks, at most 64; only with `ring`.
      window: size of the recent window, a multiple of 64; only with `ring`.
      block_table: page of each `page size` positions; the page size is a multiple of 64.
      block_scores: what scaled scores gain in each block of 64 positions, float32, for every block with a
        visible key.
      config: how keys are divided; None uses the measured or default config.

    Returns:
      Partial outputs with Z coordinates, or H with `ring`, and the natural log-sum-exps of the scaled scores.
      `merged` merges them.

    Raises:
      ValueError: a rank, dtype, shape or option is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    check_scale(scale)
    B, N, H = q.shape
    (K, S, R), Z = k.shape[1:], v.shape[-1]
    HV = Z if ring is None else H
    pages = 1 if block_table is None else block_table.shape[1]
    if config is None:
        page, full = 0 if block_table is None else S, R if ring is None else H
        config = config_for(B * K, S * pages, R, Z, full, window=window, page=page)
        if block_scores is not None:
            config = replace(config, block=GAIN_BLOCK)
    far_parts, near_parts = config.splits if R else 0, 0 if ring is None else config.near_splits
    heads, pitch = _tile_heads(q, K, Z, HV - Z)
    g = _Geometry(
        K=K,
        groups=N // K,
        pitch=pitch,
        S=S,
        R=R,
        Z=Z,
        H=H,
        HV=HV,
        sinks=sinks,
        window=window,
        scale=scale,
        far_parts=far_parts,
        near_parts=near_parts,
        slots=S * pages,
    )
    cached = [x if x.shape[-1] else None for x in (k, v, *(ring or ()))]
    k, v, *tails = jax.tree.map(lambda x: common.pad_rows(x, 2), cached)
    ring_k, ring_v = tails or (None, None)
    if block_scores is not None:
        rows = _tile_heads(block_scores * LOG2_E, K, Z, HV - Z)[0].swapaxes(1, 2)
        block_scores = jnp.pad(rows, ((0, 0), (0, 0), (0, ROWS)))
    operands = _Operands(
        lengths=lengths.astype(jnp.int32),
        q=heads,
        k=k,
        v=v,
        ring_k=ring_k,
        ring_v=ring_v,
        table=block_table,
        gains=block_scores,
    )
    partial, lse = plgpu.kernel(
        functools.partial(_kernel, g=g, config=config),
        out_type=[
            jax.ShapeDtypeStruct((B, K, far_parts + near_parts, N // K, HV), jnp.float32),
            jax.ShapeDtypeStruct((B, K, far_parts + near_parts, ROWS), jnp.float32),
        ],
        grid=(B * K, far_parts + near_parts),
        grid_names=("head", "part"),
        kernel_name="zdc_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(operands)
    return Parts(partial, lse, pitch=pitch)


def _tile_heads(q: Array, K: int, *widths: int) -> tuple[Array, int]:
    """Arrange query heads as rows of tiles; return them and the rows per KV head.

    Result rows leave shared memory at multiples of 128 bytes. If rows of all `widths` float32 values have
    such a length, groups may begin at any row. Otherwise groups are padded to begin at every eighth row.
    """
    B, N, H = q.shape
    if all(width % 32 == 0 for width in widths):
        return common.pad_rows(q, 1), N // K
    groups = common.pad_rows(q.reshape(B, K, N // K, H), 2)
    return groups.reshape(B, -1, H), groups.shape[2]


class _Geometry(NamedTuple):
    """Static shape of a launch; S counts the slots of a sequence or page, `slots` those of a sequence."""

    K: int
    groups: int
    pitch: int
    S: int
    R: int
    Z: int
    H: int
    HV: int
    sinks: int
    window: int
    scale: float
    far_parts: int
    near_parts: int
    slots: int

    def widths(self, near: bool) -> tuple[list[int], list[int]]:
        """Return the widths of the arrays of q and k, and of v: prefix, then (for near keys) ring."""
        both = (self.R, self.H - self.R), (self.Z, self.HV - self.Z)
        qk, vo = ([width for width in pair[: 2 if near else 1] if width] for pair in both)
        return qk, vo


class _Step(NamedTuple):
    """One block of keys: block in the prefix, row in the ring, and visible positions low ≤ j < high."""

    block: Any
    ring_row: Any
    low: Any
    high: Any


def _steps(g: _Geometry, block: int, length: Array, near: bool) -> tuple[Array, Callable[[Array], _Step]]:
    """Return the number of a sequence's far or near steps, and a function that describes each."""

    def down(x):
        return lax.div(jnp.maximum(x, 0), jnp.int32(block))

    def up(x):
        return down(x + (block - 1))

    if g.R:  # A sequence has no more tokens than slots.
        length = jnp.minimum(length, g.slots)
    if not g.near_parts:
        return up(length), lambda step: _Step(step, None, 0, length)
    past = length - g.window
    if not near:
        skipped = g.sinks // block
        count = jnp.maximum(up(past) - skipped, 0)
        return count, lambda step: _Step(skipped + step, None, g.sinks, past)
    begin, sink_steps = down(past), 1 if g.sinks else 0

    def near_step(step: Array) -> _Step:
        index = begin + step - sink_steps
        ring_row = lax.rem(index, jnp.int32(g.window // block)) * block
        recent = _Step(index, ring_row, jnp.maximum(past, g.sinks), length)
        if not g.sinks:
            return recent
        sink = _Step(0, g.window, 0, jnp.minimum(g.sinks, length))
        return _Step(*(jnp.where(step == 0, x, y) for x, y in zip(sink, recent, strict=True)))

    return jnp.where(length > 0, up(length) - begin + sink_steps, 0), near_step


class _Operands(NamedTuple):
    """Arrays of a launch, or references to them in the kernel; absent ones are None.

    Attributes:
      lengths: tokens of each sequence.
      q: query heads, as rows of tiles.
      k: first coordinates of keys.
      v: first coordinates of values.
      ring_k: trailing coordinates of near keys.
      ring_v: trailing coordinates of near values.
      table: block table.
      gains: what base-2 scores gain, [B, blocks, query heads as in `q`].
    """

    lengths: Any
    q: Any
    k: Any
    v: Any
    ring_k: Any
    ring_v: Any
    table: Any
    gains: Any


class _Buffers(NamedTuple):
    """Shared memory of a CTA: q, k and v have one buffer per array that is read.

    Each block of keys has one barrier, `ready`.
    """

    q: list[Any]
    k: list[Any]
    v: list[Any]
    q_ready: Any
    ready: Any


def _kernel(refs: _Operands, o_ref: Any, lse_ref: Any, *, g: _Geometry, config: DecodeConfig) -> None:
    part = lax.axis_index("part")
    far, near = (_Part(g, config, refs, (o_ref, lse_ref), part, near=near) for near in (False, True))
    if not (g.far_parts and g.near_parts):
        (near if g.near_parts else far).run()
        return
    pl.when(part < g.far_parts)(far.run)
    pl.when(part >= g.far_parts)(near.run)


class _Part(NamedTuple):
    """One CTA's work: a part of the far or near keys of one KV head of one sequence."""

    g: _Geometry
    config: DecodeConfig
    refs: _Operands
    outputs: tuple[Any, Any]
    part: Array
    near: bool

    def run(self) -> None:
        """Compute the part; without keys, only its log-sum-exp is written."""
        total, step_at = _steps(self.g, self.config.block, self.refs.lengths[self._head()[0]], self.near)
        parts = self.g.near_parts if self.near else self.g.far_parts
        share = lax.div(total + (parts - 1), jnp.int32(parts))
        begin = jnp.minimum((self.part - self.g.far_parts if self.near else self.part) * share, total)
        end = jnp.minimum(begin + share, total)

        def leave_out() -> None:
            pl.run_scoped(self._store_nothing, plgpu.SMEM((ROWS,), jnp.float32))

        # Most rows of a large batch may be idle.
        lax.cond(begin < end, lambda: self._attend(begin, end, step_at), leave_out)

    def _attend(self, begin: Array, end: Array, step_at: Callable[[Array], _Step]) -> None:
        """Accumulate over the part's blocks, then write the weighted values and the log-sum-exp.

        The buffers of keys and of results share memory: the first are freed before the second are allocated.
        """
        g = self.g
        qk, vo = tile_width(g.R, g.H - g.R), tile_width(g.Z, g.HV - g.Z)
        buffer = functools.partial(tiled, dtype=self.refs.q.dtype)
        qk_widths, v_widths = g.widths(self.near)
        stages, block = self._stages(), self.config.block
        arrivals = len(qk_widths) + len(v_widths)
        accs, m, l = pl.run_scoped(
            functools.partial(self._accumulate, begin, end, step_at),
            _Buffers(
                q=[buffer(ROWS, width, width=qk) for width in qk_widths],
                k=[buffer(stages, block, width, width=qk) for width in qk_widths],
                v=[buffer(stages, block, width, width=vo) for width in v_widths],
                q_ready=plgpu.Barrier(num_arrivals=len(qk_widths)),
                ready=plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
            ),
        )
        _, out_widths = g.widths(near=True)
        pl.run_scoped(
            functools.partial(self._store, accs, m, l),
            [plgpu.SMEM((ROWS, width), jnp.float32) for width in out_widths],
            plgpu.SMEM((ROWS,), jnp.float32),
        )

    def _stages(self) -> int:
        """Return the blocks in flight; one for near keys if there are also far keys.

        Near blocks are few and wide, and would take memory from other CTAs.
        """
        return 1 if self.near and self.g.far_parts else self.config.stages

    def _head(self) -> tuple[Array, Array]:
        return common.divide(lax.axis_index("head"), self.g.K)

    def _accumulate(
        self, begin: Array, end: Array, step_at: Callable[[Array], _Step], smem: _Buffers
    ) -> tuple[Any, Array, Array]:
        g, config, refs, (b, kv) = self.g, self.config, self.refs, self._head()
        stages = self._stages()

        def slot_of(step):
            return lax.rem(step - begin, jnp.int32(stages))

        # Tiled copies begin at multiples of eight rows.
        q_rows = pl.ds(pl.multiple_of(self._first_row(kv), 8), ROWS)
        for buffer, column in zip(smem.q, _columns(g.R, g.H - g.R), strict=False):
            plgpu.copy_gmem_to_smem(refs.q.at[b, q_rows, column], buffer, smem.q_ready)

        def load(step: Array) -> None:
            what, slot = step_at(step), slot_of(step)

            def copy(rows, buffer):
                return plgpu.copy_gmem_to_smem(rows, buffer.at[slot], smem.ready.at[slot])

            if g.R:
                lead, rows = self._prefix_rows(what.block, b)
                copy(refs.k.at[lead, kv, rows], smem.k[0])
                copy(refs.v.at[lead, kv, rows], smem.v[0])
            if self.near:
                rows = pl.ds(pl.multiple_of(what.ring_row, 8), config.block)
                for source, buffers in ((refs.ring_k, smem.k), (refs.ring_v, smem.v)):
                    if source is not None:
                        copy(source.at[b, kv, rows], buffers[-1])

        @pl.loop(begin, jnp.minimum(begin + stages, end))
        def _fill(step: Array) -> None:
            load(step)

        plgpu.barrier_wait(smem.q_ready)

        def body(step: Array, carry: Any) -> Any:
            slot = slot_of(step)
            plgpu.barrier_wait(smem.ready.at[slot])
            carry = self._add_block(step_at(step), carry, smem, slot)

            @pl.when(step + stages < end)
            def _() -> None:
                load(step + stages)

            return carry

        per_row = plgpu.Layout.WGMMA.reduce(1)
        accs = tuple(filled((ROWS, v.shape[-1]), 0, plgpu.Layout.WGMMA) for v in smem.v)
        return lax.fori_loop(
            begin, end, body, (accs, filled((ROWS,), NEVER, per_row), filled((ROWS,), 0, per_row))
        )

    def _prefix_rows(self, key_block: Array, b: Array) -> tuple[Array, Any]:
        """Return leading index and rows of a block of keys, through the block table if there is one."""
        g, block = self.g, self.config.block
        if self.refs.table is None:
            return b, pl.ds(pl.multiple_of(key_block * block, 8), block)
        per_page = jnp.int32(g.S // block)
        page = self.refs.table[b, lax.div(key_block, per_page)]
        rows = pl.ds(pl.multiple_of(lax.rem(key_block, per_page) * block, 8), block)
        return page, rows

    def _add_block(self, what: _Step, carry: Any, smem: _Buffers, slot: Array) -> Any:
        """Add one block of keys to the online softmax."""
        accs, m, l = carry
        block, factor = self.config.block, self.g.scale * LOG2_E

        def product(scores: Any) -> Array:
            for q, k in zip(smem.q, smem.k, strict=True):
                plgpu.wgmma(scores, q, k.at[slot].transpose((1, 0)))
            return scores[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, block), jnp.float32))
        layout = plgpu.Layout.WGMMA
        j = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=layout) + what.block * block
        if self.refs.gains is not None:
            scores, factor = scores * factor + self._block_gains(what, scores.shape), 1.0
        scores = jnp.where((j >= what.low) & (j < what.high), scores, -jnp.inf)
        m_new = jnp.maximum(m, scores.max(axis=1) * factor)
        p = jnp.exp2(scores * factor - lax.broadcast_in_dim(m_new, scores.shape, [0]))
        alpha, p16 = jnp.exp2(m - m_new), p.astype(self.refs.q.dtype)

        def add(acc, v):
            return pl.run_state(lambda ref: plgpu.wgmma(ref, p16, v.at[slot]))(plgpu.ACC.init(acc))

        accs = tuple(add(scaled(acc, alpha), v) for acc, v in zip(accs, smem.v, strict=True))
        return accs, m_new, l * alpha + p.sum(axis=1)

    def _block_gains(self, what: _Step, shape: tuple[int, ...]) -> Array:
        """Return what base-2 scores of a block gain, one number per row."""
        (b, kv), last = self._head(), jnp.int32(self.refs.gains.shape[1] - 1)
        rows = pl.ds(pl.multiple_of(self._first_row(kv), 8), ROWS)
        source = self.refs.gains.at[b, jnp.minimum(what.block, last), rows]
        gains = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(gains, shape, [0])

    def _first_row(self, kv: Array) -> Array:
        """Return the first row of a KV head's tile of query heads, which may also contain other groups'."""
        return lax.div(kv * self.g.pitch, jnp.int32(8)) * 8

    def _store_nothing(self, lse: Any) -> None:
        b, kv = self._head()
        lse[...] = filled((ROWS,), -jnp.inf, plgpu.Layout.WGMMA.reduce(1))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse, self.outputs[1].at[b, kv, self.part])
        plgpu.wait_smem_to_gmem(0)

    def _store(self, accs: Any, m: Array, l: Array, outs: Any, lse: Any) -> None:
        g, (b, kv), (o_ref, lse_ref) = self.g, self._head(), self.outputs
        inverse = jnp.where(l > 0, 1.0 / l, 0.0)
        outputs = [scaled(acc, inverse) for acc in accs]
        if len(outs) > len(outputs):
            outputs.append(filled((ROWS, g.HV - g.Z), 0, plgpu.Layout.WGMMA))
        for out, value in zip(outs, outputs, strict=True):
            out[...] = value
        lse[...] = jnp.where(l > 0, m / LOG2_E + jnp.log(l), -jnp.inf)
        plgpu.commit_smem()
        heads = pl.ds(lax.rem(kv * g.pitch, jnp.int32(8)), g.groups)
        for out, column in zip(outs, _columns(g.Z, g.HV - g.Z), strict=True):
            plgpu.copy_smem_to_gmem(out.at[heads], o_ref.at[b, kv, self.part, pl.ds(0, g.groups), column])
        plgpu.copy_smem_to_gmem(lse, lse_ref.at[b, kv, self.part])
        plgpu.wait_smem_to_gmem(0)


def _columns(*widths: int) -> list[Any]:
    """Return consecutive slices of these widths, without empty ones."""
    begins = itertools.accumulate(widths, initial=0)
    return [pl.ds(begin, width) for begin, width in zip(begins, widths, strict=False) if width]
