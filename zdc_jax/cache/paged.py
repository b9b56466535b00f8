"""Any method that keeps tokens by position, with its tokens in pages (ours)."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from zdc_jax.axes import Array
from zdc_jax.cache.pages import Pages, pools_of
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec, State
from zdc_jax.errors import PlanError
from zdc_jax.ops.attention import Implementation

LONG = 2**24
"""A capacity above all windows: what grows from here on holds tokens by position."""


@dataclass(frozen=True, kw_only=True)
class Paged(LayerCacheSpec):
    """`spec` whose arrays by position are one pool of `pages` pages of `page` tokens, without the axis B.

    Rings, whose size does not depend on the capacity, stay as they are: rows of their own. `attend` finds the
    tokens by `Call.table`. Where kernels do not read pages the rows of a call are copied out of them, and
    pages that new tokens came into are copied back.

    Raises:
      PlanError: the method does not declare the clause `pages`, or has blocks that do not divide a page.
    """

    spec: LayerCacheSpec
    page: int
    pages: int

    def __post_init__(self) -> None:
        kind = type(self.spec).__name__
        if "pages" not in self.spec.clauses:
            raise PlanError(f"{kind} does not keep tokens by position: it has no pages")
        if any(slots.denominator > 1 for slots in _slots(self.spec, self.page)):
            raise PlanError(f"page={self.page} tokens must be a multiple of the blocks of {kind}")

    @classmethod
    def of(cls, spec: LayerCacheSpec, *, page: int, pages: int) -> "Paged":
        """The same method, in pages."""
        return cls(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            spec=spec,
            page=page,
            pages=pages,
        )

    def pooled(self, state: State) -> list[bool]:
        """Which leaves are pools."""
        return [slots > 0 for slots in _slots(self.spec, self.page)]

    def create(self, batch: int, capacity: int) -> State:
        """`LayerCacheSpec.create`: rows of what is not by position, beside the pool."""
        leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: self.spec.create(batch, capacity)))
        made = []
        for leaf, slots in zip(leaves, _slots(self.spec, self.page), strict=True):
            K, rest = leaf.shape[1], leaf.shape[3:]
            shape = (self.pages, K, int(slots), *rest) if slots else leaf.shape
            made.append(jnp.zeros(shape, leaf.dtype))
        return jax.tree.unflatten(tree, made)

    def write(self, state: State, k: Array, v: Array, positions: Array, end: Array) -> State:
        """Refused: where tokens lie is told when they are attended to."""
        raise NotImplementedError("a layer in pages stores tokens as it attends to them, not before")

    def attend(
        self, state: State, q: Array, k: Any, v: Any, positions: Array, end: Array, aux: Any, call: Call
    ) -> Attended:
        table, pooled = call.table, self.pooled(state)
        if not any(pooled):
            return self.spec.attend(state, q, k, v, positions, end, aux, call)
        assert table is not None
        leaves, tree = jax.tree.flatten(state)
        pages = [Pages(leaf, table) if it_is else leaf for leaf, it_is in zip(leaves, pooled, strict=True)]
        held = jax.tree.unflatten(tree, pages)
        if self.spec.reads_pages(held, q, v, call):
            done = self.spec.attend(held, q, k, v, positions, end, aux, call)
            return done._replace(state=pools_of(done.state)[0])
        rows = [leaf.rows() if isinstance(leaf, Pages) else leaf for leaf in pages]
        done = self.spec.attend(jax.tree.unflatten(tree, rows), q, k, v, positions, end, aux, call)

        def back(held, new):
            return held.put_rows(new, positions[:, 0], end, tokens=positions.shape[1], page=self.page)

        found = [
            back(held, new) if isinstance(held, Pages) else new
            for held, new in zip(pages, jax.tree.leaves(done.state), strict=True)
        ]
        return done._replace(state=jax.tree.unflatten(tree, found))

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, Any, Any]:
        return self.spec.project(attention, x, positions, implementation, aux)

    def put_prompt(self, state: State, rows: State, tokens: int, end: Array, table: Array) -> State:
        """With prompts that were read whole.

        rows: a state of `spec`, with a prompt of `end` tokens in each row, at most `tokens`.
        """
        start, leaves = jnp.zeros_like(end), zip(jax.tree.leaves(state), jax.tree.leaves(rows), strict=True)

        def put(pool, new):
            return Pages(pool, table).put_rows(new, start, end, tokens=tokens, page=self.page)

        found = [
            put(held, new) if pooled else new
            for (held, new), pooled in zip(leaves, self.pooled(state), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), found)

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
def _slots(spec: LayerCacheSpec, page: int) -> tuple[Fraction, ...]:
    """Of each leaf: slots of a page; 0 of what is not by position."""
    one, two = (jax.tree.leaves(jax.eval_shape(lambda n=n: spec.create(1, n))) for n in (LONG, 2 * LONG))
    grown = [b.shape[2] - a.shape[2] if a.size and a.ndim > 2 else 0 for a, b in zip(one, two, strict=True)]
    return tuple(Fraction(slots * page, LONG) for slots in grown)
