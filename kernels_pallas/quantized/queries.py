"""Query heads as the kernel for quantized keys reads them, and the order of their coordinates (ours).

The query heads of a KV head are columns of tensor-core products, [B, K, columns, C]. Missing heads are zeros.
Coordinates of each plane of keys are in the order of `unpack.columns`. What scores gain in a block of keys
has the same columns, [B, K, blocks, columns], in base 2. For single tokens, `turn_and_store` and
`score_blocks` write these forms, so that no other kernel arranges them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from kernels_pallas.common import LOG2_E
from kernels_pallas.quantized.unpack import column_of, columns

PlaneForm = tuple[int, int]
"""Coordinates and bits of one plane of keys."""


def columns_of(G: int) -> int:
    """Return the columns of the products for G query heads per KV head, a multiple of eight."""
    return -(-G // 8) * 8


def arrange_queries(
    q: Float[Array, "B N R"], K: int, planes: Sequence[PlaneForm]
) -> Float[Array, "B K columns R"]:
    """Arrange queries for keys in these planes."""
    B, N, _ = q.shape
    begins = np.cumsum([0, *(C for C, _ in planes)])
    order = np.concatenate([begin + columns(*form) for begin, form in zip(begins, planes, strict=False)])
    groups = q[..., order].reshape(B, K, N // K, -1)
    return jnp.pad(groups, ((0, 0), (0, 0), (0, columns_of(N // K) - N // K), (0, 0)))


def arrange_gains(gains: Float[Array, "B N blocks"], K: int) -> Float[Array, "B K blocks columns"]:
    """Arrange what scores gain in each block, in base 2; missing heads are zeros."""
    B, N, n = gains.shape
    G = N // K
    by_block = (gains * LOG2_E).astype(jnp.float32).reshape(B, K, G, n).swapaxes(2, 3)
    return jnp.pad(by_block, ((0, 0), (0, 0), (0, 0), (0, columns_of(G) - G)))


def place_of(coordinate: Array, planes: Sequence[PlaneForm]) -> Array:
    """Return the index of a coordinate, int32, among the arranged ones; past all planes it is unchanged."""
    place, begin = coordinate, 0
    for C, bits in planes:
        inside = (coordinate >= begin) & (coordinate < begin + C)
        place = jnp.where(inside, begin + column_of(coordinate - begin, C, bits), place)
        begin += C
    return place
