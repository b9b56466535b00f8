"""Query heads as the kernel for quantized keys reads them (ours).

The query heads of a KV head are rows of tensor-core products, [B, K, columns, C]. Missing heads are zeros.
What scores gain in a block of keys has the same columns, [B, K, blocks, columns], in base 2. For single
tokens, `turn_and_store` writes these forms, so that no other kernel arranges them.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from kernels_pallas.common import LOG2_E


def columns_of(G: int) -> int:
    """Return the columns of outputs for G query heads per KV head: four, or a multiple of eight."""
    return 4 if G <= 4 else -(-G // 8) * 8


def arrange_queries(q: Float[Array, "B N R"], K: int) -> Float[Array, "B K columns R"]:
    """Arrange queries by KV head."""
    B, N, R = q.shape
    return jnp.pad(q.reshape(B, K, N // K, R), ((0, 0), (0, 0), (0, columns_of(N // K) - N // K), (0, 0)))


def arrange_gains(gains: Float[Array, "B N blocks"], K: int) -> Float[Array, "B K blocks columns"]:
    """Arrange what scores gain in each block, in base 2; missing heads are zeros."""
    B, N, n = gains.shape
    G = N // K
    by_block = (gains * LOG2_E).astype(jnp.float32).reshape(B, K, G, n).swapaxes(2, 3)
    return jnp.pad(by_block, ((0, 0), (0, 0), (0, 0), (0, columns_of(G) - G)))
