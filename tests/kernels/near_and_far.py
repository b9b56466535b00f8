"""Prefill of far keys and of near keys from arrays of their own: cases, and a check of one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from brute_force import check, prefill_near_and_far

from kernels_pallas import Trailing, prefill_attention

BF16, F32 = jnp.bfloat16, jnp.float32
NEAR_AND_FAR = {
    "prompts from the start": (300, (0, 0), (300, 170), 128, 4),
    "later chunks": (200, (900, 333), (200, 131), 128, 4),
    "a window that ends within blocks": (190, (77, 500), (190, 150), 100, 4),
    "a window of one": (70, (3, 700), (70, 65), 1, 4),
    "a wide window": (140, (620, 64), (140, 140), 512, 64),
    "no sinks": (150, (128, 0), (150, 0), 64, 0),
}
"""T, starts, number of queries in each row, window and sinks."""


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def check_needed(attend, starts, lengths, tile):
    """Check that queries before the last one are left out, where they fill a tile of `tile` queries.

    `attend` computes attention with these options. Other queries have the same bits as without the option.
    """
    last = lengths - 1
    for found, whole in zip(attend(needed_from=jnp.asarray(last)), attend(), strict=True):
        # The log-sum-exp [B, N, T] gets the order of the output [B, T, N, Z].
        found, whole = (np.asarray(x, np.float32) for x in (found, whole))
        if found.ndim == 3:
            found, whole = (np.exp(x.swapaxes(1, 2)) for x in (found, whole))
        for b, first in enumerate((last - starts) // tile * tile):
            np.testing.assert_array_equal(found[b, max(first, 0) :], whole[b, max(first, 0) :])
            assert not found[b, : max(first, 0)].any()


def near_and_far(T, starts, counts, window, sinks, config, page=0, H=16, tile=0):
    """Check attention to far keys, and to near keys whose arrays begin at a multiple of 64.

    With `tile`, the queries of a tile, `check_needed` follows.
    """
    B, N, K, starts = 2, 2, 1, np.array(starts)
    S = -(-(int(max(starts)) + T) // 128) * 128
    q, far = draw(0, B, T, N, H), (draw(1, B, K, S, H), draw(2, B, K, S, H))
    near = draw(3, B, K, S, H), draw(4, B, K, S, H)
    gains = 2 * draw(5, B, T, N, S // 64).astype(F32)
    base = np.maximum(starts - window + 1, 0) // 64 * 64
    rows = max(starts - base) + T

    def cut(x):
        return jnp.stack([jnp.roll(x[b], -base[b], axis=1)[:, :rows] for b in range(B)])

    apart = Trailing(cut(near[0]), cut(near[1]), jnp.asarray(base, jnp.int32))
    options = {"scale": 0.3, "starts": starts, "lengths": starts + counts, "window": window}
    wanted = prefill_near_and_far(q, far, near, gains=gains, sinks=sinks, **options)
    far = [x.at[:, :, :sinks].set(y[:, :, :sinks]) for x, y in zip(far, near, strict=True)]
    table = None
    if page:
        pages = B * S // page
        order = np.random.default_rng(0).permutation(pages)
        far = [
            x.reshape(B, K, S // page, page, H).swapaxes(1, 2).reshape(pages, K, page, H)[order] for x in far
        ]
        table = jnp.asarray(np.argsort(order).reshape(B, -1), jnp.int32)
    options |= {"keys": "far", "near": apart, "block_table": table, "block_scores": gains, "config": config}
    attend = partial(prefill_attention, q, *far, **options)
    check(*attend(), *wanted, BF16)
    if tile:
        check_needed(attend, starts, options["lengths"], tile)
