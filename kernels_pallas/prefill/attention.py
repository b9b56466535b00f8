"""Causal attention of many queries on truncated coordinates, two ranks under one softmax.

    grid: (B·N·tiles,); `warpgroups` consumers of 64 queries each, and one producer warpgroup per CTA
    producer:   each step: wait k.free[slot] → TMA K → k.ready[slot], then the same for V
    consumer:   TMA Q → q_ready; each step:
                    wait k.ready[slot] → S = Q Kᵀ → arrive k.free[slot] → online softmax
                    wait v.ready[slot] → O += P V → arrive v.free[slot]
    two ranks:  trailing coordinates in one more buffer each, with tail_ready and tail_free

Buffers and barriers are described in `memory`.

A query head and visible key cost 2 (R + Z) FLOP, a near key 2 (H + HV). Each CTA reads the keys of its
queries, 2 (R + Z) bytes each, for 64 · warpgroups queries: 64 · warpgroups FLOP per byte from the
second-level cache. Tensor cores and exponentials bound the time.

Consumers (`consumer`), producer (`producer`) and the online softmax (`softmax`)
follow FlashAttention-3 (Shah et al., 2024). The two ranks are ours. Scores use R coordinates and values Z.
Keys near a query (sinks and a recent window) add their trailing H-R and H-Z coordinates to the same softmax.
Unmasked far blocks, nearly all blocks, come first, so that their loop needs no registers for the trailing
part.

With near keys in arrays of their own, masked steps of far keys come before those of near keys, whose blocks
the producer takes from these arrays. A position is visible in one of both kinds of steps. Sinks are among the
far keys, so that their block is like any other.
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
from kernels_pallas.common import GAIN_BLOCK, check_scale
from kernels_pallas.lowering import lower_once
from kernels_pallas.prefill.consumer import Consumer, attend
from kernels_pallas.prefill.inputs import (
    ROWS,
    Keys,
    PrefillConfig,
    Trailing,
    Widths,
    check_prefill,
)
from kernels_pallas.prefill.items import Geometry, item_of
from kernels_pallas.prefill.memory import Buffers, Operands, Pair
from kernels_pallas.prefill.producer import load_keys
from kernels_pallas.tuning import measured

_L2_BYTES = 32 * 2**20
"""Size of keys and values of heads processed together, so that they stay in the second-level cache."""
IN_TURNS = PrefillConfig(128, 2, 3, turns=80)
"""Config with turns that was measured faster at Z = 96 and R from 32 to 64."""
NEAR_AND_FAR = PrefillConfig(64, 4, 3, overlap=True)
"""Config that was measured faster at 128 coordinates with near keys in arrays of their own."""
ENOUGH = {3: 200, 2: 100}
"""CTAs that keep an H200 busy, by their warpgroups; with fewer, smaller CTAs were faster where timed."""


def config_for(R: int, Z: int, H: int, HV: int, *, page: int = 0) -> PrefillConfig:
    """Return the measured config of these widths on this device, else the default.

    `page` is the tokens per page, a multiple of 64; 0 without pages. Blocks must divide pages; configs with
    smaller blocks than measured do not use turns.
    """
    found = measured("prefill", R=R, Z=Z, H=H, HV=HV)
    config = PrefillConfig(**found) if found else default_config(R, Z, H, HV)
    block = math.gcd(config.block_kv, page)
    return config if block == config.block_kv else replace(config, block_kv=block, turns=0)


def default_config(R: int, Z: int, H: int, HV: int) -> PrefillConfig:
    """Return the largest tile that fits.

    It overlaps if the second block of scores finds registers (Z ≤ 64).
    """
    widths = Widths(R, Z, H, HV)
    if 32 <= R <= 64 and Z == 96 and IN_TURNS.fits(widths):
        return IN_TURNS
    for warpgroups, block_kv, stages in ((3, 128, 2), (2, 128, 2), (2, 64, 2), (2, 64, 1), (1, 64, 1)):
        config = PrefillConfig(block_kv, stages, warpgroups, overlap=Z <= 64 and stages > 1)
        if config.fits(widths):
            return config
    raise ValueError(f"{R=}, {Z=}, {H=}, {HV=}: no tile fits into shared memory; widths must be smaller")


def split_further(config: PrefillConfig, heads: int, T: int, S: int) -> PrefillConfig:
    """Return the config with fewer warpgroups if a short prompt would leave multiprocessors without work.

    Other chunks keep their config: after a long prefix all CTAs take equally long.

    Args:
      config: config for long prompts.
      heads: query heads of all sequences.
      T: queries of each.
      S: keys of each; below 2T they are those of a whole prompt.
    """
    if S >= 2 * T:
        return config
    for count in range(config.warpgroups, 1, -1):
        if heads * pl.cdiv(T, count * ROWS) >= ENOUGH[count]:
            return replace(config, warpgroups=count)
    return replace(config, warpgroups=1, turns=0)


@lower_once("scale", "sinks", "window", "keys", "config")
@common.checked_by(check_prefill)
def prefill_attention(
    q: Float[Array, "B T N Hq"],
    k: Float[Array, "... K S R"],
    v: Float[Array, "... K S Z"],
    *,
    scale: float,
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    needed_from: Int[Array, " B"] | None = None,
    trailing: Trailing | None = None,
    sinks: int = 0,
    window: int = 0,
    keys: Keys = "all",
    near: Trailing | None = None,
    block_table: Int[Array, "B pages"] | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
    config: PrefillConfig | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Compute attention of queries at positions starts … starts + T - 1 over keys at positions 0 … S - 1.

    If T or S is not a multiple of 8, it is padded by a copy.

    Args:
      q: queries, bfloat16 or float16; Hq = H with `trailing`, else at least R (the first R coordinates are
        read).
      k: first R coordinates of the keys, [B, K, S, R]; with `block_table` [pages, K, page size, R]. R and Z
        are multiples of 16 up to 256. Rows after a query's position must be finite and are ignored. If N is a
        multiple of K, grouped heads read the same keys without a copy. With `trailing`, R = Z = 0 means that
        there are no far keys, and only blocks of near keys are read.
      v: first Z coordinates of the values, like `k`.
      scale: factor on the scores, above 0; 1/√H of the original head dimension.
      starts: position of the first query of each sequence; None means zeros.
      lengths: total length of each sequence; queries at or after it get zeros (log-sum-exp -inf).
      needed_from: first position of each sequence whose result is needed; None means zeros. Tiles of earlier
        queries are left out, and get zeros.
      trailing: trailing coordinates of near keys, {j < sinks} ∪ {t - window < j ≤ t}, which count with all
        coordinates.
      sinks: number of sinks; used with `trailing`, or with `keys="far"`.
      window: size of the recent window; used like `sinks`.
      keys: `all` for j ≤ t; `far` for sinks ≤ j ≤ t - window only, to be merged with near attention by
        log-sum-exp (sequence parallelism). With `far`, queries may be after all keys. Not with `trailing`.
      near: keys and values of the window, with R and Z coordinates in arrays of their own, for a window of at
        most `NEAR_WINDOW`. The result covers them, too. `near.start` may be any position, or with
        `block_scores` a multiple of 64. Only with `keys="far"` and without sinks, whose near keys and values
        must be in `k` and `v`.
      block_table: page of each `page size` positions, int32. The page size is a multiple of 64 and of the
        config's block_kv. Entries of pages that no query of the sequence sees may have any value.
      block_scores: what scaled scores gain in each block of 64 positions of keys, float32 [B, T, N, blocks],
        for every block with a visible key. `trailing.start` must then be a multiple of 64.
      config: tile sizes; None uses the measured or default ones.

    Returns:
      The output in the dtype of q, with Hv = Z, or H with `trailing`; and the natural log-sum-exp of each
      query's scaled scores in float32. A query without visible keys gives zeros and -inf.

    Raises:
      ValueError: a rank, dtype, shape or option is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    check_scale(scale)
    B, T, N, H = q.shape
    zeros = jnp.zeros(B, jnp.int32)
    starts = zeros if starts is None else starts
    # Lengths must not be negative: turns use the sign of a length as a zero that the compiler does not know.
    lengths = starts + T if lengths is None else jnp.clip(lengths, 0, starts + T)
    apart = near if trailing is None else trailing
    base = zeros if apart is None else apart.start
    far, (own, own_sinks), near_only = Pair(k, v), _pairs(apart), not k.shape[-1]
    if near_only:  # The trailing coordinates are all coordinates: keys of one rank, and the sinks.
        far, own, block_table = own, Pair(), None
    two_ranks = trailing is not None and not near_only
    (K, S, R), Z = far.k.shape[1:], far.v.shape[-1]
    H, HV = (H, H) if two_ranks else (R, Z)
    page = 0 if block_table is None else S
    S = S if block_table is None else block_table.shape[1] * page
    if config is None:
        with_near = near is not None and R == Z == 128
        config = NEAR_AND_FAR if with_near else config_for(R, Z, H, HV, page=page)
        config = split_further(config, B * N, T, S)
    if block_scores is not None and config.block_kv > 2 * GAIN_BLOCK:
        config = replace(config, block_kv=2 * GAIN_BLOCK, turns=min(config.turns, 2 * GAIN_BLOCK))
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
        sinks=sinks,
        window=window,
        scale=scale,
        keys="near" if near_only else keys if near is None else "both",
        two_ranks=two_ranks,
        together=_together(B * N, N // K, S * (R + Z)),
    )
    needed_from = zeros if needed_from is None else needed_from
    scalars = jnp.stack([starts, lengths, base, needed_from], 1).astype(jnp.int32)
    q = common.pad_rows(q, 1)
    far, own, own_sinks = jax.tree.map(lambda x: common.pad_rows(x, 2), (far, own, own_sinks))
    if block_scores is not None:
        # Copied only if the last 64 queries are incomplete: the transposition undoes that of `score_blocks`.
        padded = jnp.pad(block_scores, ((0, 0), (0, -T % ROWS), (0, 0), (0, 0)))
        block_scores = padded.transpose(0, 2, 3, 1)
    operands = Operands(
        scalars=scalars,
        q=q,
        far=far,
        near=own,
        sinks=own_sinks,
        table=block_table,
        gains=block_scores,
    )
    o, lse = _launch(g, config, operands)
    return o[:, :T], lse[..., :T]


def _pairs(trailing: Trailing | None) -> tuple[Pair, Pair]:
    """Return the non-empty trailing coordinates of keys and values, and those of sinks."""
    if trailing is None:
        return Pair(), Pair()
    k, v, _, *sinks = (x if x is not None and x.shape[-1] else None for x in trailing)
    return Pair(k, v), Pair(*sinks)


def _together(heads: int, groups: int, width: int) -> int:
    """Return how many heads to process together: a divisor of all heads.

    Their keys and values fit into the second-level cache.
    """
    count = max(1, min(heads, groups * max(1, _L2_BYTES // (2 * width))))
    return next(n for n in range(count, 0, -1) if heads % n == 0)


def _launch(g: Geometry, config: PrefillConfig, operands: Operands) -> tuple[Array, Array]:
    """Launch the kernel on padded operands.

    Returns:
      o [B, T', N, HV] and lse [B, N, T''], where T' is the padded tokens of q, and T'' those of whole tiles.
    """
    B, T = operands.q.shape[:2]
    return plgpu.kernel(
        functools.partial(_kernel, g=g, config=config),
        out_type=[
            jax.ShapeDtypeStruct((B, T, g.N, g.HV), operands.q.dtype),
            jax.ShapeDtypeStruct((B, g.N, g.tiles * config.warpgroups * ROWS), jnp.float32),
        ],
        grid=(B * g.N * g.tiles,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        kernel_name="zdc_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
    )(operands)


def _kernel(refs: Operands, o_ref: Any, lse_ref: Any, *, g: Geometry, config: PrefillConfig) -> None:
    def run(smem: Buffers) -> None:
        wg = lax.axis_index("wg")
        item = item_of(g, config, refs.scalars)

        @pl.when(wg == config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            load_keys(g, config, smem, item, refs)

        @pl.when(wg < config.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(160 if config.warpgroups == 3 else 232, action="increase")
            attend(Consumer(g, config, smem, item, wg, refs), o_ref, lse_ref)

    pl.run_scoped(run, Buffers.of(g, config, refs.q.dtype), collective_axes="wg")
