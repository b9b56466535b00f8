"""A store of quantized far tokens, which are quantized when they leave the window (ours)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Code, Coded
from zdc_jax.cache.specs.coded_store import CodedStore, put_blocks
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.prefix_ring import recent_rows
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class LateStore(CodedStore):
    """`CodedStore` that holds a token once: in the ring while it is recent, in the store afterwards.

    Sinks stay in the ring and also have slots of the store, which no query reads. Attention runs on XLA.

    Raises:
      PlanError: a code quantizes several tokens together; or the ring is quantized, whose tokens must be
        exact until they leave it.
    """

    clauses = CodedStore.clauses - {"pages"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block > 1:
            raise PlanError(f"block={self.block}: must be 1, because tokens leave the window one by one")
        if self.near_code is not None:
            raise PlanError(
                f"near_code={self.near_code}: must be None, since tokens that leave the ring must be exact"
            )

    def create_far(self, batch: int, capacity: int) -> tuple[Coded, Coded]:
        return super().create_far(batch, capacity - self.window)

    def capacity(self, far: tuple[Coded, Coded]) -> int:
        return super().capacity(far) + self.window

    def write_far(self, state: NearFarState, new: NewTokens) -> Any:
        return self.code_far(state, new)

    def code_far(self, state: NearFarState, new: NewTokens) -> tuple[Coded, Coded]:
        """Return the store with the tokens that the new ones push out of the window."""
        (sinks, window), k, v = state.near.near, new.k.keys, new.v
        leaving = new.positions - window
        put = partial(put_blocks, first=leaving[:, 0], complete=(leaving >= 0) & new.kept)

        def store(code: Code, stored: Coded, ring: Array, x: Array) -> Coded:
            rows = recent_rows(ring, x, new.start, leaving[:, 0], sinks=sinks, window=window, past=window)
            return jax.tree.map(put, stored, code.encode(rows[:, :, : x.shape[1], None]))

        (stored_k, stored_v), near = state.far, state.near
        coded_k = store(self.key_code, stored_k, near.ring_k[..., : self.R], k[..., : self.R])
        coded_v = store(self.value_code, stored_v, near.ring_v[..., : self.Z], v[..., : self.Z])
        return coded_k, coded_v

    def reads_pages(self, state: NearFarState, q: Array, v: Any, call: Call) -> bool:
        return False
