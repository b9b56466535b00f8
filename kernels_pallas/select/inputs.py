"""Limits and argument checks of the kernel that selects the largest scores (`select`)."""

import jax.numpy as jnp

from kernels_pallas import common
from kernels_pallas.common import Shaped

LINE = 64
"""Granularity of a row of scores: lines of the kernel's two-dimensional copies."""
THREADS = 128
"""Threads of a CTA; each writes the same number of results."""
MOST = 4096
"""Largest number of results per row, limited by shared memory."""


def check_largest(scores: Shaped, begin: Shaped, end: Shaped, *, k: int) -> None:
    """Check the arguments of `largest`; errors are those it documents."""
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
    common.check_rows(B, begin=begin, end=end)
