"""Causal attention of many queries on truncated coordinates, two ranks under one softmax.

A few warpgroups hold 64 query rows each (`prefill_consumer`), one more streams blocks of keys through shared
memory (`prefill_producer`), and an online softmax (`prefill_softmax`) keeps the running result in registers:
the shape of FlashAttention-3 (Shah et al., 2024). Ours are the two ranks. Scores use R coordinates and values
Z. Keys near a query (sinks and a window of recent ones) add their trailing H-R and H-Z coordinates to the
same softmax. Unmasked far blocks, nearly all of them, come first, so that their loop holds no register for
the trailing part; the last few blocks pay.

With lists of blocks only the producer reads other rows: it looks up which block comes next. That queries need
not attend to all blocks of keys is from MInference (Jiang et al., 2024).
"""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import check_scale, tile_width, tiled
from kernels_pallas.prefill_consumer import attend
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
from kernels_pallas.prefill_items import Geometry, item_of
from kernels_pallas.prefill_producer import Rows, load_keys
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
    base = zeros if trailing is None else trailing.start
    tails, near_only = _tails(trailing), not k.shape[-1]
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
    g = Geometry(
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
    o, lse = _launch(g, config, operands)
    return o[:, :T], lse[..., :T]


def _tails(trailing: Trailing | None) -> list[Array]:
    """Trailing coordinates of keys and values, then those of sinks, where there are any."""
    if trailing is None:
        return []
    given = trailing.k, trailing.v, trailing.sink_k, trailing.sink_v
    return [x for x in given if x is not None and x.shape[-1]]


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


def _launch(g: Geometry, config: PrefillConfig, operands: list[Array]) -> tuple[Array, Array]:
    """o [B, T', N, HV] and lse [B, N, T''], T' tokens of the queries as they are padded, T'' of whole tiles.

    operands: starts, lengths and bases [B, 3]; queries, keys and values, padded; what else the kernel reads.
    """
    q = operands[1]
    B, T = q.shape[:2]
    return plgpu.kernel(
        functools.partial(_kernel, g=g, config=config, dtype=q.dtype),
        out_type=[
            jax.ShapeDtypeStruct((B, T, g.N, g.HV), q.dtype),
            jax.ShapeDtypeStruct((B, g.N, g.tiles * config.warpgroups * ROWS), jnp.float32),
        ],
        grid=(B * g.N * g.tiles,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        kernel_name="zdc_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
    )(*operands)


def _kernel(*refs: Any, g: Geometry, config: PrefillConfig, dtype: Any) -> None:
    scalars, q_ref, k_ref, v_ref, *tails, o_ref, lse_ref = refs
    positions, bounds = (tails[:2], tails[2]) if g.positions else (None, None)
    table = tails.pop() if g.page else None
    lists, bounds = (tails[0], tails[1]) if g.listed else (None, bounds)

    def run(**smem: Any) -> None:
        wg = lax.axis_index("wg")
        item = item_of(g, config, scalars, bounds)

        @pl.when(wg == config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            load_keys(g, config, smem, item, (k_ref, v_ref), tails, Rows(table, lists))

        @pl.when(wg < config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(160 if config.warpgroups == 3 else 232, action="increase")
            attend(g, config, smem, item, wg, q_ref, o_ref, lse_ref, dtype, positions)

    pl.run_scoped(run, collective_axes="wg", **_scratch(g, config, dtype))


def _scratch(g: Geometry, config: PrefillConfig, dtype: Any) -> dict[str, Any]:
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
