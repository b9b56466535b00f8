"""Size and layout of an engine's cache: sequences, pages, and snapshots of state outside pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zdc_jax.cache.kv_cache import device_bytes, free_bytes
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import CacheMemoryError, PlanError

SHARE = 0.85
"""Share of the free memory that the cache takes by default; steps need the rest."""
TAILS_A_ROW = 2
"""Snapshots for each sequence of the batch."""


@dataclass(frozen=True)
class Layout:
    """Layout of an engine's cache.

    Methods that store tokens by position divide them into pages. Their other state, such as the ring of
    recent tokens, belongs to a sequence; it can be copied to a snapshot ("tail") at the end of a page.

    Attributes:
      rows: sequences in the batch.
      capacity: tokens of the longest sequence, a multiple of `page`.
      pages: number of pages.
      page: tokens of a page.
      tails: number of snapshots; None if sequences have no state outside pages.
      specs: cache specs of the layers, paged if all methods support pages.
    """

    rows: int
    capacity: int
    pages: int
    page: int
    tails: int | None
    specs: tuple[LayerCacheSpec, ...]

    @property
    def has_pages(self) -> bool:
        """Whether sequences grow by pages, rather than reserving their capacity."""
        return all(isinstance(spec, Paged) for spec in self.specs)

    @property
    def tokens(self) -> int:
        """Tokens of all requests together that the cache has room for."""
        return self.pages * self.page

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the cache grows by with each token of a sequence; its capacity's share without pages."""
        paged = [spec for spec in self.specs if isinstance(spec, Paged)]
        if len(paged) < len(self.specs):
            return device_bytes(self.specs, self.capacity) // self.capacity

        def count_bytes(pages: int) -> int:
            return device_bytes([replace(spec, pages=pages) for spec in paged], self.capacity)

        return (count_bytes(2) - count_bytes(1)) // self.page

    @classmethod
    def of(
        cls,
        specs: Sequence[LayerCacheSpec],
        *,
        rows: int,
        longest: int,
        page: int,
        cache_tokens: int | None,
        reuse: bool,
    ) -> "Layout":
        """Choose a layout that fits into free memory.

        Methods that do not store tokens by position have no pages; each sequence reserves its capacity.

        Args:
          specs: cache specs of the layers.
          rows: sequences in the batch.
          longest: most tokens of a request.
          page: tokens of a page.
          cache_tokens: tokens of all pages; default enough for `rows` longest requests, or what fits.
          reuse: reserve snapshots, so that prefixes can be shared between requests.

        Raises:
          PlanError: blocks of a method do not divide a page, or `cache_tokens` is set for a method without
            pages.
          CacheMemoryError: `cache_tokens`, or one request of the longest, do not fit.
        """
        if not all("pages" in spec.clauses for spec in specs):
            if cache_tokens is not None:
                raise PlanError(
                    f"{cache_tokens=}: the plan's method has no pages and reserves max_sequences={rows} "
                    f"times {longest} tokens; leave out cache_tokens"
                )
            capacity = -(-longest // page) * page
            return cls(rows, capacity, rows, capacity, None, tuple(specs))
        pages_each = -(-longest // page)
        wanted = rows * pages_each if cache_tokens is None else cache_tokens // page
        tails = TAILS_A_ROW * rows if reuse else 0
        layout = cls(rows, pages_each * page, wanted, page, tails, tuple(specs))
        if not layout._unpaged_bytes(specs):
            layout = replace(layout, tails=None)
        if (free := free_bytes()) is not None:
            fitting = layout._count_fitting_pages(specs, free if cache_tokens else int(SHARE * free))
            if cache_tokens and wanted > fitting:
                raise CacheMemoryError(
                    f"{cache_tokens=}: memory has room for {fitting * page} tokens with "
                    f"max_sequences={rows}; lower one of them"
                )
            layout = replace(layout, pages=min(wanted, fitting))
        if layout.pages < pages_each:
            raise CacheMemoryError(
                f"max_model_len={longest}: the cache has room for {layout.pages * page} tokens, less than "
                "one request; lower max_sequences or max_model_len"
            )
        paged = (Paged.of(spec, page=page, pages=layout.pages) for spec in specs)
        return replace(layout, specs=tuple(paged))

    def _unpaged_bytes(self, specs: Sequence[LayerCacheSpec]) -> int:
        """Return the bytes of one sequence's state outside pages."""
        return sum(Paged.of(spec, page=self.page, pages=0).bytes(self.capacity) for spec in specs)

    def _count_fitting_pages(self, specs: Sequence[LayerCacheSpec], limit: int) -> int:
        """Return how many pages fit into `limit` bytes, together with unpaged state and snapshots."""

        def count_bytes(pages: int) -> int:
            paged = [Paged.of(spec, page=self.page, pages=pages) for spec in specs]
            return device_bytes(paged, self.capacity, self.rows)

        empty = count_bytes(0) + (self.tails or 0) * self._unpaged_bytes(specs)
        return max(0, limit - empty) // max(1, count_bytes(1) - count_bytes(0))
