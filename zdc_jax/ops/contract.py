"""Contractions with float32 accumulation on every backend."""

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array


def einsum_f32(spec: str, *operands: Array) -> Array:
    """`jnp.einsum` accumulated and returned in float32, whatever the operands' dtype.

    XLA's CPU backend has no 16-bit product with a float32 result, so there the operands are widened first.
    """
    if jax.default_backend() == "cpu":
        operands = tuple(x.astype(jnp.float32) for x in operands)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)
