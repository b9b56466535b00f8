"""Paged storage: one pool of pages, and a table of the pages of each sequence (ours).

One table serves all layers: a page has the same index in the pool of each layer, whatever the layer stores.
After Kwon et al. 2023 (PagedAttention).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int, Shaped

from zdc_jax.axes import Array


@partial(jax.tree_util.register_dataclass, data_fields=["pool", "table"], meta_fields=[])
@dataclass(frozen=True)
class Pages:
    """Paged array that stands for sequences [B, K, S, …].

    Attributes:
      pool: pages of all sequences, [P, K, slots, …], with `slots` slots per page.
      table: pages of each sequence, [B, n] int32, where S = n · slots. Entries past the last page of a
        sequence may be the index of any page.
    """

    pool: Array
    table: Int[Array, "B n"]

    @property
    def slots(self) -> int:
        """Slots S of a sequence."""
        return self.pool.shape[2] * self.table.shape[1]

    def rows(self) -> Array:
        """Return the sequences as a contiguous copy [B, K, S, …]."""
        (B, n), (K, slots, *rest) = self.table.shape, self.pool.shape[1:]
        pages = jnp.take(self.pool, self.table.ravel(), axis=0, mode="clip").reshape(B, n, K, slots, *rest)
        return pages.swapaxes(1, 2).reshape(B, K, n * slots, *rest)

    def put_token(self, x: Shaped[Array, "B K C"], slot: Int[Array, " B"]) -> "Pages":
        """Write one token x per sequence into its slot; slots past the end drop it."""
        P, _, slots, _ = self.pool.shape
        n = self.table.shape[1]
        page = jnp.take_along_axis(self.table, jnp.minimum(slot // slots, n - 1)[:, None], axis=1)[:, 0]
        page = jnp.where(slot < self.slots, page, P)
        return Pages(self.pool.at[page, :, slot % slots].set(x, mode="drop"), self.table)

    def put_chunk(
        self, x: Shaped[Array, "B T K C"], start: Int[Array, " B"], end: Int[Array, " B"]
    ) -> "Pages":
        """Write the tokens x below `end` into consecutive slots from `start` on.

        A slot holds one token. Two sequences must not share a page that either of them writes.
        """
        T, slots = x.shape[1], self.pool.shape[2]
        local, at = self._find_pages(start, end, tokens=T, page=slots)
        token = (local[..., None] * slots + jnp.arange(slots)).reshape(len(start), -1) - start[:, None]
        new = (token >= 0) & (token < T) & (token < (end - start)[:, None])

        def split_pages(x: Array) -> Array:
            return x.reshape(len(at), slots, *x.shape[2:]).swapaxes(1, 2)

        x = jnp.take_along_axis(x, jnp.clip(token, 0, T - 1)[:, :, None, None], axis=1)
        # The barrier orders the read before the write, so that XLA writes in place.
        old, pool = lax.optimization_barrier((jnp.take(self.pool, at, axis=0, mode="clip"), self.pool))
        pages = jnp.where(split_pages(new[:, :, None, None]), split_pages(x), old)
        return Pages(pool.at[at].set(pages, mode="drop", unique_indices=True), self.table)

    def put_rows(
        self, rows: Array, start: Int[Array, " B"], end: Int[Array, " B"], *, tokens: int, page: int
    ) -> Array:
        """Return the pool with the pages of `rows` that hold tokens from `start` to `end` written back.

        Two sequences must not share such a page.

        Args:
          rows: contiguous sequences, with at least as many slots as the table covers.
          start, end: span of written tokens in each sequence.
          tokens: length of the longest span.
          page: tokens per page.
        """
        B, n = self.table.shape
        _, K, slots, *rest = self.pool.shape
        rows = rows[:, :, : n * slots]
        local, at = self._find_pages(start, end, tokens=tokens, page=page)
        index = local.reshape(B, 1, -1, *[1] * (1 + len(rest)))
        pages = jnp.take_along_axis(rows.reshape(B, K, n, slots, *rest), index, axis=2).swapaxes(1, 2)
        return self.pool.at[at].set(pages.reshape(-1, K, slots, *rest), mode="drop")

    def _find_pages(
        self, start: Int[Array, " B"], end: Int[Array, " B"], *, tokens: int, page: int
    ) -> tuple[Int[Array, "B m"], Int[Array, " B*m"]]:
        """Return the indices of the pages that hold tokens from `start` to `end`.

        The first array counts pages within a sequence, the second one within the pool. Where a sequence has
        fewer than m such pages, the pool index is out of range, and different for each entry.
        """
        n, P = self.table.shape[1], self.pool.shape[0]
        local = start[:, None] // page + jnp.arange(min(n, (tokens + page - 2) // page + 1))
        written = (local * page < end[:, None]) & (start < end)[:, None]
        local = jnp.minimum(local, n - 1)
        outside = P + jnp.arange(local.size).reshape(local.shape)
        return local, jnp.where(written, jnp.take_along_axis(self.table, local, axis=1), outside).ravel()


def count_slots(tree: Any) -> int:
    """Return the slots of a tree whose leaves are arrays [B, K, S, …] or `Pages` of them."""
    first = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Pages))[0]
    slots: int = first.slots if isinstance(first, Pages) else first.shape[2]
    return slots


def pools_of(state: Any) -> tuple[Any, Array | None]:
    """Return a tree with each `Pages` replaced by its pool, and the page table, or None without pages."""

    def is_pages(x: Any) -> bool:
        return isinstance(x, Pages)

    tables = [x.table for x in jax.tree.leaves(state, is_leaf=is_pages) if is_pages(x)]
    pools = jax.tree.map(lambda x: x.pool if is_pages(x) else x, state, is_leaf=is_pages)
    return pools, tables[0] if tables else None


def in_pages(pools: Any, table: Array | None) -> Any:
    """Wrap the leaves of a tree of pools as `Pages`; the inverse of `pools_of`."""
    return pools if table is None else jax.tree.map(lambda pool: Pages(pool, table), pools)
