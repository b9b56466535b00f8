"""Rotary embedding, then each head's basis, in one pass over q and k (placement `post_rope`).

    grid: (units · shares,); `warpgroups` compute warpgroups per CTA, no producer
    CTA:        TMA rotations of P KV heads → rotations_ready, once
    warpgroup:  for each tile of 64 tokens: angles → registers
                for each of P(G+1) heads, for each column block:
                    wait ready[slot] → RoPE in float32 registers → load a later step → acc += x A (wgmma)
                store y through shared memory

It computes q' = RoPE(q) A_Q and k' = RoPE(k) A_K. Every coordinate is read once, and each of the C that are
kept is written once: 2 (H + C) bytes and 2 H C FLOP per head and token. Memory traffic bounds the time, so
everything shared must stay close to the cores. All tokens share the rotations, H × C per KV head. All heads
share the angles, H float32 per token, as many bytes as two heads.

A CTA keeps the rotations of P KV heads in shared memory and walks over the tokens. Each warpgroup takes 64
tokens, loads their angles into registers once, and walks over the P(G+1) heads. L2 thus serves 1 + 2/(P(G+1))
times the bytes of q and k. The alternative, tokens outside and rotations streamed past W warpgroups, would
make it 1 + C/(32W(G+1)). With the default sizes its overhead is twice as large at H=128, and four times at
H=64.

CTAs of different heads walk over the tokens in the same order, so that angles come from memory only once.
Above H=128 registers cannot hold the angles, and each head loads them again from L2.

Warpgroups share only the rotations. Each has its own ring of tiles, filled by TMA some steps ahead. One step
is the two column blocks that the rotary embedding pairs (i and i + H/2). They are rotated in float32
registers, rounded to the rotations' dtype, and multiplied from registers.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from kernels_pallas import common
from kernels_pallas.common import Shaped, divide, tile_width, tiled
from kernels_pallas.lowering import lower_once

TILE_TOKENS = 64
"""Tokens of one tile, all of one sequence: the rows of one warpgroup's `wgmma`."""

SHARED_BYTES = common.SHARED_MEMORY - 1024
"""Shared memory that one CTA may use for tiles: Hopper's 227 KiB minus one for barriers."""

HELD_ANGLES = 128
"""Largest head dimension whose angles fit into registers together with the accumulator."""


@dataclass(frozen=True)
class PostRopeConfig:
    """Launch configuration.

    Attributes:
      warpgroups: compute warpgroups per CTA.
      stages: most tiles in flight per warpgroup.
      rotation_bytes: shared memory for rotations.
      ctas: number of CTAs.
    """

    warpgroups: int = 2
    stages: int = 4
    rotation_bytes: int = 128 * 1024
    ctas: int = 132


DECODE = PostRopeConfig(warpgroups=1, stages=2, rotation_bytes=0)
"""Config for a few tiles: reading the rotations dominates, so each CTA has one."""


def default_config(K: int, tiles: int) -> PostRopeConfig:
    """Return the default config for the number of token tiles of the K KV heads."""
    return DECODE if 2 * K * tiles <= PostRopeConfig.ctas else PostRopeConfig()


class _Geometry(NamedTuple):
    B: int
    T: int
    K: int
    G: int
    H: int
    C: int
    kv_heads: int
    """KV heads of one CTA, with query rotation and key rotation."""
    split: bool
    """Whether a CTA has only queries or only keys, because the rotations of both do not fit."""
    warpgroups: int
    stages: int
    shares: int
    """CTAs that share the tokens of the same heads."""

    @property
    def column_block(self) -> int:
        """Columns of one rotary half that are rotated at a time; fewer if the accumulator is large."""
        return math.gcd(64 if self.H <= HELD_ANGLES else 32, self.H // 2)

    @property
    def blocks(self) -> int:
        return self.H // 2 // self.column_block

    @property
    def units(self) -> int:
        return 2 * self.K if self.split else self.K // self.kv_heads

    @property
    def tiles(self) -> int:
        return self.B * pl.cdiv(self.T, TILE_TOKENS)


@lower_once("by_token", "config")
def post_rope(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    angles_cos: Float[Array, "B T H/2"],
    angles_sin: Float[Array, "B T H/2"],
    q_rotation: Float[Array, "K H C"],
    k_rotation: Float[Array, "K H C"],
    *,
    by_token: bool = False,
    config: PostRopeConfig | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B _ _ C"]]:
    """Apply rotary embedding and basis to queries and keys.

    q and k share one dtype, bfloat16 or float16; the rotations are float16 or have the dtype of q. With
    bfloat16 q, float16 rotations are eight times as exact, and rotated values must stay below 65504.

    Any T works, but TMA addresses rows by eight. If T is not a multiple of 8, q and k are padded by a copy
    and the results cut. If T is not a multiple of 64, the angles are padded, a copy as large as two heads.

    Args:
      q: queries. H is a multiple of 32 up to 256.
      k: keys; the G = N/K query heads of a KV head share its rotation.
      angles_cos: cosines of the rotary angles, float32. Coordinates i and i + H/2 are a rotary pair, as in
        Hugging Face weights.
      angles_sin: sines of the rotary angles, float32.
      q_rotation: basis of queries. C is a multiple of 16 up to H.
      k_rotation: basis of keys.
      by_token: whether keys are returned in the layout of k, [B, T, K, ·], or in that of a cache,
        [B, K, T, ·].
      config: launch configuration; None uses the default.

    Returns:
      Rotated queries and keys.

    Raises:
      ValueError: a dtype, rank, head dimension or shape is not allowed. Raised before launch.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    g = checked_launch(q, k, angles_cos, angles_sin, q_rotation, k_rotation, config=config)
    T = q.shape[1]
    q, k = (_pad_tokens(x, 8) for x in (q, k))
    operands = [
        q,
        k,
        _pad_tokens(angles_cos, TILE_TOKENS),
        _pad_tokens(angles_sin, TILE_TOKENS),
        q_rotation,
        k_rotation,
    ]
    B, N = q.shape[0], q.shape[2]
    lead = (B, g.T, g.K) if by_token else (B, g.K, g.T)
    kernel = plgpu.kernel(
        functools.partial(_kernel, g=g, by_token=by_token, dtype=q.dtype),
        out_type=[jax.ShapeDtypeStruct((*each, g.C), q.dtype) for each in ((B, g.T, N), lead)],
        grid=(g.units * g.shares,),
        grid_names=("cta",),
        num_threads=g.warpgroups,
        thread_name="wg",
        kernel_name="zdc_post_rope",
    )
    queries, keys = kernel(*operands)
    return queries[:, :T], keys[:, :T] if by_token else keys[:, :, :T]


def checked_launch(
    q: Shaped,
    k: Shaped,
    angles_cos: Shaped,
    angles_sin: Shaped,
    q_rotation: Shaped,
    k_rotation: Shaped,
    *,
    config: PostRopeConfig | None = None,
) -> _Geometry:
    """Return the launch for arguments of `post_rope`, with padded tokens; errors are those it documents."""
    common.check_device()

    def require(ok: bool, name: str, value: Any, allowed: str) -> None:
        if not ok:
            raise ValueError(f"post_rope: {name} is {value}; allowed: {allowed}")

    for name, x, count in (("q", q, 4), ("k", k, 4), ("q_rotation", q_rotation, 3)):
        require(x.ndim == count, f"{name}.shape", x.shape, f"{count} dimensions")
    (B, T, N, H), K, C = q.shape, k.shape[2], q_rotation.shape[2]
    require(q.dtype in (jnp.bfloat16, jnp.float16), "q.dtype", q.dtype, "bfloat16, float16")
    require(min(q.shape) > 0, "q.shape", q.shape, "no empty dimension")
    rotation_dtype = jnp.float16 if q_rotation.dtype == jnp.float16 else q.dtype
    require(H % 32 == 0 and H <= 256, "the head dimension of q", H, "multiples of 32 up to 256")
    require(C % 16 == 0 and 16 <= C <= H, "the rank of q_rotation", C, f"multiples of 16 from 16 to {H}")
    require(K > 0 and N % K == 0, "the number of heads of k", K, f"divisors of q's {N} heads")
    for name, x, shape, dtype in (
        ("k", k, (B, T, K, H), q.dtype),
        ("angles_cos", angles_cos, (B, T, H // 2), jnp.float32),
        ("angles_sin", angles_sin, (B, T, H // 2), jnp.float32),
        ("q_rotation", q_rotation, (K, H, C), rotation_dtype),
        ("k_rotation", k_rotation, (K, H, C), rotation_dtype),
    ):
        require(x.shape == shape, f"{name}.shape", x.shape, str(shape))
        require(x.dtype == dtype, f"{name}.dtype", x.dtype, str(jnp.dtype(dtype)))
    T += -T % 8
    config = config or default_config(K, B * pl.cdiv(T, TILE_TOKENS))
    return _geometry(B, T, N, K, H, C, config)


def _pad_tokens(x: Array, multiple: int) -> Array:
    """Pad x [B, T, ...] with zeros to a multiple of tokens."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def _geometry(B: int, T: int, N: int, K: int, H: int, C: int, config: PostRopeConfig) -> _Geometry:
    """Return the launch: how many KV heads a CTA takes, and how deep its rings can be."""
    pair = 2 * H * C * 2
    wgs = config.warpgroups
    shares = pl.cdiv(B * pl.cdiv(T, TILE_TOKENS), wgs)
    split = pair > config.rotation_bytes

    # Sharing angles among more KV heads pays only while there is work for every CTA.
    def fits(heads):
        return heads * pair <= config.rotation_bytes and K // heads * shares >= config.ctas

    kv_heads = max((p for p in range(1, K + 1) if K % p == 0 and fits(p)), default=1)
    rotations = pair // 2 if split else kv_heads * pair

    def tile(width):
        return wgs * TILE_TOKENS * width * 2

    g = _Geometry(B, T, K, N // K, H, C, kv_heads, split, wgs, 1, 1)
    stages = (SHARED_BYTES - rotations - tile(C)) // tile(2 * g.column_block)
    if stages < 1:
        raise ValueError(f"post_rope: config is {config}; allowed: what fits into {SHARED_BYTES} bytes")
    return g._replace(stages=min(stages, config.stages), shares=min(shares, max(1, config.ctas // g.units)))


class _Work(NamedTuple):
    """Heads and tokens of a warpgroup, in the order of its steps: tile, head, column block."""

    g: _Geometry
    first_kv: Array
    first_member: Array
    members: Array
    """Heads per KV head: its queries and its key, or one of the two."""
    worker: Array

    @property
    def heads(self) -> Array:
        return self.g.kv_heads * self.members

    @property
    def workers(self) -> int:
        return self.g.shares * self.g.warpgroups

    @property
    def tiles(self) -> Array:
        missing = jnp.maximum(self.g.tiles - self.worker, 0)
        return lax.div(missing + self.workers - 1, jnp.int32(self.workers))

    @property
    def steps(self) -> Array:
        return self.tiles * self.heads * self.g.blocks

    def head(self, index: Array) -> tuple[Array, Array]:
        """Return the KV head and the member of its group: a query head, or the key as member G."""
        kv, member = divide(index, self.members)
        return self.first_kv + kv, self.first_member + member

    def rows(self, tile: Array) -> tuple[Array, Any]:
        """Return batch index and tokens of a tile."""
        b, row = divide(self.worker + tile * self.workers, pl.cdiv(self.g.T, TILE_TOKENS))
        return b, pl.ds(pl.multiple_of(row * TILE_TOKENS, 8), TILE_TOKENS)

    def rotation(self, kv: Array, member: Array) -> Array:
        """Return the index of a head's rotation in shared memory."""
        # Compute the zero: a constant index into a dimension of size one does not lower.
        return kv * 0 if self.g.split else 2 * (kv - self.first_kv) + (member == self.g.G).astype(jnp.int32)


def _work(g: _Geometry) -> _Work:
    share, unit = divide(lax.axis_index("cta"), g.units)
    worker = share * g.warpgroups + lax.axis_index("wg")
    if not g.split:
        return _Work(g, unit * g.kv_heads, jnp.int32(0), jnp.int32(g.G + 1), worker)
    kv, only_key = divide(unit, 2)
    return _Work(g, kv, only_key * g.G, jnp.where(only_key == 1, 1, g.G), worker)


def _kernel(*refs: Any, g: _Geometry, by_token: bool, dtype: Any) -> None:
    q_ref, k_ref, cos_ref, sin_ref, q_rotation, k_rotation, q_out, k_out = refs
    rotation_dtype = q_rotation.dtype
    w = g.column_block
    rotation_count = 1 if g.split else 2 * g.kv_heads

    @functools.partial(
        pl.run_scoped,
        collective_axes="wg",
        rotations=tiled(rotation_count, g.H, g.C, dtype=rotation_dtype, width=tile_width(w, g.C)),
        ring=tiled(g.warpgroups, g.stages, 2, TILE_TOKENS, w, dtype=dtype, width=w),
        out=tiled(g.warpgroups, TILE_TOKENS, g.C, dtype=dtype, width=tile_width(g.C)),
        rotations_ready=plgpu.Barrier(num_arrivals=rotation_count),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=g.warpgroups * g.stages),
    )
    def _run(rotations: Any, ring: Any, out: Any, rotations_ready: Any, ready: Any) -> None:
        wg, work = lax.axis_index("wg"), _work(g)
        load = functools.partial(_load, work, wg, (q_ref, k_ref), ring, ready)
        for step in range(g.stages):
            load(jnp.int32(step))
        pl.when(wg == 0)(lambda: _load_rotations(work, (q_rotation, k_rotation), rotations, rotations_ready))
        plgpu.barrier_wait(rotations_ready)

        @pl.loop(0, work.tiles)
        def _tile(tile: Array) -> None:
            b, rows = work.rows(tile)

            def angles(block):
                return [
                    plgpu.load(
                        ref.at[b, rows, pl.ds(block * w, w)], layout=plgpu.Layout.WGMMA, optimized=False
                    )
                    for ref in (cos_ref, sin_ref)
                ]

            held = [angles(block) for block in range(g.blocks)] if g.H <= HELD_ANGLES else None

            @pl.loop(0, work.heads)
            def _head(head: Array) -> None:
                kv, member = work.head(head)
                rotation = rotations.at[work.rotation(kv, member)]

                def multiply(acc: Any) -> Array:
                    for block in range(g.blocks):
                        step = (tile * work.heads + head) * g.blocks + block
                        slot = lax.rem(step, jnp.int32(g.stages))
                        cos, sin = held[block] if held else angles(block)
                        plgpu.barrier_wait(ready.at[wg * g.stages + slot])
                        low, high = (ring.at[wg, slot, half][...].astype(jnp.float32) for half in range(2))
                        plgpu.commit_smem()  # Every thread has read the tile, so it may be overwritten.
                        load(step + g.stages)
                        for half, x in enumerate((low * cos - high * sin, high * cos + low * sin)):
                            inner = pl.ds(half * (g.H // 2) + block * w, w)
                            plgpu.wgmma(acc, x.astype(rotation_dtype), rotation.at[inner])
                    return acc[...]

                y = pl.run_scoped(multiply, plgpu.ACC((TILE_TOKENS, g.C), jnp.float32)).astype(dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous results have left.
                out.at[wg][...] = y
                plgpu.commit_smem()

                def store(to: Any) -> None:
                    plgpu.copy_smem_to_gmem(out.at[wg], to)

                pl.when(member < g.G)(lambda: store(q_out.at[b, rows, kv * g.G + member]))
                keys = k_out.at[b, rows, kv] if by_token else k_out.at[b, kv, rows]
                pl.when(member == g.G)(lambda: store(keys))

        plgpu.wait_smem_to_gmem(0)


def _load(work: _Work, wg: Array, refs: tuple[Any, Any], ring: Any, ready: Any, step: Array) -> None:
    """Start the copies of one step, q's or k's two column blocks, unless the work ends before it."""
    g, (q_ref, k_ref) = work.g, refs
    head_step, block = divide(step, g.blocks)
    tile, head = divide(head_step, work.heads)
    (b, rows), (kv, member) = work.rows(tile), work.head(head)
    slot = lax.rem(step, jnp.int32(g.stages))

    def copy(ref: Any, head: Array) -> None:
        for half in range(2):
            first = pl.multiple_of(half * (g.H // 2) + block * g.column_block, g.column_block)
            source = ref.at[b, rows, head, pl.ds(first, g.column_block)]
            plgpu.copy_gmem_to_smem(source, ring.at[wg, slot, half], ready.at[wg * g.stages + slot])

    pl.when((step < work.steps) & (member < g.G))(lambda: copy(q_ref, kv * g.G + member))
    pl.when((step < work.steps) & (member == g.G))(lambda: copy(k_ref, kv))


def _load_rotations(work: _Work, refs: tuple[Any, Any], rotations: Any, ready: Any) -> None:
    """Start the copies of all rotations that a CTA needs."""
    g = work.g

    def copy(ref: Any, kv: Array, member: int) -> None:
        place = work.rotation(kv, jnp.int32(member))
        plgpu.copy_gmem_to_smem(ref.at[kv], rotations.at[place], ready)

    for ref, member in zip(refs, (0, g.G), strict=True):
        for index in range(g.kv_heads):
            start = functools.partial(copy, ref, work.first_kv + index, member)
            if g.split:
                pl.when(work.first_member == member)(start)
            else:
                start()
