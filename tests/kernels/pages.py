"""Rows of a quantized cache in the pages of a pool."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import Plane

NOBODYS = 3
"""Number of pages that belong to no row."""
NOWHERE = (-1, 1 << 20, 2**31 - 1, -(2**31))
"""Entries of page tables for absent pages."""


class Pool:
    """Planes [B, K, S, ·] as pages in random order.

    Only pages with slots begin ≤ j < end of their row exist. Other entries point nowhere, and pages of no row
    hold anything.
    """

    def __init__(self, planes: Sequence[Plane], begin: np.ndarray, end: np.ndarray, page: int):
        self.page, self.before = page, planes
        rng, first = np.random.default_rng(0), np.arange(0, planes[0].reach.shape[2], page)
        begin, end = begin[:, None], end[:, None]
        self.there = (begin < end) & (first < end) & (first + page > begin)
        count = self.there.sum()
        self.places, self.nobodys = np.split(rng.permutation(count + NOBODYS), [count])
        table = rng.choice(NOWHERE, self.there.shape)
        table[self.there] = self.places
        self.table = jnp.asarray(table, jnp.int32)

        def pool(x: jax.Array) -> jax.Array:
            pages = self._cut(x)
            found = rng.integers(0, 256, (count + NOBODYS, *pages.shape[2:]))
            found[self.places] = pages[self.there]
            return jnp.asarray(found, jnp.uint8)

        self.planes = [of_both(pool, plane) for plane in planes]

    def _cut(self, x: jax.Array) -> np.ndarray:
        """Cut rows [B, K, S, ...] into pages [B, pages, K, page size, ...]."""
        B, K, _, *rest = x.shape
        return np.array(x).reshape(B, K, -1, self.page, *rest).swapaxes(1, 2)

    def rows(self, planes: Sequence[Plane]) -> list[Plane]:
        """Join planes of pages into rows; absent pages have the planes' former contents."""

        def joined(pages: jax.Array, before: jax.Array) -> jax.Array:
            rows = self._cut(before)
            rows[self.there] = np.asarray(pages)[self.places]
            return jnp.asarray(rows.swapaxes(1, 2).reshape(before.shape))

        return [of_both(joined, *pair) for pair in zip(planes, self.before, strict=True)]


def of_both(f: Callable[..., jax.Array], *planes: Plane) -> Plane:
    """Apply a function to levels and to scales."""
    return jax.tree.map(f, *planes)
