"""Rows of a cache in pages: one pool, and a table that says which page has which tokens of which row (ours).

One table serves all layers: a page's number is the same in each layer's pool, whatever the layer keeps. After
Kwon et al. 2023 (PagedAttention).
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
    """What stands for rows [B, K, S, …] where they lie in pages.

    pool: [P, K, slots, …], `slots` of a page. table: [B, n] int32, S = n · slots; entries of pages that a row
    has not reached are any page's number.
    """

    pool: Array
    table: Int[Array, "B n"]

    @property
    def slots(self) -> int:
        """S."""
        return self.pool.shape[2] * self.table.shape[1]

    def rows(self) -> Array:
        """The rows themselves: a copy."""
        (B, n), (K, slots, *rest) = self.table.shape, self.pool.shape[1:]
        pages = jnp.take(self.pool, self.table.ravel(), axis=0, mode="clip").reshape(B, n, K, slots, *rest)
        return pages.swapaxes(1, 2).reshape(B, K, n * slots, *rest)

    def put_token(self, x: Shaped[Array, "B K C"], slot: Int[Array, " B"]) -> "Pages":
        """With x in one slot of each row; those past the end take nothing."""
        P, _, slots, _ = self.pool.shape
        n = self.table.shape[1]
        page = jnp.take_along_axis(self.table, jnp.minimum(slot // slots, n - 1)[:, None], axis=1)[:, 0]
        page = jnp.where(slot < self.slots, page, P)
        return Pages(self.pool.at[page, :, slot % slots].set(x, mode="drop"), self.table)

    def put_piece(
        self, x: Shaped[Array, "B T K C"], start: Int[Array, " B"], end: Int[Array, " B"]
    ) -> "Pages":
        """With those x that stand below `end`, in the slots from `start` on, of one token each.

        No two rows may have a page together that either writes.
        """
        T, slots = x.shape[1], self.pool.shape[2]
        which, at = self._written(start, end, tokens=T, page=slots)
        token = (which[..., None] * slots + jnp.arange(slots)).reshape(len(start), -1) - start[:, None]
        new = (token >= 0) & (token < T) & (token < (end - start)[:, None])

        def as_pages(x):
            return x.reshape(len(at), slots, *x.shape[2:]).swapaxes(1, 2)

        x = jnp.take_along_axis(x, jnp.clip(token, 0, T - 1)[:, :, None, None], axis=1)
        # Read before they are written over, so that XLA writes in place.
        old, pool = lax.optimization_barrier((jnp.take(self.pool, at, axis=0, mode="clip"), self.pool))
        found = jnp.where(as_pages(new[:, :, None, None]), as_pages(x), old)
        return Pages(pool.at[at].set(found, mode="drop", unique_indices=True), self.table)

    def put_rows(
        self, rows: Array, start: Int[Array, " B"], end: Int[Array, " B"], *, tokens: int, page: int
    ) -> Array:
        """The pool with those pages of `rows` that hold tokens from `start` to `end`.

        rows: of no fewer slots than the table. tokens: of the longest span. page: tokens of a page. No two
        rows may have such a page together.
        """
        B, n = self.table.shape
        _, K, slots, *rest = self.pool.shape
        rows = rows[:, :, : n * slots]
        which, at = self._written(start, end, tokens=tokens, page=page)
        index = which.reshape(B, 1, -1, *[1] * (1 + len(rest)))
        found = jnp.take_along_axis(rows.reshape(B, K, n, slots, *rest), index, axis=2).swapaxes(1, 2)
        return self.pool.at[at].set(found.reshape(-1, K, slots, *rest), mode="drop")

    def _written(
        self, start: Int[Array, " B"], end: Int[Array, " B"], *, tokens: int, page: int
    ) -> tuple[Int[Array, "B m"], Int[Array, " B*m"]]:
        """Which of a row's pages hold tokens from `start` to `end`, and their numbers in the pool.

        No page's number, each another, where there are fewer than m of them.
        """
        n, P = self.table.shape[1], self.pool.shape[0]
        which = start[:, None] // page + jnp.arange(min(n, (tokens + page - 2) // page + 1))
        written = (which * page < end[:, None]) & (start < end)[:, None]
        which = jnp.minimum(which, n - 1)
        nowhere = P + jnp.arange(which.size).reshape(which.shape)
        return which, jnp.where(written, jnp.take_along_axis(self.table, which, axis=1), nowhere).ravel()


def pools_of(state: Any) -> tuple[Any, Array | None]:
    """A tree with the pool of `Pages` in the place of each, and their table; None if there are no pages."""

    def is_pages(x):
        return isinstance(x, Pages)

    tables = [x.table for x in jax.tree.leaves(state, is_leaf=is_pages) if is_pages(x)]
    pools = jax.tree.map(lambda x: x.pool if is_pages(x) else x, state, is_leaf=is_pages)
    return pools, tables[0] if tables else None


def in_pages(pools: Any, table: Array | None) -> Any:
    """The reverse, of a tree of pools alone."""
    return pools if table is None else jax.tree.map(lambda pool: Pages(pool, table), pools)
