"""Causal attention of many queries on truncated coordinates, two ranks under one softmax.

A few warpgroups hold 64 query rows each, one more streams blocks of keys through shared memory, and an online
softmax (`prefill_softmax`) keeps the running result in registers: the shape of FlashAttention-3 (Shah et al.,
2024). Ours are the two ranks. Scores use R coordinates and values Z. Keys near a query (sinks and a window of
recent ones) add their trailing H-R and H-Z coordinates to the same softmax. Unmasked far blocks, nearly all
of them, come first, so that their loop holds no register for the trailing part; the last few blocks pay.

With lists of blocks only the producer reads other rows: it looks up which block comes next. That queries need
not attend to all blocks of keys is from MInference (Jiang et al., 2024).
"""

import functools
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common, prefill_turns
from kernels_pallas.common import LOG2_E, check_scale, filled, scaled, tile_width, tiled
from kernels_pallas.prefill_inputs import (
    ROWS,
    BlockLists,
    Keys,
    PrefillConfig,
    Trailing,
    Widths,
    check_prefill,
    listed_config,
)
from kernels_pallas.prefill_softmax import State, empty, lanes, raised, weights
from kernels_pallas.tuning import measured

_L2_BYTES = 32 * 2**20
"""Keys and values of heads worked on together: they stay in the second-level cache."""
IN_TURNS = PrefillConfig(128, 2, 3, turns=80)
"""Faster than without turns at Z = 96, measured at R of 32, 48 and 64."""


def config_for(R: int, Z: int, H: int, HV: int, *, page: int = 0) -> PrefillConfig:
    """The measured config of these widths on this device, else the default.

    page: tokens of one, a multiple of 64, which blocks divide; 0 without pages. Blocks so cut take no turns.
    """
    found = measured("prefill", R=R, Z=Z, H=H, HV=HV)
    config = PrefillConfig(**found) if found else default_config(R, Z, H, HV)
    block = math.gcd(config.block_kv, page)
    return config if block == config.block_kv else replace(config, block_kv=block, turns=0)


def default_config(R: int, Z: int, H: int, HV: int) -> PrefillConfig:
    """The largest tile that fits; overlap where its second block of scores finds registers (Z ≤ 64)."""
    widths = Widths(R, Z, H, HV)
    if 32 <= R <= 64 and Z == 96 and IN_TURNS.fits(widths):
        return IN_TURNS
    for warpgroups, block_kv, stages in ((3, 128, 2), (2, 128, 2), (2, 64, 2), (2, 64, 1), (1, 64, 1)):
        config = PrefillConfig(block_kv, stages, warpgroups, overlap=Z <= 64 and stages > 1)
        if config.fits(widths):
            return config
    raise ValueError(f"no tile fits in shared memory for {R=} {Z=} {H=} {HV=}")


@functools.partial(jax.jit, static_argnames=("scale", "sinks", "window", "keys", "blocks", "config"))
def prefill_attention(
    q: Float[Array, "B T N Hq"],
    k: Float[Array, "... K S R"],
    v: Float[Array, "... K S Z"],
    *,
    scale: float,
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    trailing: Trailing | None = None,
    sinks: int = 0,
    window: int = 0,
    keys: Keys = "all",
    block_table: Int[Array, "B pages"] | None = None,
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    lists: BlockLists | None = None,
    blocks: tuple[int, int] = (128, 128),
    config: PrefillConfig | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Attention of queries at positions starts … starts + T - 1 over keys at positions 0 … S - 1.

    Args:
      q: bfloat16 or float16; Hq = H with `trailing`, else at least R (the first R coordinates are read).
      k, v: [B, K, S, R] and [B, K, S, Z]: first R and Z coordinates, multiples of 16 up to 256. Rows past a
        query's position must be finite and are ignored. N is a multiple of K: grouped heads read the same
        keys, nothing is repeated. With `block_table`: [pages, K, page size, ·], and S is that of a row's
        pages. With `trailing` R = Z = 0 means that there are no far keys: only blocks of near ones are read.
      scale: factor on the scores, above 0; 1/√H of the original head dim.
      starts: position of the first query of each row; zeros if None.
      lengths: tokens each row holds in all; queries at or past it get zeros (log-sum-exp -inf).
      trailing: with it, near keys, {j < sinks} ∪ {t - window < j ≤ t}, count with all coordinates.
      sinks, window: near set, in tokens; used with `trailing`, or with `keys="far"`.
      keys: `all` j ≤ t; `far`: only sinks ≤ j ≤ t - window, to be merged by log-sum-exp with a near half
        (sequence parallelism), by queries that may be past all keys; not with `trailing`.
      block_table: int32, page of each `page size` positions; the page size is a multiple of 64, and of the
        config's block_kv. Entries of pages that no query of the row sees may be any number.
      positions: of queries and of keys, where these are no runs (token classes), in any order; a key at a
        negative one is not there. Blocks that no query of a tile sees are skipped where only such follow, so
        that roughly ascending keys are fastest. Only with `keys="all"`, without `trailing` and `block_table`.
      lists: which blocks of keys queries attend to, and no others. blocks: (Q, P), their queries, a multiple
        of 64, and keys, 64 or 128. Only with `keys="all"`, without `trailing` and `positions`.
      config: tile sizes; None takes the measured or default ones. With lists warpgroups · 64 must divide Q,
        and block_kv be P.

    Returns:
      o in the dtype of q, with Hv = Z, or H with `trailing`; and the natural log-sum-exp of each query's
      scaled scores, float32. A query without visible keys gives zeros and -inf. T and S that are no multiple
      of 8 are padded to one, by a copy.

    Raises:
      ValueError: a rank, dtype, shape or option not allowed, named with its value, before launch.
      NotImplementedError: on a GPU not of compute capability 9.0.
    """
    check_scale(scale)
    check_prefill(
        q,
        k,
        v,
        starts=starts,
        lengths=lengths,
        trailing=trailing,
        sinks=sinks,
        window=window,
        keys=keys,
        block_table=block_table,
        positions=positions,
        lists=lists,
        blocks=blocks,
        config=config,
    )
    B, T, N, H = q.shape
    zeros = jnp.zeros(B, jnp.int32)
    starts = zeros if starts is None else starts
    # No less than 0: kernels in turns take a number's sign for one that they know and the compiler does not.
    lengths = starts + T if lengths is None else jnp.clip(lengths, 0, starts + T)
    base, tails, near_only = zeros, [], not k.shape[-1]
    if trailing is not None:
        base = trailing.start
        tails = [x for x in (trailing.k, trailing.v, trailing.sink_k, trailing.sink_v) if x is not None]
        tails = [x for x in tails if x.shape[-1]]
    if near_only:  # Trailing coordinates are all there are: keys of one rank, and the sinks.
        k, v, *tails = tails
        block_table = None
    two_ranks = trailing is not None and not near_only
    (K, S, R), Z = k.shape[1:], v.shape[-1]
    H, HV = (H, H) if two_ranks else (R, Z)
    page = 0 if block_table is None else S
    S = S if block_table is None else block_table.shape[1] * page
    if lists is not None:
        config = config or listed_config(R, Z, blocks)
    config = config or config_for(R, Z, H, HV, page=page)
    g = _Geometry(
        N=N,
        groups=N // K,
        R=R,
        Z=Z,
        H=H,
        HV=HV,
        tiles=pl.cdiv(T, config.warpgroups * ROWS),
        S=S,
        page=page,
        sinks=sinks if lists is None else 0,
        window=window,
        scale=scale,
        keys="near" if near_only else keys,
        two_ranks=two_ranks,
        positions=positions is not None,
        listed=blocks[0] if lists is not None else 0,
        together=_together(B * N, N // K, S * (R + Z)),
    )
    operands = [jnp.stack([starts, lengths, base], 1).astype(jnp.int32), common.pad_rows(q, 1)]
    operands += [common.pad_rows(x, 2) for x in (k, v, *tails)]
    if positions is not None:
        operands += _bounds(positions, g.tiles, config)
    operands += [] if lists is None else list(lists)
    operands += [] if block_table is None else [block_table]
    o, lse = plgpu.kernel(
        functools.partial(_kernel, g=g, config=config, dtype=q.dtype),
        out_type=[
            jax.ShapeDtypeStruct((B, operands[1].shape[1], N, HV), q.dtype),
            jax.ShapeDtypeStruct((B, N, g.tiles * config.warpgroups * ROWS), jnp.float32),
        ],
        grid=(B * N * g.tiles,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        kernel_name="zdc_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
    )(*operands)
    return o[:, :T], lse[..., :T]


def _bounds(positions: tuple[Array, Array], tiles: int, config: PrefillConfig) -> list[Array]:
    """Positions padded to whole tiles and blocks, absent keys beyond all queries; and [B, tiles, 2] blocks:
    how many come before the first with a key that some query does not see, and before those none sees.
    """
    rows, block, never = config.warpgroups * ROWS, config.block_kv, jnp.iinfo(jnp.int32).max
    queries, keys = (x.astype(jnp.int32) for x in positions)
    queries = jnp.pad(queries, ((0, 0), (0, tiles * rows - queries.shape[1])), mode="edge")
    keys = jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % block)), constant_values=never)
    keys = jnp.where(keys < 0, never, keys)
    tile = queries.reshape(queries.shape[0], tiles, rows)
    blocks = keys.reshape(keys.shape[0], -1, block)
    highest = lax.cummax(blocks.max(-1), axis=1)[:, None]
    lowest = lax.cummin(blocks.min(-1), axis=1, reverse=True)[:, None]
    by_all = (highest <= tile.min(-1, keepdims=True)).sum(-1)
    by_any = (lowest <= tile.max(-1, keepdims=True)).sum(-1)
    return [queries, keys, jnp.stack([by_all, by_any], -1).astype(jnp.int32)]


def _together(heads: int, groups: int, width: int) -> int:
    """Heads whose CTAs run side by side: a divisor of all heads whose keys stay in the second-level cache."""
    count = max(1, min(heads, groups * max(1, _L2_BYTES // (2 * width))))
    return next(n for n in range(count, 0, -1) if heads % n == 0)


class _Geometry(NamedTuple):
    """Static shape of a launch. page: tokens of one, 0 without a block table. listed: queries of a list, 0
    without lists."""

    N: int
    groups: int
    R: int
    Z: int
    H: int
    HV: int
    tiles: int
    S: int
    page: int
    sinks: int
    window: int
    scale: float
    keys: Literal["all", "near", "far"]
    two_ranks: bool
    positions: bool
    listed: int
    together: int

    def tails(self) -> list[str]:
        """Which of k and v have trailing coordinates."""
        return [name for name, width in (("k", self.H - self.R), ("v", self.HV - self.Z)) if width]


class _Item(NamedTuple):
    """What one CTA works on: queries at positions first … length - 1 of one head, and the blocks they see.

    Steps 0 … plain-1 take unmasked blocks from `begin` on. Then come `mixed` steps, with both ranks among
    their keys: block 0 for the sinks (if `sink_step`) and the blocks from `edge` on. The last `inner` steps
    go on from there; all their visible keys count alike. With near keys alone all masked steps are inner, of
    the sinks' own array and of blocks from `edge` on, past the unmasked ones in their midst. Row 0 of these
    blocks is at position `base`.
    """

    b: Array
    head: Array
    row: Array
    first: Array
    length: Array
    base: Array
    begin: Array
    plain: Array
    mixed: Array
    inner: Array
    edge: Array
    sink_step: Array

    def block(self, g: _Geometry, step: Array) -> Array:
        """Key block of a step."""
        masked = self.edge + step - self.plain - self.sink_step
        if g.keys == "near":  # Unmasked blocks lie amid the masked ones.
            masked = jnp.where(masked < self.begin, masked, masked + self.plain)
        block = jnp.where(self.at_sinks(step), 0, masked)
        return jnp.where(step < self.plain, self.begin + step, block)

    def at_sinks(self, step: Array) -> Array:
        """Whether a step is that of the sinks."""
        return (self.sink_step == 1) & (step == self.plain)


def _item(g: _Geometry, config: PrefillConfig, scalars: Any, bounds: Any) -> _Item:
    """This CTA's item: a few heads at a time, longest tiles first."""
    i32, rows = jnp.int32, config.warpgroups * ROWS
    cta = lax.axis_index("cta")
    per_group = i32(g.together * g.tiles)
    within = lax.rem(cta, per_group)
    tile = g.tiles - 1 - lax.div(within, i32(g.together))
    index = lax.div(cta, per_group) * g.together + lax.rem(within, i32(g.together))
    b, head = lax.div(index, i32(g.N)), lax.rem(index, i32(g.N))
    start, length, base = (scalars[b, i] for i in range(3))
    first = start + tile * rows
    end, zero = jnp.minimum(first + rows, length), jnp.int32(0)
    if g.positions:
        by_all, by_any = bounds[b, tile, 0], bounds[b, tile, 1]
        steps = (zero, by_all, zero, by_any - by_all, by_all, zero)
        return _Item(b, head, tile * rows, first, length, base, *steps)
    begin, plain, mixed, inner, edge, sink_step = _steps(g, config.block_kv, first, end, base)
    if g.listed:
        which = lax.div(tile * rows, i32(g.listed))
        # Of the list's last blocks, where its queries stand, those from `edge` on are no plain ones here.
        list_end = jnp.minimum(start + (which + 1) * g.listed, length)
        own = lax.div(list_end + (config.block_kv - 1), i32(config.block_kv)) - edge
        listed = bounds[b, lax.div(head, i32(g.groups)), which]
        begin, plain = zero, jnp.where(end > first, jnp.maximum(listed - own, 0), 0)
    steps = begin, plain, mixed, inner, edge, sink_step
    return _Item(b, head, tile * rows, first, length, base, *steps)


def _steps(g: _Geometry, block: int, first: Array, end: Array, base: Array) -> tuple[Array, ...]:
    """`begin`, `plain`, `mixed`, `inner`, `edge`, `sink_step` of queries at positions first … end - 1."""
    down = lambda x: lax.div(jnp.maximum(x, 0), jnp.int32(block))
    up = lambda x: down(x + (block - 1))
    zero, empty = jnp.int32(0), end <= first
    if g.keys == "near":
        edge, sink_step = down(first - g.window + 1 - base), jnp.int32(g.sinks > 0)
        # Unmasked blocks are within the windows of the first query and of the last, and hold no sink.
        begin = up(jnp.maximum(end - g.window, g.sinks) - base)
        plain = jnp.where(empty, 0, jnp.maximum(down(first + 1 - base) - begin, 0))
        inner = jnp.where(empty, 0, up(end - base) - edge + sink_step - plain)
        return begin, plain, zero, inner, edge, sink_step
    past = g.window if g.keys == "far" else 0
    last = jnp.where(empty, 0, up(end - past))
    # Unmasked blocks are those that every query sees in the same way: all their keys visible, or all far.
    edge = jnp.minimum(down(first + 1 - (g.window if g.two_ranks else past)), last)
    if g.keys == "far":  # Its queries may be past all keys.
        last, edge = jnp.minimum(last, pl.cdiv(g.S, block)), jnp.minimum(edge, g.S // block)
    sink_step = jnp.where((edge > 0) & (g.sinks > 0), 1, 0).astype(jnp.int32)
    if not g.two_ranks:
        return sink_step, edge - sink_step, zero, last - edge + sink_step, edge, sink_step
    inside = jnp.clip(up(end - g.window), edge, last)  # From here on every query is near to all it sees.
    return sink_step, edge - sink_step, inside - edge + sink_step, last - inside, edge, sink_step


def _kernel(*refs: Any, g: _Geometry, config: PrefillConfig, dtype: Any) -> None:
    scalars, q_ref, k_ref, v_ref, *tails, o_ref, lse_ref = refs
    positions, bounds = (tails[:2], tails[2]) if g.positions else (None, None)
    table = tails.pop() if g.page else None
    lists, bounds = (tails[0], tails[1]) if g.listed else (None, bounds)

    def run(**smem: Any) -> None:
        wg = lax.axis_index("wg")
        item = _item(g, config, scalars, bounds)

        @pl.when(wg == config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _load_keys(g, config, smem, item, (k_ref, v_ref), tails, _Rows(table, lists))

        @pl.when(wg < config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(160 if config.warpgroups == 3 else 232, action="increase")
            _attend(g, config, smem, item, wg, q_ref, o_ref, lse_ref, dtype, positions)

    pl.run_scoped(run, collective_axes="wg", **_scratch(g, config, dtype))


def _scratch(g: _Geometry, config: PrefillConfig, dtype: Any) -> dict[str, Any]:
    wgs, stages, block = config.warpgroups, config.stages, config.block_kv
    qk, vo = tile_width(g.R, g.H - g.R), tile_width(g.Z, g.HV - g.Z)
    buffer = functools.partial(tiled, dtype=dtype)
    scratch: dict[str, Any] = {
        "q": buffer(wgs, ROWS, g.R, width=qk),
        "k": buffer(stages, block, g.R, width=qk),
        "v": buffer(stages, block, g.Z, width=vo),
        "o": buffer(wgs, ROWS, g.Z, width=vo),
        "lse": plgpu.SMEM((wgs, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=wgs, num_arrivals=2 if g.H > g.R else 1),
        "k_ready": plgpu.Barrier(num_barriers=stages),
        "v_ready": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_barriers=stages, num_arrivals=wgs),
        "v_free": plgpu.Barrier(num_barriers=stages, num_arrivals=wgs),
    }
    if g.two_ranks:
        scratch["tail_ready"] = plgpu.Barrier(num_arrivals=len(g.tails()))
        scratch["tail_free"] = plgpu.Barrier(num_arrivals=wgs)
    if g.H > g.R:
        scratch["q_tail"] = buffer(wgs, ROWS, g.H - g.R, width=qk)
        scratch["k_tail"] = buffer(block, g.H - g.R, width=qk)
    if g.HV > g.Z:
        scratch["v_tail"] = buffer(block, g.HV - g.Z, width=vo)
        scratch["o_tail"] = buffer(wgs, ROWS, g.HV - g.Z, width=vo)
    return scratch


def _load_keys(
    g: _Geometry,
    config: PrefillConfig,
    smem: Any,
    item: _Item,
    sources: tuple[Any, Any],
    tails: Any,
    rows: "_Rows",
) -> None:
    """The producer: blocks of keys and values into their slots, as these become free."""
    block, kv_head = config.block_kv, lax.div(item.head, jnp.int32(g.groups))
    buffers = [smem[name + "_tail"] for name in g.tails()]
    sinks = tails[len(buffers) :] if g.sinks else [None, None]

    def copy(
        at_sinks: Array, sources: tuple[Any, Any], lead: Array, row: Array, destination: Any, ready: Any
    ) -> None:
        """Rows of the first source from `row` on, or at the sinks the first ones of the second, if any."""

        def start(source: Any, lead: Array, rows: Any) -> None:
            plgpu.copy_gmem_to_smem(source.at[lead, kv_head, rows], destination, ready)

        (source, of_sinks), rows = sources, pl.ds(pl.multiple_of(row, 8), block)
        if of_sinks is None:
            start(source, lead, rows)
            return
        pl.when(at_sinks)(lambda: start(of_sinks, item.b, pl.ds(0, block)))
        pl.when(jnp.logical_not(at_sinks))(lambda: start(source, lead, rows))

    @pl.loop(0, item.plain + item.mixed + item.inner)
    def _step(step: Array) -> None:
        slot, row = lax.rem(step, jnp.int32(config.stages)), rows.block(g, item, step) * block
        at_sinks = item.at_sinks(step)
        lead, within = rows.in_pages(g, item, row)
        for i, name in enumerate("kv"):

            @pl.when(step >= config.stages)
            def _(name: str = name) -> None:
                plgpu.barrier_wait(smem[name + "_free"].at[slot])

            pair = sources[i], sinks[i] if g.keys == "near" else None
            copy(at_sinks, pair, lead, within, smem[name].at[slot], smem[name + "_ready"].at[slot])

        if g.two_ranks:

            @pl.when(step >= item.plain)
            def _() -> None:
                @pl.when(step > item.plain)
                def _() -> None:
                    plgpu.barrier_wait(smem["tail_free"])

                for *pair, buffer in zip(tails, sinks, buffers, strict=False):
                    copy(at_sinks, tuple(pair), item.b, row - item.base, buffer, smem["tail_ready"])


class _Rows(NamedTuple):
    """Which rows of keys the producer reads: a block table and lists of blocks, None where there are none."""

    table: Any
    lists: Any

    def block(self, g: _Geometry, item: _Item, step: Array) -> Array:
        """Key block of a step."""
        if not g.listed:
            return item.block(g, step)
        at = item.b, lax.div(item.head, jnp.int32(g.groups)), lax.div(item.row, jnp.int32(g.listed))
        listed = self.lists[*at, jnp.minimum(step, self.lists.shape[-1] - 1)]
        return jnp.where(step < item.plain, listed, item.block(g, step))

    def in_pages(self, g: _Geometry, item: _Item, row: Array) -> tuple[Array, Array]:
        """Leading index of a row of keys, and where it lies there."""
        if not g.page:
            return item.b, row
        page = jnp.int32(g.page)
        return self.table[item.b, lax.div(row, page)], lax.rem(row, page)


def _attend(
    g: _Geometry,
    config: PrefillConfig,
    smem: Any,
    item: _Item,
    wg: Array,
    q_ref: Any,
    o_ref: Any,
    lse_ref: Any,
    dtype: Any,
    positions: Any,
) -> None:
    """One consumer warpgroup: its 64 queries against all blocks, then its results to memory."""
    rows = pl.ds(pl.multiple_of(item.row + wg * ROWS, 8), ROWS)
    parts = (("q", pl.ds(0, g.R)), ("q_tail", pl.ds(g.R, g.H - g.R)))[: 2 if g.H > g.R else 1]
    for name, columns in parts:
        source = q_ref.at[item.b, rows, item.head, columns]
        plgpu.copy_gmem_to_smem(source, smem[name].at[wg], smem["q_ready"].at[wg])
    plgpu.barrier_wait(smem["q_ready"].at[wg])
    column = plgpu.Layout.WGMMA.reduce(1)
    steps = _Consumer(g, config, smem, item, wg, dtype, positions)
    state = lax.cond(item.plain > 0, steps.plain, lambda state: state, empty(g.Z))
    if g.HV > g.Z:
        state = state._replace(tail=filled((ROWS, g.HV - g.Z), 0, plgpu.Layout.WGMMA))
    inner = item.plain + item.mixed
    if g.two_ranks:
        state = lax.fori_loop(item.plain, inner, functools.partial(steps.masked, mixed=True), state)
    state = lax.fori_loop(inner, inner + item.inner, functools.partial(steps.masked, mixed=False), state)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=column)
    l = jnp.where(row + item.first + wg * ROWS < item.length, state.l.sum(axis=1), 0.0)
    inverse = jnp.where(l > 0, 1.0 / l, 0.0)
    smem["o"].at[wg][...] = scaled(state.acc, inverse).astype(dtype)
    if state.tail is not None:
        smem["o_tail"].at[wg][...] = scaled(state.tail, inverse).astype(dtype)
    smem["lse"].at[wg][...] = jnp.where(l > 0, state.m / LOG2_E + jnp.log(l), -jnp.inf)
    plgpu.commit_smem()
    parts = (("o", pl.ds(0, g.Z)), ("o_tail", pl.ds(g.Z, g.HV - g.Z)))[: 2 if g.HV > g.Z else 1]
    for name, columns in parts:
        plgpu.copy_smem_to_gmem(smem[name].at[wg], o_ref.at[item.b, rows, item.head, columns])
    plgpu.copy_smem_to_gmem(smem["lse"].at[wg], lse_ref.at[item.b, item.head, rows])
    plgpu.wait_smem_to_gmem(0)


class _Consumer(NamedTuple):
    """The steps of a consumer warpgroup over blocks of keys."""

    g: _Geometry
    config: PrefillConfig
    smem: Any
    item: _Item
    wg: Array
    dtype: Any
    positions: Any

    def plain(self, state: State) -> State:
        """All unmasked blocks, at least one."""
        if self.config.turns:
            return prefill_turns.attend(self, state)
        if not self.config.overlap:
            return lax.fori_loop(0, self.item.plain, self._plain_step, state)
        last = self.item.plain - 1
        carry = (state, self._scores(jnp.int32(0)))
        state, scores = lax.fori_loop(0, last, self._overlapped_step, carry)
        return self._add_block(last, state, scores)

    def masked(self, step: Array, state: State, *, mixed: bool) -> State:
        """One block in which visibility, and if `mixed` rank, differ from key to key.

        With two ranks, or near keys alone, 64 keys at a time: registers that do not suffice here slow down
        every step.
        """
        g, slot = self.g, self._slot(step)
        width = ROWS if g.two_ranks or g.keys == "near" else self.config.block_kv
        for name in ["k_ready", "v_ready"]:
            plgpu.barrier_wait(self.smem[name].at[slot])
        if g.two_ranks:
            plgpu.barrier_wait(self.smem["tail_ready"])
        first_key, at_sinks = self.item.block(g, step) * self.config.block_kv, self.item.at_sinks(step)
        if g.keys == "near":
            first_key = first_key + jnp.where(at_sinks, 0, self.item.base)

        def part(i: Array, state: State) -> State:
            rows = pl.ds(pl.multiple_of(i * width, 8), width)
            return self._masked_part(state, slot, rows, first_key + i * width, at_sinks, mixed)

        parts: tuple[Any, Any] = (0, self.config.block_kv // width)
        if g.keys == "near":
            parts = self._seen_parts(first_key, at_sinks)
        state = lax.fori_loop(*parts, part, state)
        for name in ["k_free", "v_free"]:
            plgpu.barrier_arrive(self.smem[name].at[slot])
        if g.two_ranks:
            plgpu.barrier_arrive(self.smem["tail_free"])
        return state

    def _seen_parts(self, first_key: Array, at_sinks: Array) -> tuple[Array, Array]:
        """Which of a block's parts of 64 near keys queries of this warpgroup see: first, and behind the last.

        All sinks are in the first part of theirs.
        """
        first, rows = self.item.first + self.wg * ROWS - first_key, jnp.int32(ROWS)
        part = lambda key: lax.div(jnp.clip(key, 0, self.config.block_kv), rows)
        begin, end = part(first - self.g.window + 1), part(first + 2 * ROWS - 1)
        return jnp.where(at_sinks, 0, begin), jnp.where(at_sinks, 1, end)

    def _masked_part(
        self, state: State, slot: Array, part: Any, first_key: Array, at_sinks: Array, mixed: bool
    ) -> State:
        g, smem, width = self.g, self.smem, part.size
        q, k, v = smem["q"].at[self.wg], smem["k"].at[slot, part], smem["v"].at[slot, part]
        q_tail = (smem["q_tail"].at[self.wg], smem["k_tail"].at[part]) if g.H > g.R else None
        iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, (ROWS, width), axis, layout=plgpu.Layout.WGMMA)
        t = iota(0) + (self.item.first + self.wg * ROWS)
        j = iota(1) + first_key
        if g.positions:
            t, j = self._positions_of(first_key, width)
        near = lambda t, j: (j > t - g.window) | (j < g.sinks)
        if mixed:
            scores = _product((q, k))
            if q_tail is not None:
                scores = scores + jnp.where(near(t, j), _product(q_tail), 0.0)
        else:
            scores = _product((q, k), *([q_tail] if q_tail is not None else []))
        p, state = self._weighed(state, jnp.where(self._visible(t, j, at_sinks), scores, -jnp.inf))
        state = state._replace(acc=_accumulate(state.acc, p.astype(self.dtype), v))
        if state.tail is not None:
            if mixed:
                # The inner barrier has the mask computed again: kept across the softmax it fills registers.
                # The outer one keeps the selection before the conversion, which then takes pairs.
                far_zero = jnp.where(near(*lax.optimization_barrier((t, j))), p, 0.0)
                p = lax.optimization_barrier(far_zero)
            tail = _accumulate(state.tail, p.astype(self.dtype), smem["v_tail"].at[part])
            state = state._replace(tail=tail)
        return state

    def _positions_of(self, first_key: Array, width: int) -> tuple[Array, Array]:
        """Positions of queries and of `width` keys, each [ROWS, width]."""
        starts, sizes = (self.item.row + self.wg * ROWS, first_key), (ROWS, width)
        shape, layout = (ROWS, width), plgpu.Layout.WGMMA
        loaded = []
        for axis, (ref, start, size) in enumerate(zip(self.positions, starts, sizes, strict=True)):
            rows = ref.at[self.item.b, pl.ds(pl.multiple_of(start, 8), size)]
            values = plgpu.load(rows, layout=layout.reduce(1 - axis), optimized=False)
            loaded.append(lax.broadcast_in_dim(values, shape, [axis]))
        return loaded[0], loaded[1]

    def _visible(self, t: Array, j: Array, at_sinks: Array) -> Array:
        """Which keys at positions j queries at positions t see; with near keys alone, of this step's."""
        g = self.g
        if g.keys == "all":
            return j <= t
        if g.keys == "far":
            return (j <= t - g.window) & (j >= g.sinks) & (j < g.S)
        never = jnp.iinfo(jnp.int32).max // 2
        pick = lambda of_sinks, recent: jnp.where(at_sinks, jnp.int32(of_sinks), jnp.int32(recent))
        first = jnp.maximum(t - (pick(never, g.window) - 1), pick(0, g.sinks))
        last = jnp.minimum(t, pick(g.sinks - 1, never))
        return (first <= j) & (j <= last)

    def _plain_step(self, step: Array, state: State) -> State:
        return self._add_block(step, state, self._scores(step))

    def _overlapped_step(self, step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        """Adds the block whose scores are at hand while the tensor cores compute the next block's.

        Waits come first. Behind them the next product is issued as soon as there are registers for it: no
        branch may lie between it and the weights of this block.
        """
        (state, scores), slot, ahead = carry, self._slot(step), self._slot(step + 1)
        plgpu.barrier_wait(self.smem["k_ready"].at[ahead])
        plgpu.barrier_wait(self.smem["v_ready"].at[slot])
        p, state = self._weighed(state, scores)
        p = p.astype(self.dtype)

        def body(next_scores: Any) -> tuple[State, Array]:
            plgpu.wgmma(next_scores, self.smem["q"].at[self.wg], self.smem["k"].at[ahead].transpose((1, 0)))
            acc = _accumulate(state.acc, p, self.smem["v"].at[slot])
            return state._replace(acc=acc), next_scores[...]

        result = pl.run_scoped(body, plgpu.ACC((ROWS, self.config.block_kv), jnp.float32))
        plgpu.barrier_arrive(self.smem["k_free"].at[ahead])
        plgpu.barrier_arrive(self.smem["v_free"].at[slot])
        return result

    def _slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.config.stages))

    def _scores(self, step: Array) -> Array:
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem["k_ready"].at[slot])
        scores = _product((self.smem["q"].at[self.wg], self.smem["k"].at[slot]))
        plgpu.barrier_arrive(self.smem["k_free"].at[slot])
        return scores

    def _weighed(self, state: State, scores: Array) -> tuple[Array, State]:
        """Weights of a block, and the state with their sums."""
        factor = self.g.scale * LOG2_E
        state = raised(state, scores, factor)
        p = weights(state, scores, factor)
        return p, state._replace(l=sum(lanes(p), state.l))

    def _add_block(self, step: Array, state: State, scores: Array) -> State:
        p, state = self._weighed(state, scores)
        return self._add_values(step, state, p.astype(self.dtype))

    def _add_values(self, step: Array, state: State, p: Array) -> State:
        slot = self._slot(step)
        plgpu.barrier_wait(self.smem["v_ready"].at[slot])
        acc = _accumulate(state.acc, p, self.smem["v"].at[slot])
        plgpu.barrier_arrive(self.smem["v_free"].at[slot])
        return state._replace(acc=acc)


def _product(*pairs: tuple[Any, Any]) -> Array:
    """Sum of q kᵀ over pairs of query and key buffers."""

    def body(acc: Any) -> Array:
        for q, k in pairs:
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, pairs[0][1].shape[0]), jnp.float32))


def _accumulate(acc: Array, p: Array, values: Any) -> Array:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(plgpu.ACC.init(acc))
