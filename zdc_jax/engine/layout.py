"""What the cache of an engine has room for: rows, pages, and copies of what rows hold beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zdc_jax.cache.kv_cache import device_bytes, free_bytes
from zdc_jax.cache.paged import Paged
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import CacheMemoryError, PlanError

SHARE = 0.85
"""Of the memory that is free: for the cache, where its size is not given. Steps need the rest."""
TAILS_A_ROW = 2


@dataclass(frozen=True)
class Layout:
    """rows; capacity: tokens of the longest; pages: of `page` tokens each; tails: copies of what a row holds
    beside its pages, None where that is nothing. specs: of the layers, in pages where their methods can."""

    rows: int
    capacity: int
    pages: int
    page: int
    tails: int | None
    specs: tuple[LayerCacheSpec, ...]

    @property
    def has_pages(self) -> bool:
        """Whether rows grow by pages, and are not whole ones."""
        return all(isinstance(spec, Paged) for spec in self.specs)

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
        """For requests of up to `longest` tokens.

        cache_tokens: of all pages; default as many as `rows` of the longest take, or as fit. Methods that do
        not keep tokens by position have no pages, but whole rows. reuse: whether there are to be tails; of
        whole rows there are none.

        Raises:
          PlanError: blocks of a method do not divide a page; `cache_tokens` of a method without pages.
          CacheMemoryError: not even one request of the longest fits, or not so many `cache_tokens`.
        """
        if not all("pages" in spec.clauses for spec in specs):
            if cache_tokens is not None:
                raise PlanError(
                    f"{cache_tokens=}: the plan's method has no pages, but max_sequences={rows} of {longest} "
                    "tokens each; leave cache_tokens out"
                )
            capacity = -(-longest // page) * page
            return cls(rows, capacity, rows, capacity, None, tuple(specs))
        each = -(-longest // page)
        wanted = rows * each if cache_tokens is None else cache_tokens // page
        made = cls(rows, each * page, wanted, page, 0, tuple(specs))
        own = made._own_bytes(specs)
        made = replace(made, tails=(TAILS_A_ROW * rows if reuse else 0) if own else None)
        if (free := free_bytes()) is not None:
            fitting = made._fitting(specs, free if cache_tokens else int(SHARE * free))
            if cache_tokens and wanted > fitting:
                raise CacheMemoryError(
                    f"{cache_tokens=}: memory has room for {fitting * page} beside max_sequences={rows}"
                )
            made = replace(made, pages=min(wanted, fitting))
        if made.pages < each:
            raise CacheMemoryError(
                f"the cache has room for {made.pages * page} tokens, one request may have {longest}: "
                f"need fewer rows, a smaller max_model_len or more cache_tokens, in whole pages of {page}"
            )
        paged = (Paged.of(spec, page=page, pages=made.pages) for spec in specs)
        return replace(made, specs=tuple(paged))

    def _own_bytes(self, specs: Sequence[LayerCacheSpec]) -> int:
        """Of what one row holds beside its pages."""
        return sum(Paged.of(spec, page=self.page, pages=0).bytes(self.capacity) for spec in specs)

    def _fitting(self, specs: Sequence[LayerCacheSpec], limit: int) -> int:
        """Pages that fit into so many bytes, beside rows and tails."""

        def bytes_of(pages):
            return device_bytes(
                [Paged.of(spec, page=self.page, pages=pages) for spec in specs], self.capacity, self.rows
            )

        empty = bytes_of(0) + (self.tails or 0) * self._own_bytes(specs)
        return max(0, limit - empty) // max(1, bytes_of(1) - bytes_of(0))
