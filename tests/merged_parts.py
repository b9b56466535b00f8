"""Attention of single tokens by the decoding kernels, with its parts merged."""

import jax

from kernels_pallas import CodedPass, coded_parts, decode_parts, merged


def decode_attention(q: jax.Array, *cache: jax.Array, **options) -> tuple[jax.Array, jax.Array]:
    """Compute `decode_parts`, and merge them."""
    parts = decode_parts(q, *cache, **options)
    return merged(parts, q.shape[1] // parts.o.shape[1], q.dtype)


def coded_attention(q: jax.Array, *stored, scale: float, **options) -> tuple[jax.Array, jax.Array]:
    """Compute `coded_parts` of a single pass, and merge them."""
    (parts,) = coded_parts([CodedPass(q, *stored, **options)], scale=scale)
    return merged(parts, q.shape[1] // parts.o.shape[1], q.dtype)
