"""Lists of key blocks as long as a choice made them on a small model, for longer prompts of a large shape.

Up to the judged context a list is as long as it was there, layer by layer and head by head; behind it, it
grows with its position to the power that was fitted to all heads (`benchmarks.quality.block_lists`). A head
of the shape takes the counts of the small model's head at the same share of the heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.quality.key_blocks import BlockChoice, as_lists, best_blocks, near_blocks, visible_blocks
from kernels_pallas import BlockLists


def counts_at(row: dict[str, Any], tokens: int, heads: int, size: int) -> np.ndarray:
    """Blocks in the lists of a prompt of so many tokens, [layers, heads, ⌈tokens / size⌉] int32.

    Args:
      row: of `block-lists-*.json`, with `counts` by layer, KV head and query block, and `exponent`.
      size: of its blocks, in queries and keys.
    """
    counts, exponent = np.array(row["counts"]), row["exponent"]
    nq, longer = counts.shape[-1], -(-tokens // size)
    recent = np.arange(nq - nq // 4, nq)
    level = (counts[..., recent] * (nq / (recent + 1)) ** exponent).mean(-1, keepdims=True)
    behind = level * ((np.arange(nq, longer) + 1) / nq) ** exponent
    grown = np.concatenate([counts[..., :longer], behind], axis=-1)
    listed = np.ceil(np.minimum(grown, np.arange(1, longer + 1))).astype(np.int32)
    return listed[:, np.arange(heads) * counts.shape[1] // heads]


def random_lists(key: jax.Array, counts: jax.Array, tokens: int, choice: BlockChoice) -> BlockLists:
    """So many blocks [K, nq] in each list, near ones always, the others anywhere: a batch of one."""
    start, end = jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32)
    visible = visible_blocks(start, end, tokens, tokens, choice.blocks)[:, None]
    always = visible & near_blocks(start, end, tokens, tokens, choice)[:, None]
    mass = jax.random.uniform(key, (1, *counts.shape, visible.shape[-1]))
    visible, always = (jnp.broadcast_to(x, mass.shape) for x in (visible, always))
    return as_lists(best_blocks(mass, visible, always, counts[None]))
