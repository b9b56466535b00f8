"""The interface of a layer's cache: a frozen description that makes arrays, writes them and attends to them.

A method of keeping keys and values is one file that derives from `LayerCacheSpec`; `zdc_jax.methods` says
which layers of a plan get which. `tests/cache_contract.py` is the contract that all of them are held to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation

Clause = Literal["chunked", "ragged", "order", "reuse", "pages"]
"""`chunked`: a prompt read in pieces gives what it gives whole. `ragged`: rows of unequal starts and lengths
give what each gives alone. `order`: a row does not depend on which row it is. `reuse`: a released row serves
its next request as a new one would. `pages`: leaves [B, K, S/n, …] that grow with the capacity hold tokens by
position, n in a slot, and nothing else says what is held (`zdc_jax.cache.paged`); `project` treats all tokens
alike, whatever was handed on, and gives arrays [B, T, …], or keys as `LatentKeys` or `UnrotatedKeys`. Every
method holds two more: what it gives on a cache is what it gives on whole sequences, and `bytes` is what its
arrays take."""

State = Any
"""The arrays of one layer's cache: a tree whose leaves begin with the axis B."""


def own_heads(lse: Array) -> Array:
    """The `all_heads` of a device that has all heads."""
    return lse


@dataclass(frozen=True)
class Call:
    """How a layer attends: factor on the scores, choice of implementation, and heads on other devices.

    all_heads: from lse [B, N', T] of this device's heads, that of the heads of all devices; for methods that
    choose by all of them. table: [B, n] int32, pages of rows whose tokens lie in pages. end: [B] int32, where
    padding begins, if a method's parts are to know.
    """

    scale: float
    implementation: Implementation | None = None
    all_heads: Callable[[Array], Array] = own_heads
    table: Array | None = None
    end: Array | None = None


class Attended(NamedTuple):
    """What `attend` gives.

    state: the cache with the new tokens. o [B, T, N, Z], lse [B, N, T] float32: attention and the log-sum-exp
    of its scaled scores. aux: what this layer found that layers behind it use, any tree of arrays, or None.
    """

    state: State
    o: Array
    lse: Array
    aux: Any


@dataclass(frozen=True, kw_only=True)
class LayerCacheSpec(ABC):
    """How one layer keeps keys and values. Hashable, static under `jax.jit`.

    What is exact depends on positions alone, never on how a prompt was cut into pieces or batched.

    Attributes:
      num_kv_heads: K, of the device that holds the arrays.
      head_dim: H. dtype: of the model's activations; a method may store another.
      clauses: which clauses of the contract the method holds.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    clauses: ClassVar[frozenset[Clause]] = frozenset({"chunked", "ragged", "order", "reuse"})

    @property
    def alignment(self) -> int:
        """Pieces of more than one token begin at multiples of this; else their results are NaN."""
        return 1

    @abstractmethod
    def create(self, batch: int, capacity: int) -> State:
        """Arrays of a cache that holds nothing yet, for `capacity` tokens a row."""

    @abstractmethod
    def write(
        self, state: State, k: Array, v: Array, positions: Int[Array, "B T"], end: Int[Array, " B"]
    ) -> State:
        """Stores the tokens at `positions` below `end` and nothing else; rows may start anywhere.

        k, v: as `attend` takes them. Positions are consecutive in each row, `end` is at most the capacity.
        """

    @abstractmethod
    def attend(
        self,
        state: State,
        q: Float[Array, "B T N _"],
        k: Any,
        v: Any,
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: Any,
        call: Call,
    ) -> Attended:
        """Stores new tokens, as `write` does, and lets them attend to all that the cache holds.

        Args:
          q, k, v: of the new tokens, as `project` gives them. Tokens at or past `end` are padding: they are
            not stored, and their results are unspecified.
          aux: what the layer before handed on.

        Raises:
          NotImplementedError: the chosen implementation cannot do this call, with the reason.
        """

    def attend_whole(
        self,
        q: Float[Array, "B T N _"],
        k: Any,
        v: Any,
        positions: Int[Array, "B T"],
        aux: Any,
        call: Call,
    ) -> Attended:
        """`attend` of whole sequences, with no cache before and none after (`state` is None)."""
        B, T = positions.shape
        state = self.create(B, -(-T // 8) * 8)
        done = self.attend(state, q, k, v, positions, jnp.full(B, T, jnp.int32), aux, call)
        return done._replace(state=None)

    def keep_prompt(
        self,
        q: Float[Array, "B T N _"],
        k: Any,
        v: Any,
        lse: Float[Array, "B N T"],
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        capacity: int,
        call: Call,
    ) -> State:
        """A new cache with what it keeps of whole prompts that were read exactly.

        Args:
          q, k, v, positions, end: as `attend` takes them; each row begins at position 0.
          lse: log-sum-exp of the prompt's exact scores.
        """
        return self.write(self.create(positions.shape[0], capacity), k, v, positions, end)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, Any, Any]:
        """q, k, v of a layer (`zdc_jax.model.attention.Attention`) in the form that `attend` takes."""
        return attention.project(x, positions, implementation)

    @property
    def queries_apart(self) -> bool:
        """Whether each query of a piece reads the cache by itself, padding like others."""
        return False

    def reads_pages(self, state: State, q: Array, v: Any, call: Call) -> bool:
        """Whether `attend` takes a state whose leaves by position are `Pages`: where kernels read them."""
        return False

    def pooled(self, state: State) -> list[bool]:
        """Of each leaf, whether all rows share it: then it does not begin with the axis B."""
        return [False] * len(jax.tree.leaves(state))

    def of_rows(self, state: State, rows: Int[Array, " P"]) -> State:
        """A state of those rows, beside what all rows share; of a number that is no row's, any row."""

        def take(leaf, shared):
            return leaf if shared else jnp.take(leaf, rows, axis=0, mode="clip")

        leaves, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, map(take, leaves, self.pooled(state)))

    def with_rows(self, state: State, rows: Int[Array, " P"], some: State) -> State:
        """With rows, and what all share, as they are in `some`, a state of `of_rows`; numbers that are no
        row's are left out."""

        def put(leaf, own, shared):
            return own if shared else leaf.at[rows].set(own, mode="drop")

        leaves, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, map(put, leaves, jax.tree.leaves(some), self.pooled(state)))

    def release(self, state: State, rows: Bool[Array, " B"]) -> State:
        """Makes `rows` hold nothing. Where positions alone say what is held there is nothing to do."""
        return state

    def bytes(self, capacity: int, batch: int = 1) -> int:
        """Bytes of the arrays of `create`: everything that stays in memory for this layer."""
        return _bytes(self, capacity, batch)

    def host_bytes(self, capacity: int, batch: int = 1) -> int:
        """Those of `bytes` that lie in the host's memory, and not in the device's."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the method holds beside those arrays, once for all rows and any capacity."""
        return 0

    def bytes_read(self, tokens: int) -> int:
        """Bytes of the cache of a row of `tokens` that decoding one more reads: all, unless it chooses."""
        return self.bytes(tokens)

    def on_heads(self, num_kv_heads: int) -> Self:
        """The same for a device with so many of the heads."""
        return replace(self, num_kv_heads=num_kv_heads)


@lru_cache(maxsize=4096)
def _bytes(spec: LayerCacheSpec, capacity: int, batch: int) -> int:
    shapes = jax.eval_shape(lambda: spec.create(batch, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def put_rows(buffer: Array, x: Array, start: Int[Array, " B"], kept: Bool[Array, "B T"]) -> Array:
    """`buffer` [B, K, S, C] with x [B, T, K, C] in the slots from `start` on, where `kept`; others stay.

    Slots past the end take nothing. One token a row is scattered; pieces are copied row by row, for a scatter
    of many is several times slower, and no copy moves what lies beside it.
    """
    (B, T), S = x.shape[:2], buffer.shape[2]
    if T == 1:
        slot = jnp.where(kept[:, 0], start, S)
        return buffer.at[jnp.arange(B), :, slot].set(x[:, 0], mode="drop")
    width = min(T, S)
    first = jnp.clip(start, 0, S - width)
    # A piece whose padding would reach past the end is moved to where it fits.
    source = first[:, None] - start[:, None] + jnp.arange(width)
    inside = (source >= 0) & (source < T)
    source = jnp.clip(source, 0, T - 1)
    kept = jnp.take_along_axis(kept, source, axis=1) & inside
    x = jnp.take_along_axis(x, source[:, :, None, None], axis=1).swapaxes(1, 2)

    def put(row: Array | int, buffer: Array) -> Array:
        at = (row, 0, first[row], 0)
        old = jax.lax.dynamic_slice(buffer, at, (1, *x.shape[1:]))
        # Read before it is written over, so that XLA writes in place.
        old, into = jax.lax.optimization_barrier((old, buffer))
        new = jnp.where(kept[row][None, None, :, None], x[row][None], old)
        return jax.lax.dynamic_update_slice(into, new, at)

    return put(0, buffer) if B == 1 else jax.lax.fori_loop(0, B, put, buffer)
