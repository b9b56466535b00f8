"""What share of its attention a block of queries gives each block of keys, by a few of them (ours).

A program has the sampled queries of some blocks, of one KV head, and goes over the keys twice: for the
denominators of their softmax, and for the shares. Scores are computed in both, and never written.

Pallas' Triton back end runs it, which JAX is to give up: then `check_block_mass` refuses.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import LOG2_E, NEVER, Shaped
from kernels_pallas.triton import check_back_end, plt

ROWS = 64
"""Sampled queries of a program, at least."""
MOST_ROWS = 128
"""Of a block."""
WIDTHS = (16, 32, 64, 128)
KEYS = (32, 64, 128)
MOST_BYTES = 2**31
"""Of an array: Triton's offsets have 32 bits, and a sign."""


def block_mass(
    q: Float[Array, "B K nq m R"],
    at: Int[Array, "B nq m"],
    k: Float[Array, "B K S R"],
    *,
    scale: float,
    keys: int = 128,
    interpret: bool = False,
) -> Float[Array, "B K nq _"]:
    """The mean over the m queries of a block of what each block of keys has of their softmax, float32.

    Args:
      q: sampled queries, bfloat16 or float16; those of all query heads of a KV head. R is 16, 32, 64 or 128,
        m a power of two, at most 128.
      at: their positions; they see the keys 0 … at that there are. Below 0: the query is not there and
        counts for nothing.
      k: of R coordinates, slot = position; what lies behind the last query is not read.
      scale: factor on the scores.
      keys: of a block: 32, 64 or 128.
      interpret: on any device, slowly.

    Returns:
      [B, K, nq, ⌈S / keys⌉], which add up to 1 in each block of queries that has one, else zeros.

    Raises:
      ValueError: a shape or dtype not allowed, named with its value, before launch.
      NotImplementedError: JAX has no Triton back end.
    """
    check_block_mass(q, at, k, keys=keys)
    mass = _launch(q, at, k, scale=scale, keys=keys, interpret=interpret)
    begins = jnp.arange(mass.shape[-1]) * keys
    seen = begins <= at.max(-1)[:, None, :, None]
    return jnp.where(seen, mass, 0)  # The others were not written.


def check_block_mass(q: Shaped, at: Shaped, k: Shaped, *, keys: int) -> None:
    """Raises what `block_mass` says it raises; arrays are those given to it."""
    common.check_device()
    check_back_end()
    common.check_dtypes(q=q, k=k)
    common.check_shape("q", q, (None,) * 5, "B, K, nq, m, R")
    B, K, nq, m, R = q.shape
    common.check_shape("at", at, (B, nq, m), "B, nq, m")
    common.check_shape("k", k, (B, K, None, R), "B, K, S, R")
    if R not in WIDTHS:
        raise ValueError(f"R={R}: must be one of {WIDTHS}")
    if m != pl.next_power_of_2(m) or m > MOST_ROWS:
        raise ValueError(f"m={m} queries of a block: must be a power of two, at most {MOST_ROWS}")
    if keys not in KEYS:
        raise ValueError(f"keys={keys}: must be one of {KEYS}")
    sizes = {"q": 2 * math.prod(q.shape), "k": 2 * math.prod(k.shape)}
    sizes["the result"] = 4 * B * K * nq * pl.cdiv(k.shape[2], keys)
    for name, size in sizes.items():
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size} bytes: must be at most {MOST_BYTES}, fewer rows or heads")


@functools.partial(jax.jit, static_argnames=("scale", "keys", "interpret"))
def _launch(q: Array, at: Array, k: Array, *, scale: float, keys: int, interpret: bool) -> Array:
    """`block_mass`, checked, but for blocks that no query of a program sees."""
    B, K, nq, m, R = q.shape
    together, at = max(1, ROWS // m), jnp.minimum(at, k.shape[2] - 1)
    missing = -nq % together
    q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0))).reshape(B, K, -1, R)
    at = jnp.pad(at.astype(jnp.int32), ((0, 0), (0, missing), (0, 0)), constant_values=-1)
    share = (at >= 0) / jnp.maximum((at >= 0).sum(-1, keepdims=True), 1)
    found = pl.pallas_call(
        functools.partial(_kernel, scale=scale * LOG2_E, keys=keys, rows=together * m, together=together),
        out_shape=jax.ShapeDtypeStruct((B, K, nq + missing, pl.cdiv(k.shape[2], keys)), jnp.float32),
        grid=(B, K, (nq + missing) // together),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="zdc_block_mass",
    )(q, at.reshape(B, -1), share.astype(jnp.float32).reshape(B, -1), k)
    return found[:, :, :nq]


def _kernel(
    q_ref: Any,
    at_ref: Any,
    share_ref: Any,
    k_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    keys: int,
    rows: int,
    together: int,
) -> None:
    b, kv, first = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    own = pl.ds(first * rows, rows)
    q, at = plt.load(q_ref.at[b, kv, own]), plt.load(at_ref.at[b, own])
    S = k_ref.shape[2]

    def scores(j: Array) -> Array:
        """Of a block of keys, in powers of two."""
        at_key = j * keys + lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        block = plt.load(k_ref.at[b, kv, pl.ds(j * keys, keys)], mask=at_key < S, other=0.0)
        found = (
            lax.dot_general(q, block, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
        )
        position = j * keys + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        return jnp.where(position <= at[:, None], found, NEVER)

    def denominators(j: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        highest, total = so_far
        found = scores(j)
        higher = jnp.maximum(highest, found.max(1))
        return higher, total * jnp.exp2(highest - higher) + jnp.exp2(found - higher[:, None]).sum(1)

    blocks = lax.div(at.max() + keys, keys)
    nothing = jnp.full(rows, NEVER, jnp.float32), jnp.zeros(rows, jnp.float32)
    highest, total = lax.fori_loop(0, blocks, denominators, nothing)
    factor = plt.load(share_ref.at[b, own]) / jnp.maximum(total, 1.0)

    @pl.loop(0, blocks)
    def _(j: Array) -> None:
        shares = jnp.exp2(scores(j) - highest[:, None]).sum(1) * factor
        mass = shares.reshape(together, rows // together).sum(1)
        plt.store(out_ref.at[b, kv, pl.ds(first * together, together), j], mass)
