"""Attention of one new token per sequence to quantized keys and values (ours).

    grid: (parts of all passes, B·K), heads run fastest; one warpgroup per CTA
    first:              queries → integers in shared memory; TMA list of slots → lists_ready
    stream of blocks:   TMA levels, scales → ready[slot]   (`stages` steps in flight)
    list of slots:      loads from global memory into registers

    each step of 128 keys, each warp with 32 of them (`warp_attention`):
        | Sᵀ = q Kᵀ     | levels unpacked to bytes in registers |
        | softmax       | in the warp                           |
        | Oᵀ += Vᵀ Wᵀ   | levels unpacked to bytes in registers |

    then merge the warps, and write the partial output and log-sum-exp; `decode.merge` merges the parts
    in launches of several passes, a part without keys writes only its log-sum-exp

A pass reads one set of keys, for example the near or the far tokens. The passes of a launch have their own
parts, each with its own CTA.

Per token and KV head the kernel reads C·bits/8 + 1 bytes of each plane. It computes 4 G (C + Z) integer
operations, since queries and weights have two bytes. Scales of keys multiply scores, those of values weights.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import NEVER, divide
from kernels_pallas.decode.merge import Parts
from kernels_pallas.lowering import lower_once
from kernels_pallas.quantized import warp_outputs, warp_queries
from kernels_pallas.quantized.inputs import (
    BLOCK,
    CodedPass,
    check_coded,
    config_for,
)
from kernels_pallas.quantized.key_blocks import (
    ALIGNED,
    Buffers,
    Chosen,
    Geometry,
    Operands,
    Ring,
    Span,
    Stream,
    unit_shape,
    view_units,
)
from kernels_pallas.quantized.queries import arrange_gains, arrange_queries
from kernels_pallas.quantized.warp_layout import ROWS, WARPS, Form
from kernels_pallas.registers import Registers, inline


@lower_once("scale")
def coded_parts(passes: Sequence[CodedPass], *, scale: float) -> list[Parts]:
    """Compute attention of each sequence's last token over the keys of each pass, in one launch.

    Args:
      passes: passes of the same sequences and KV heads. Whole stores should come before lists and rings:
        these are shorter and fill multiprocessors at the end, and the compiler was seen to need fewer
        registers.
      scale: factor on the scores, 1/√H of the original head dimension.

    Returns:
      Partial outputs of each pass, and the natural log-sum-exps of the scaled scores; `merged` merges them.
      An empty range of slots has only -inf. A token whose scale is NaN makes both NaN.

    Raises:
      ValueError: a shape, dtype or number of bits is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    shapes = {each.sizes[:2] for each in passes}
    if len(shapes) != 1:
        raise ValueError(f"passes have sequences and KV heads {sorted(shapes)}: must be the same")
    for each in passes:
        check_coded(each)
    prepared, (B, K, _) = [_prepare(each, scale) for each in passes], passes[0].sizes
    geometries = [g for g, _ in prepared]
    sizes = [
        (B, K, g.parts, *each)
        for g in geometries
        for each in ((g.form.columns, g.form.widths[-1]), (g.form.columns,))
    ]
    found = plgpu.kernel(
        functools.partial(_kernel, passes=geometries),
        out_type=[jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes],
        # CTAs of all heads follow each other. So those of the last pass come last.
        grid=(sum(g.parts for g in geometries), B * K),
        grid_names=("part", "head"),
        kernel_name="zdc_coded_decode",
        # The kernel places its own barriers between writes and reads of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*(operands for _, operands in prepared))
    return [Parts(o, lse) for o, lse in zip(found[::2], found[1::2], strict=True)]


def _prepare(coded_pass: CodedPass, scale: float) -> tuple[Geometry, Operands]:
    """Return the static shape of a pass, and its operands as the kernel reads them."""
    (_, K, S), planes, q, gains = coded_pass.sizes, coded_pass.planes, coded_pass.q, coded_pass.gains
    begin, end, slots, block_table = (
        coded_pass.begin,
        coded_pass.end,
        coded_pass.slots,
        coded_pass.block_table,
    )
    config, page = coded_pass.config or config_for(coded_pass), planes[0].reach.shape[2]
    if q.ndim == 3:
        q = arrange_queries(q, K)
    if gains is not None and gains.ndim == 3:
        gains = arrange_gains(gains, K)
    lists = []
    if slots is not None:
        if gains is not None:
            lists = [_in_blocks(jnp.clip(slots // BLOCK, 0, gains.shape[2] - 1), 0)]
        if block_table is not None:
            slots, begin, end = _in_pool(slots, begin, end, block_table, planes[0].reach.shape)
            S = planes[0].reach.size
            planes = jax.tree.map(lambda x: x.reshape(1, 1, S, *x.shape[3:]), planes)
        # Slot S is out of range, so padding is ignored.
        lists = [_in_blocks(slots, S), *lists]
    widths, bits = zip(*((plane.width, plane.bits) for plane in planes), strict=True)
    g = Geometry(
        K=K,
        S=S,
        page=0 if block_table is None else page,
        chosen=lists[0].shape[2] * BLOCK if lists else 0,
        ring=coded_pass.ring,
        gains=gains is not None,
        parts=config.splits,
        least=config.least,
        stages=config.stages,
        form=Form(q.shape[2], widths, bits, scale),
    )
    return g, Operands(
        begin=begin.astype(jnp.int32),
        end=end.astype(jnp.int32),
        q=q,
        levels=[x.levels if g.chosen or g.ring else view_units(x.levels, g.unit) for x in planes],
        reach=[plane.reach for plane in planes],
        lists=lists,
        table=None if g.chosen else block_table,
        gains=None if gains is None else gains.reshape(*gains.shape[:2], -1),
    )


def _in_blocks(entries: Array, fill: int) -> Array:
    """Divide the entries of lists [B, K, n] into blocks, int32 [B, K, ⌈n/64⌉, 64], padded with `fill`."""
    B, K, n = entries.shape
    padded = jnp.pad(entries, ((0, 0), (0, 0), (0, -n % BLOCK)), constant_values=fill)
    return padded.astype(jnp.int32).reshape(B, K, -1, BLOCK)


def _in_pool(
    slots: Array, begin: Array, end: Array, block_table: Array, pool: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Convert a list of slots to slots of a pool [P, K, page size] that is treated as one sequence.

    Slots out of range become -1, because their page may have any value.

    Returns:
      The slots, and begin and end of the pool.
    """
    P, K, page = pool
    S, of_row = block_table.shape[1] * page, lambda x: x[:, None, None]
    slots = slots.astype(jnp.int32)
    counts = (slots >= jnp.maximum(of_row(begin), 0)) & (slots < jnp.minimum(of_row(end), S))
    inside = jnp.where(counts, slots, 0)
    entry = jnp.take_along_axis(block_table[:, None], inside // page, axis=2, mode="promise_in_bounds")
    found = (entry * K + jnp.arange(K, dtype=jnp.int32)[:, None]) * page + inside % page
    last = jnp.where(begin < end, P * K * page, 0)
    return jnp.where(counts, found, -1), jnp.zeros_like(last), last


def _kernel(*refs: Any, passes: Sequence[Geometry]) -> None:
    """Run one CTA: a part of one pass. The operands of all passes come first, then two outputs of each."""
    inputs, outputs = refs[: len(passes)], refs[len(passes) :]
    each = zip(inputs, outputs[::2], outputs[1::2], passes, strict=True)
    # A condition in a launch of a single pass over pages would take 157 instead of 128 registers.
    run = functools.partial(_run, skips=len(passes) > 1)
    runs = [(g.parts, functools.partial(run, operands, pair, g)) for operands, *pair, g in each]
    _run_one(runs, lax.axis_index("part"))


def _run_one(runs: Sequence[tuple[int, Callable[[Array], None]]], part: Array) -> None:
    """Run the pass that a part belongs to.

    With both branches of one condition, the compiler needs fewer registers than with two conditions.
    """
    (parts, run), *others = runs
    if others:
        lax.cond(part < parts, lambda: run(part), lambda: _run_one(others, part - parts))
    else:
        run(part)


def _run(refs: Operands, outputs: Sequence[Any], g: Geometry, part: Array, *, skips: bool) -> None:
    """Run a part of a pass in buffers that other passes do not need; `skips` leaves out empty parts."""
    streams, whole = not g.chosen, not g.chosen and not g.ring
    copies = g.units * (len(g.sizes) + whole * (len(g.sizes) + g.gains))
    pl.run_scoped(
        functools.partial(_part, refs, outputs, g, part, skips),
        Buffers(
            levels=[
                plgpu.SMEM((g.stages, g.units, *((BLOCK, P) if g.ring else unit_shape(P, g.unit))), jnp.uint8)
                for P in g.sizes
            ]
            * streams,
            reach=[plgpu.SMEM((g.stages, g.units, ALIGNED), jnp.uint8) for _ in g.sizes] * whole,
            lists=[plgpu.SMEM((g.chosen // BLOCK, BLOCK), jnp.int32)] * g.lists,
            gains=[plgpu.SMEM((g.stages, g.units, ALIGNED // 4), jnp.float32)] * (g.gains and whole),
            q=plgpu.SMEM((g.form.query_rows, 32, 4), jnp.int32),
            sums=plgpu.SMEM((2, WARPS, ROWS * g.form.tiles), jnp.float32),
            outputs=plgpu.SMEM((WARPS, g.form.columns, g.form.widths[-1]), jnp.float32),
            lists_ready=plgpu.Barrier(num_arrivals=max(g.lists, 1)),
            ready=plgpu.Barrier(num_barriers=g.stages, num_arrivals=copies),
        ),
    )


def _part(refs: Operands, outputs: Sequence[Any], g: Geometry, part: Array, skips: bool, at: Buffers) -> None:
    """Compute a part: its share of the blocks of one KV head of one sequence."""
    (b, kv), (o_ref, lse_ref) = _find_head(g), outputs

    def inside(slot):
        return slot if g.ring else jnp.clip(slot, 0, g.S)

    span = Span.of(g, inside(refs.begin[b]), inside(refs.end[b]), part)

    o, lse = o_ref.at[b, kv, part], lse_ref.at[b, kv, part]

    def attend() -> None:
        _attend(refs, [o, lse], g, at, span)

    def leave_out() -> None:
        inline(functools.partial(_leave_out, g.form), [lse], [], [], [])

    if skips:  # Most rows of a large batch may be idle.
        lax.cond(span.first < span.last, attend, leave_out)
    else:
        attend()


def _leave_out(form: Form, pointers: list[Any], *_: Any) -> list[Registers]:
    warp_outputs.leave_out(form, *pointers)
    return []


def _attend(refs: Operands, outputs: list[Any], g: Geometry, at: Buffers, span: Span) -> None:
    """Compute the output of a part with keys, and its log-sum-exp."""
    (b, kv), form = _find_head(g), g.form
    where = (0, 0) if g.chosen and g.page else (b, kv)  # A list in pages indexes the whole pool.
    gains = refs.gains.at[b, kv] if g.gains else None
    kind = Chosen if g.chosen else Ring if g.ring else Stream
    source = kind(g, at, span, refs, where, gains)
    for entries, buffer in zip(refs.lists, at.lists, strict=True):
        plgpu.copy_gmem_to_smem(entries.at[b, kv], buffer, at.lists_ready)
    source.begin()

    def prepare(pointers: list[Any], *_: Any) -> list[Registers]:
        return warp_queries.prepare_queries(form, *pointers)

    queries = inline(prepare, [refs.q.at[b, kv], at.q], [], [], form.query_sizes)
    if g.lists:
        plgpu.barrier_wait(at.lists_ready)

    def body(step: Array, carry: list[Array]) -> list[Array]:
        place = source.place(step)
        carry = source.add(step, queries, carry)
        source.ahead(step, place)
        return carry

    def start(*_: Any) -> list[Registers]:
        return [[x] * size for x, size in zip((0.0, NEVER, 0.0, 0.0), form.carry_sizes, strict=True)]

    carry = inline(start, [], [], [], [(size, jnp.float32) for size in form.carry_sizes])
    carry = lax.fori_loop(0, span.steps, body, carry)

    def finish(pointers: list[Any], _: Any, arrays: list[Registers]) -> list[Registers]:
        o, lse, sums, merged = pointers
        warp_outputs.finish(form, o, lse, sums, merged, arrays)
        return []

    inline(finish, [*outputs, at.sums, at.outputs], [], carry, [])


def _find_head(g: Geometry) -> tuple[Array, Array]:
    """Return the sequence and the KV head of a CTA."""
    return divide(lax.axis_index("head"), g.K)
