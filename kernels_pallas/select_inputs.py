"""What the kernel that selects the largest scores takes, and its refusals before launch."""

import jax.numpy as jnp

from kernels_pallas import common
from kernels_pallas.common import Shaped

LINE = 64
"""Scores that a row must be a multiple of: lines of its two-dimensional copies."""
THREADS = 128
"""That each write the same number of results."""
MOST = 4096
"""Results of a row, which shared memory holds."""


def check_largest(scores: Shaped, begin: Shaped, end: Shaped, *, k: int) -> None:
    """Raises what `largest` says it raises; arrays and options are those given to it."""
    common.check_device()
    common.check_shape("scores", scores, (None, None, None), "B, K, S")
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores has dtype {scores.dtype}: must be float32")
    B, K, S = scores.shape
    common.check_sizes(B=B, K=K)
    if S % LINE or not S:
        raise ValueError(f"S={S} slots: must be a multiple of {LINE}, not zero")
    if k % THREADS or not 0 < k <= MOST:
        raise ValueError(f"k={k}: must be a multiple of {THREADS} from {THREADS} to {MOST}")
    for name, x in (("begin", begin), ("end", end)):
        common.check_integers(name, x, (B,), "B")
