"""Share of attention that a block of queries gives to each block of keys, estimated from some queries (ours).

    grid: (programs,), Triton; 8 warps per program
    for each tile of 128 sampled queries of one KV head:
        for each block of keys:  S = Q Kᵀ, online softmax; write log2 Σ exp2(S) per query
        barrier
        for each block of keys:  read it back, subtract the total, average over the queries

Scores are never written. There are as many programs as run at a time, each with many tiles, so that the
scratch memory stays small. One query and key cost 2 R FLOP and one exponential. Keys are read once per tile
of queries, so that a byte of keys serves 128 FLOP. Hopper's tensor cores compute 256 FLOP in the time of one
exponential. As 2 R ≤ 256, exponentials bound the time.

JAX plans to drop Pallas' Triton back end. Without it `check_block_mass` raises.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import LOG2_E, NEVER, SMS, Shaped, check_scale
from kernels_pallas.triton import check_back_end, plt

ROWS = 128
"""Sampled queries of a program at a time, from one block or several."""
ROWS_OF_A_WARP = 16
PROGRAMS = 2 * SMS
"""Programs that run at a time, with 8 warps and up to 128 registers per thread."""
READ_BACK = 32
"""Key blocks read back at a time."""
WIDTHS = (16, 32, 64, 128)
KEYS = (32, 64, 128)
MOST_BYTES = 2**31
"""Largest array in bytes: Triton's offsets have 32 bits and a sign."""


def block_mass(
    q: Float[Array, "B K nq m R"],
    at: Int[Array, "B nq m"],
    k: Float[Array, "B K S R"],
    *,
    scale: float,
    keys: int = 128,
    interpret: bool = False,
) -> Float[Array, "B K nq _"]:
    """Return the softmax mass of each block of keys, averaged over the m sampled queries of a block.

    Args:
      q: sampled queries of all query heads of a KV head, bfloat16 or float16. R is 16, 32, 64 or 128; m is a
        power of two, at most 128.
      at: positions of the queries; each sees the keys 0 … at. A negative position marks an absent query.
      k: first R coordinates of the keys, slot = position. Keys after the last query are not read.
      scale: factor on the scores, above 0.
      keys: keys per block: 32, 64 or 128.
      interpret: whether to run on any device, slowly.

    Returns:
      Shares [B, K, nq, ⌈S / keys⌉] in float32 that sum to 1 for each block of queries; zeros for a block
      without queries.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    check_block_mass(q, at, k, scale=scale, keys=keys)
    return _launch(q, at, k, scale=scale, keys=keys, interpret=interpret)


def check_block_mass(q: Shaped, at: Shaped, k: Shaped, *, scale: float, keys: int) -> None:
    """Check the arguments of `block_mass`; errors are those it documents."""
    common.check_device()
    check_back_end()
    common.check_dtypes(q=q, k=k)
    common.check_shape("q", q, (None,) * 5, "B, K, nq, m, R")
    B, K, nq, m, R = q.shape
    common.check_integers("at", at, (B, nq, m), "B, nq, m")
    common.check_shape("k", k, (B, K, None, R), "B, K, S, R")
    common.check_sizes(B=B, K=K, nq=nq, m=m, S=k.shape[2])
    if R not in WIDTHS:
        raise ValueError(f"R={R}: must be one of {WIDTHS}")
    if m != pl.next_power_of_2(m) or m > ROWS:
        raise ValueError(f"m={m} queries of a block: must be a power of two, at most {ROWS}")
    check_scale(scale)
    if keys not in KEYS:
        raise ValueError(f"keys={keys}: must be one of {KEYS}")
    sizes = {"q": 2 * math.prod(q.shape), "k": 2 * math.prod(k.shape)}
    sizes["the result"] = 4 * B * K * nq * pl.cdiv(k.shape[2], keys)
    for name, size in sizes.items():
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size} bytes: must be at most {MOST_BYTES}; use smaller batches")


@functools.partial(jax.jit, static_argnames=("scale", "keys", "interpret"))
def _launch(q: Array, at: Array, k: Array, *, scale: float, keys: int, interpret: bool) -> Array:
    """Launch `block_mass` on checked arguments."""
    B, K, nq, m, R = q.shape
    together, at = max(1, ROWS // m), jnp.minimum(at, k.shape[2] - 1)
    missing, nk = -nq % together, pl.cdiv(k.shape[2], keys)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0))).reshape(B, K, -1, R)
    at = jnp.pad(at.astype(jnp.int32), ((0, 0), (0, missing), (0, 0)), constant_values=-1)
    share = (at >= 0) / jnp.maximum((at >= 0).sum(-1, keepdims=True), 1)
    tiles = B, K, (nq + missing) // together
    programs = min(PROGRAMS, math.prod(tiles))
    read = min(READ_BACK, pl.next_power_of_2(nk))
    logs = jax.ShapeDtypeStruct((programs, pl.cdiv(nk, read) * read, ROWS), jnp.float32)
    mass = jax.ShapeDtypeStruct((B, K, nq + missing, nk), jnp.float32)
    kernel = functools.partial(
        _kernel, scale=scale * LOG2_E, keys=keys, together=together, tiles=tiles, read=read
    )
    hardware = {"exp2": _exp2, "synchronise": plt.debug_barrier}
    if interpret:
        hardware = {"exp2": jnp.exp2, "synchronise": lambda: None}
    found, _ = pl.pallas_call(
        functools.partial(kernel, **hardware),
        out_shape=(mass, logs),
        grid=(programs,),
        compiler_params=plt.CompilerParams(num_warps=ROWS // ROWS_OF_A_WARP, num_stages=3),
        interpret=interpret,
        name="zdc_block_mass",
    )(q, at.reshape(B, -1), share.astype(jnp.float32).reshape(B, -1), k)
    return found[:, :, :nq]


def _exp2(x: Array) -> Array:
    """Compute exp2 in one instruction; Triton's own takes four, to support results below 2^-126."""
    (found,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return found


def _kernel(
    q_ref: Any,
    at_ref: Any,
    share_ref: Any,
    k_ref: Any,
    mass_ref: Any,
    logs_ref: Any,
    *,
    scale: float,
    keys: int,
    together: int,
    tiles: tuple[int, int, int],
    read: int,
    exp2: Callable[[Array], Array],
    synchronise: Callable[[], None],
) -> None:
    """Process tiles of `ROWS` queries; a program takes every `programs`-th tile."""
    program, programs = pl.program_id(0), logs_ref.shape[0]
    _, K, of_head = tiles

    @pl.loop(0, lax.div(math.prod(tiles) - program + programs - 1, programs))
    def _tile(turn: Array) -> None:
        tile = turn * programs + program
        head, place = lax.div(tile, of_head), lax.rem(tile, of_head)
        # Alternate the order of tiles by head: the last tile of a head has the most keys.
        place = jnp.where(lax.rem(head, 2) == 0, of_head - 1 - place, place)
        b, kv = lax.div(head, K), lax.rem(head, K)
        rows = pl.ds(place * ROWS, ROWS)
        q, at = plt.load(q_ref.at[b, kv, rows]), plt.load(at_ref.at[b, rows])
        blocks = lax.div(at.max() + keys, keys)
        total = _weigh(q, at, k_ref, (b, kv), logs_ref, program, scale=scale, keys=keys, exp2=exp2)
        synchronise()  # Make the other threads' writes visible.
        share, own = plt.load(share_ref.at[b, rows]), pl.ds(place * together, together)

        @pl.loop(0, pl.cdiv(mass_ref.shape[3], read))
        def _read_back(piece: Array) -> None:
            j = piece * read + lax.iota(jnp.int32, read)
            written = plt.load(
                logs_ref.at[program, pl.ds(piece * read, read)],
                mask=jnp.broadcast_to((j < blocks)[:, None], (read, ROWS)),
                other=NEVER,
            )
            shares = jnp.exp2(written - total[None]) * share[None]
            mass = shares.reshape(read, together, ROWS // together).sum(2)
            there = jnp.broadcast_to(j < mass_ref.shape[3], (together, read))
            plt.store(mass_ref.at[b, kv, own, pl.ds(piece * read, read)], mass.T, mask=there)

        synchronise()  # The next tile overwrites the scratch memory.


def _weigh(
    q: Array,
    at: Array,
    k_ref: Any,
    head: tuple[Array, Array],
    logs_ref: Any,
    program: Array,
    *,
    scale: float,
    keys: int,
    exp2: Callable[[Array], Array],
) -> Array:
    """Write log2 of the sum of exp2 of the scores, for each query of q [ROWS, R] and each block of keys.

    `head` is (b, kv).

    Returns:
      The same over all blocks, [ROWS].
    """
    S = k_ref.shape[2]

    def with_block(so_far: tuple[Array, Array], j: Array, *, masked: bool) -> tuple[Array, Array]:
        at_key = j * keys + lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        there = jnp.broadcast_to(at_key < S, (keys, q.shape[1]))
        bound: dict[str, Any] = {"mask": there, "other": 0.0} if masked else {}
        block = plt.load(k_ref.at[*head, pl.ds(j * keys, keys)], **bound)
        scores = lax.dot_general(q, block, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if masked:
            position = j * keys + lax.broadcasted_iota(jnp.int32, (ROWS, keys), 1)
            scores = jnp.where(position <= at[:, None], scores, NEVER)
        highest, total = so_far
        top = scores.max(1) * scale
        added = exp2(scores * scale - top[:, None]).sum(1)
        plt.store(logs_ref.at[program, j], top + jnp.log2(added))
        higher = jnp.maximum(highest, top)
        return higher, total * jnp.exp2(highest - higher) + added * jnp.exp2(top - higher)

    nothing = jnp.full(ROWS, NEVER, jnp.float32), jnp.zeros(ROWS, jnp.float32)
    # Absent queries see what the others see; their share is zero.
    seen_by_all = lax.div(jnp.where(at < 0, S, at).min() + 1, keys)
    seen = lax.div(at.max() + keys, keys)

    def unmasked(j, so_far):
        return with_block(so_far, j, masked=False)

    def masked(j, so_far):
        return with_block(so_far, j, masked=True)

    so_far = lax.fori_loop(0, jnp.minimum(seen_by_all, seen), unmasked, nothing)
    highest, total = lax.fori_loop(jnp.minimum(seen_by_all, seen), seen, masked, so_far)
    return highest + jnp.log2(jnp.maximum(total, 1.0))  # A sum below 1 has no keys.
