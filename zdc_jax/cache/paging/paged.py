"""A spec that stores the tokens of any cache by position in pages (ours)."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import device_refusal
from kernels_pallas.triton import count_addressable
from zdc_jax.axes import Array
from zdc_jax.cache.paging.pages import Pages, pools_of
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, Snapshots, State, move_shift
from zdc_jax.errors import PlanError
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys

LONG = 2**24
"""Capacity above all windows. Leaves that still grow with a larger capacity store tokens by position."""


@dataclass(frozen=True, kw_only=True)
class Paged(LayerCacheSpec):
    """Spec whose arrays by position are one pool of pages, without the axis B.

    Rings do not grow with the capacity. They keep the axis B and stay outside the pool. `attend` locates
    tokens with `Call.table`. Where kernels do not read pages, the sequences of a call are copied out of their
    pages, and pages with new tokens are copied back.

    Attributes:
      spec: spec of the same layer without pages.
      page: tokens per page.
      pages: pages in the pool.

    Raises:
      PlanError: `spec` does not have the clause `pages`, or its blocks do not divide a page.
    """

    spec: LayerCacheSpec
    page: int
    pages: int

    def __post_init__(self) -> None:
        kind = type(self.spec).__name__
        if "pages" not in self.spec.clauses:
            raise PlanError(f"spec={kind}: pages need tokens stored by position; choose another method")
        if any(slots.denominator > 1 for slots in _count_page_slots(self.spec, self.page)):
            raise PlanError(f"page={self.page}: must be a multiple of the block size of {kind}")

    @classmethod
    def of(cls, spec: LayerCacheSpec, *, page: int, pages: int) -> "Paged":
        """Return `spec` with its tokens in pages."""
        return cls(**spec.base_fields, spec=spec, page=page, pages=pages)

    def pooled(self, state: State) -> list[bool]:
        """Return, for each leaf, whether it is a page pool."""
        return [slots > 0 for slots in _count_page_slots(self.spec, self.page)]

    def create(self, batch: int, capacity: int) -> State:
        """Create an empty pool, and the arrays [B, …] of leaves that do not store tokens by position."""
        leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: self.spec.create(batch, capacity)))
        arrays = []
        for leaf, slots in zip(leaves, _count_page_slots(self.spec, self.page), strict=True):
            K, rest = leaf.shape[1], leaf.shape[3:]
            shape = (self.pages, K, int(slots), *rest) if slots else leaf.shape
            arrays.append(jnp.zeros(shape, leaf.dtype))
        return jax.tree.unflatten(tree, arrays)

    def write(self, state: State, new: NewTokens) -> State:
        """Raise `NotImplementedError`: only `attend` receives the page table."""
        raise NotImplementedError("a paged layer stores tokens only in `attend`; call `attend` instead")

    def attend(self, state: State, q: Array, new: NewTokens, aux: Any, call: Call) -> Attended:
        table, pooled = call.table, self.pooled(state)
        if call.marks is not None:
            q, new = new.rotate(q, call)  # `write_tail` takes the stored form of keys.
        if table is not None:
            new, call = move_shift(new, call, table.shape[1] * self.page)
        if not any(pooled):
            tail = None if call.marks is None else self._take_tail(state, new, call.marks)
            return self.spec.attend(state, q, new, aux, call)._replace(tail=tail)
        assert table is not None
        paged_state = self._with_pages(state, table)
        pages, tree = jax.tree.flatten(paged_state, is_leaf=lambda leaf: isinstance(leaf, Pages))
        tail = None if call.marks is None else self._take_tail(paged_state, new, call.marks)
        if self.spec.reads_pages(paged_state, q, new.v, call):
            attended = self.spec.attend(paged_state, q, new, aux, call)
            return attended._replace(state=pools_of(attended.state)[0], tail=tail)
        rows = [leaf.rows() if isinstance(leaf, Pages) else leaf for leaf in pages]
        attended = self.spec.attend(jax.tree.unflatten(tree, rows), q, new, aux, call)

        def write_back(old: Pages, rows: Array) -> Array:
            tokens = new.positions.shape[1]
            return old.put_rows(rows, new.start, new.end, tokens=tokens, page=self.page)

        written = [
            write_back(old, leaf) if isinstance(old, Pages) else leaf
            for old, leaf in zip(pages, jax.tree.leaves(attended.state), strict=True)
        ]
        return attended._replace(state=jax.tree.unflatten(tree, written), tail=tail)

    def attend_sequences(
        self,
        state: State,
        rows: Array,
        q: Array,
        new: NewTokens,
        aux: Any,
        call: Call,
        snapshots: Snapshots | None = None,
    ) -> tuple[Attended, list[Array]]:
        if call.table is not None:
            paged_state = self._with_pages(state, call.table)
            placed = self.spec.attend_in_place(paged_state, rows, q, new, call, snapshots)
            if placed is not None:
                attended, copies = placed
                return attended._replace(state=pools_of(attended.state)[0], aux=aux), copies
        return super().attend_sequences(state, rows, q, new, aux, call, snapshots)

    def _with_pages(self, state: State, table: Array) -> State:
        """Return a state whose pools have the page table."""

        def add_table(is_pool: bool, leaf: Array) -> Array | Pages:
            return Pages(leaf, table) if is_pool else leaf

        return self.map_leaves(add_table, state)

    def _take_tail(self, state: State, new: NewTokens, marks: Array) -> list[Array]:
        """Return the leaves outside pages when sequences have `marks` tokens; `state` is that before."""
        written = self.spec.write_tail(state, replace(new, end=marks))
        leaves = jax.tree.leaves(written, is_leaf=lambda leaf: isinstance(leaf, Pages))
        return [leaf for leaf, pool in zip(leaves, self.pooled(state), strict=True) if not pool]

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Any]:
        return self.spec.project(attention, x, positions, implementation)

    def put_prompt(self, state: State, rows: State, tokens: int, end: Array, table: Array) -> State:
        """Store prompts that were read without pages.

        Args:
          state: paged state to write to.
          rows: state of `spec` that holds the prompts.
          tokens: length of the longest prompt.
          end: length of each prompt.
          table: page table of the sequences.
        """
        start = jnp.zeros_like(end)

        def put(is_pool: bool, old: Array, new: Array) -> Array:
            if not is_pool:
                return new
            return Pages(old, table).put_rows(new, start, end, tokens=tokens, page=self.page)

        return self.map_leaves(put, state, rows)

    def first_rows(self, state: State, count: int) -> State:
        """Return the state of the first `count` sequences, or of all if `attend` needs no copy of these."""
        return state if self.spec.takes_more_rings else super().first_rows(state, count)

    @property
    def stores_in_place(self) -> bool:
        return self.spec.stores_in_place

    def count_sharing(self, layers: int, batch: int, capacity: int) -> int:
        """Return how many of `layers` equal layers can share the arrays of `create`, at least 1.

        XLA may copy a shared array that it writes itself, so that kernels must write all of them. They cannot
        address arrays of some sizes. Where they refuse a call, XLA reads and writes a layer's own part.
        """
        if not self.spec.codes_in_place or device_refusal(jax.ShapeDtypeStruct((), self.dtype)):
            return 1
        leaves = jax.tree.leaves(jax.eval_shape(lambda: self.create(batch, capacity)))
        return count_addressable(layers, [leaf.size * leaf.dtype.itemsize for leaf in leaves])

    def on_heads(self, num_kv_heads: int) -> "Paged":
        return replace(self, num_kv_heads=num_kv_heads, spec=self.spec.on_heads(num_kv_heads))

    def host_bytes(self, capacity: int, batch: int = 1) -> int:
        return self.spec.host_bytes(capacity, batch)

    @property
    def queries_apart(self) -> bool:
        return self.spec.queries_apart

    @property
    def fixed_bytes(self) -> int:
        return self.spec.fixed_bytes


@lru_cache(maxsize=4096)
def _count_page_slots(spec: LayerCacheSpec, page: int) -> tuple[Fraction, ...]:
    """Return the slots that a page has in each leaf; 0 for leaves that do not store tokens by position."""
    one, two = (jax.tree.leaves(jax.eval_shape(lambda n=n: spec.create(1, n))) for n in (LONG, 2 * LONG))
    grown = [b.shape[2] - a.shape[2] if a.size and a.ndim > 2 else 0 for a, b in zip(one, two, strict=True)]
    return tuple(Fraction(slots * page, LONG) for slots in grown)
