"""Contractions with float32 accumulation on every backend, and a faster product of a single token."""

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array


def einsum_f32(spec: str, *operands: Array) -> Array:
    """Compute `jnp.einsum` with float32 accumulation and a float32 result, whatever the operands' dtype.

    XLA's CPU backend has no 16-bit product with a float32 result, so operands are widened first there.
    """
    if jax.default_backend() == "cpu":
        operands = tuple(x.astype(jnp.float32) for x in operands)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def duplicate_single_token(x: Array) -> Array:
    """Repeat a single 16-bit token x [1, 1, D] as [2, 1, D]; return any other `x` unchanged.

    XLA compiles a vector-matrix product as a sum. For smaller weights on a GPU it writes the terms to memory
    and reads them again, three times the traffic of a matrix product. The sum is slower on CPUs as well. Two
    equal rows make it a matrix product, which saves about an eighth of a decoded token's time (8B model,
    H100).
    """
    if x.shape[:2] != (1, 1) or x.dtype.itemsize != 2:
        return x
    return jnp.broadcast_to(x, (2, *x.shape[1:]))
