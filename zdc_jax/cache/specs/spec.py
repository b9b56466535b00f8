"""The interface of a layer's cache: an immutable spec that creates, writes and reads the cache arrays.

Each kind of cache is one file with a class that derives from `LayerCacheSpec`. `zdc_jax.methods` maps each
layer of a plan to a spec. `tests/cache_contract.py` holds the contract that every spec satisfies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from kernels_pallas import MeanTurns
from zdc_jax.axes import Array
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys

Clause = Literal["chunked", "ragged", "order", "reuse", "pages", "shift"]
"""Properties that a spec may guarantee; `tests/cache_contract.py` checks them.

- `chunked`: reading a prompt in chunks gives the same result as reading it whole.
- `ragged`: sequences with different starts and lengths give the same results as each sequence alone.
- `order`: the result of a sequence does not depend on its index in the batch.
- `reuse`: a released sequence serves its next request like a new one.
- `pages`: leaves [B, K, S/n, …] that grow with the capacity store tokens by position, n tokens per slot. No
  other leaf says which tokens are stored (`paging.paged`).
- `shift`: attention adds `NewKeys.block_scores`, so that keys may arrive without their mean.

Two more properties hold for every spec: attention on a cache equals attention on whole sequences, and `bytes`
equals the size of the arrays.
"""

Exchange = Literal["coordinates", "quantized"]
"""Form in which the devices of a mesh exchange the keys and values of a prompt (`zdc_jax.parallel`).

- `coordinates`: leading coordinates in the model's dtype, or in the payload's.
- `quantized`: the quantized values that the cache stores.
"""

State = Any
"""Arrays of one layer's cache: a tree whose leaves begin with the axis B."""


@dataclass(frozen=True)
class Call:
    """Options of one attention call.

    Attributes:
      scale: factor on the scores.
      implementation: requested implementation; None chooses one.
      table: page table [B, n] int32 of a paged cache.
      first: index of the first sequence in arrays outside pages that have rows of other layers, too; None if
        they have not.
      end: position [B] int32 at which padding begins, for specs that need it.
      block_scores: what scaled scores gain in each block of positions, [B, T, N, blocks] float32, for keys
        without their mean (`zdc_jax.ops.shift`); None for whole keys.
      means: what a kernel needs to compute `block_scores` of single tokens; None for whole keys.
      means_of_keys: what stored keys left out, as in `ShiftedQueries`, for specs that attend to whole keys
        instead of adding `block_scores`; None if they cannot.
      copies: number of equal rows that the caller needs of the output of a single sequence. A spec may return
        as many, or one.
      marks: lengths [B] int32 at which a paged cache returns `Attended.tail`; None for none.
      needed_from: first position [B] int32 whose result is needed; kernels leave out earlier ones. None for
        all.
    """

    scale: float
    implementation: Implementation | None = None
    table: Array | None = None
    first: Array | None = None
    end: Array | None = None
    block_scores: Array | None = None
    means: MeanTurns | None = None
    means_of_keys: Array | None = None
    copies: int = 1
    marks: Array | None = None
    needed_from: Array | None = None


class Snapshots(NamedTuple):
    """Copies of what sequences of one layer store outside pages, taken in the middle of a chunk.

    Attributes:
      leaves: copies of each leaf outside pages, [copies, …].
      marks: lengths of the sequences at which they are taken, [B] int32.
      slots: number of each copy, [B] int32; those with other numbers are dropped.
    """

    leaves: list[Array]
    marks: Array
    slots: Array

    def put(self, taken: Sequence[Array]) -> list[Array]:
        """Return `leaves` with the copies `taken`, leaves [B, …]."""
        pairs = zip(self.leaves, taken, strict=True)
        return [leaf.at[self.slots].set(copy, mode="drop") for leaf, copy in pairs]


@dataclass(frozen=True)
class NewTokens:
    """Keys and values of new tokens.

    Attributes:
      k: keys, as `LayerCacheSpec.project` returns them.
      v: values [B, T, K, Hv], or what else `project` returns.
      positions: positions of the tokens, consecutive in each sequence; each sequence may start anywhere.
      end: position at which padding begins, at most the capacity. Padding is not stored.
    """

    k: NewKeys
    v: Any
    positions: Int[Array, "B T"]
    end: Int[Array, " B"]

    @property
    def start(self) -> Int[Array, " B"]:
        """Position of the first token of each sequence."""
        return self.positions[:, 0]

    @property
    def kept(self) -> Bool[Array, "B T"]:
        """Whether each token is stored."""
        return self.positions < self.end[:, None]

    def rotate(self, q: Array, call: "Call", *, by_token: bool = False) -> tuple[Array, "NewTokens"]:
        """Return queries and tokens in the form that caches store (`NewKeys.rotate`)."""
        q, k = self.k.rotate(q, call.implementation, by_token=by_token)
        return q, replace(self, k=k)


def move_shift(new: NewTokens, call: Call, slots: int, *, up_to_end: bool = True) -> tuple[NewTokens, Call]:
    """Return tokens and call with the shift of the keys as `block_scores` of the call.

    `slots` is the capacity of the cache in positions. Block scores of padding are left out with `up_to_end`.
    Without a shift, both are unchanged. Compiled programs compute only the form of the scores that they use.
    """
    if (shift := new.k.shift) is None:
        return new, call
    on_kernel, ends = call.implementation != "xla", new.end if up_to_end else None
    scores = shift.block_scores(slots, call.scale, on_kernel=on_kernel, ends=ends)
    return replace(new, k=new.k._replace(shift=None)), replace(
        call, block_scores=scores, means=shift.mean_turns(slots), means_of_keys=shift.means_of_keys
    )


class Attended(NamedTuple):
    """Result of `LayerCacheSpec.attend`.

    Attributes:
      state: cache that includes the new tokens.
      o: attention output [B, T, N, Z]; `Call.copies` rows are allowed for a single sequence.
      lse: log-sum-exp of the scaled scores, [B, N, T] float32.
      aux: values for the following layers, any tree of arrays, or None.
      tail: what a paged cache stores outside pages when sequences have the lengths `Call.marks`, leaves
        [B, …]; None without marks.
    """

    state: State
    o: Array
    lse: Array
    aux: Any
    tail: list[Array] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerCacheSpec(ABC):
    """Description of how one layer stores keys and values. Hashable, and static under `jax.jit`.

    Whether a token is stored exactly depends on its position alone, never on chunks or on the batch.

    Attributes:
      num_kv_heads: number of KV heads K on the device that holds the arrays.
      head_dim: head dimension H.
      dtype: dtype of the model's activations; the cache may store another.
      clauses: clauses of the contract that the spec satisfies.
      exchange: form of keys and values between the devices of a mesh; None if the spec runs on one device.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    clauses: ClassVar[frozenset[Clause]] = frozenset({"chunked", "ragged", "order", "reuse"})
    exchange: ClassVar[Exchange | None] = None

    @property
    def base_fields(self) -> dict[str, Any]:
        """The fields that all specs have, for a spec of other storage."""
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}

    @property
    def alignment(self) -> int:
        """Multiple at which chunks of more than one token must begin; elsewhere their results are NaN."""
        return 1

    @abstractmethod
    def create(self, batch: int, capacity: int) -> State:
        """Create the arrays of an empty cache for `batch` sequences of up to `capacity` tokens."""

    @abstractmethod
    def write(self, state: State, new: NewTokens) -> State:
        """Return the cache `state` with the new tokens, and nothing else changed."""

    def write_tail(self, state: State, new: NewTokens) -> State:
        """Store the tokens in leaves that do not grow with the capacity; others are unspecified."""
        return self.write(state, new)

    @abstractmethod
    def attend(
        self, state: State, q: Float[Array, "B T N _"], new: NewTokens, aux: Any, call: Call
    ) -> Attended:
        """Store new tokens, as `write` does, and compute their attention to all stored tokens.

        Args:
          state: cache without the new tokens.
          q: queries of the new tokens, as `project` returns them. Results of padding are unspecified.
          new: the new tokens.
          aux: `Attended.aux` of the previous layer.
          call: options of the call.

        Raises:
          NotImplementedError: the requested implementation does not support this call; the message says why.
        """

    def attend_sequences(
        self,
        state: State,
        rows: Int[Array, " P"],
        q: Float[Array, "P T N _"],
        new: NewTokens,
        aux: Any,
        call: Call,
        snapshots: Snapshots | None = None,
    ) -> tuple[Attended, list[Array]]:
        """Compute `attend` for the sequences `rows` of a batch.

        Args:
          state: cache of the batch. Sequences outside it are not stored, and their results are unspecified.
          rows: index of each sequence.
          q, new, aux, call: arguments of `attend` for these sequences.
          snapshots: copies to take; only of paged caches.

        Returns:
          The result, with the state of the batch, and the leaves of `snapshots` with the new copies.
        """
        # The barrier orders the read before the write, so that XLA writes in place.
        some, state = jax.lax.optimization_barrier((self.of_rows(state, rows), state))
        call = call if snapshots is None else replace(call, marks=snapshots.marks)
        attended = self.attend(some, q, new, aux, call)
        copies = snapshots.put(attended.tail or []) if snapshots else []
        return attended._replace(state=self.with_rows(state, rows, attended.state), tail=None), copies

    def attend_in_place(
        self,
        state: State,
        rows: Int[Array, " P"],
        q: Float[Array, "P T N _"],
        new: NewTokens,
        call: Call,
        snapshots: Snapshots | None = None,
    ) -> tuple[Attended, list[Array]] | None:
        """Compute `attend_sequences` without `aux`; kernels update the leaves outside pages in place.

        Returns:
          The result; None where no kernel can do so, as for specs without an override.
        """
        return None

    def attend_whole(self, q: Float[Array, "B T N _"], new: NewTokens, aux: Any, call: Call) -> Attended:
        """Compute `attend` for whole sequences, without a cache before or after (`state` is None)."""
        B, T = new.positions.shape
        return self.attend(self.create(B, -(-T // 8) * 8), q, new, aux, call)._replace(state=None)

    def keep_prompt(
        self,
        q: Float[Array, "B T N _"],
        new: NewTokens,
        lse: Float[Array, "B N T"],
        capacity: int,
        call: Call,
    ) -> State:
        """Create a cache from whole prompts whose attention was computed exactly.

        Args:
          q, new: as in `attend`; each sequence begins at position 0.
          lse: log-sum-exp of the prompt's exact scores.
          capacity: tokens per sequence that the cache can hold.
          call: options of the call.
        """
        return self.write(self.create(len(new.end), capacity), new)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Any]:
        """Compute q, k and v of new tokens in the form that `attend` accepts.

        `attention` is the layer's `zdc_jax.model.attention.Attention`; x are its inputs.
        """
        return attention.project(x, positions, implementation)

    @property
    def queries_apart(self) -> bool:
        """Whether each query of a chunk reads the cache separately, padding included."""
        return False

    def reads_pages(self, state: State, q: Array, v: Any, call: Call) -> bool:
        """Return whether `attend` accepts `Pages` in place of leaves by position.

        This is the case where kernels read pages.
        """
        return False

    def pooled(self, state: State) -> list[bool]:
        """Return, for each leaf, whether all sequences share it; a shared leaf has no axis B."""
        return [False] * len(jax.tree.leaves(state))

    def map_leaves(self, change: Callable[..., Any], state: State, *others: State) -> State:
        """Return the state with each leaf replaced by the result of `change`.

        Args:
          change: function of whether all sequences share a leaf, the leaf, and those of the other states.
          state: state to change.
          others: states with as many leaves.
        """
        leaves, tree = jax.tree.flatten(state)
        parts = zip(self.pooled(state), leaves, *map(jax.tree.leaves, others), strict=True)
        return jax.tree.unflatten(tree, [change(*part) for part in parts])

    def of_rows(self, state: State, rows: Int[Array, " P"]) -> State:
        """Return the state of the sequences `rows`, together with the shared leaves.

        An index outside the batch selects an arbitrary sequence.
        """

        def take(shared: bool, leaf: Array) -> Array:
            return leaf if shared else jnp.take(leaf, rows, axis=0, mode="clip")

        return self.map_leaves(take, state)

    def with_rows(self, state: State, rows: Int[Array, " P"], some: State) -> State:
        """Return the state with the sequences `rows` and the shared leaves replaced by those of `some`.

        `some` is a state from `of_rows`. Indices outside the batch are ignored.
        """

        def put(shared: bool, leaf: Array, own: Array) -> Array:
            return own if shared else leaf.at[rows].set(own, mode="drop")

        return self.map_leaves(put, state, some)

    @property
    def stores_in_place(self) -> bool:
        """Whether `attend_in_place` is written for this spec; on other devices than GPUs XLA may serve it."""
        return False

    @property
    def codes_in_place(self) -> bool:
        """Whether kernels, where they can serve, write all tokens in place, in pages and outside."""
        return False

    @property
    def takes_more_rings(self) -> bool:
        """Whether `attend` takes rings of more sequences than its queries, and serves those at `Call.first`.

        Tokens stored by position must be those of the queries' sequences, or in pages.
        """
        return False

    def first_rows(self, state: State, count: int) -> State:
        """Return the state of the first `count` sequences, together with the shared leaves."""

        def cut(shared: bool, leaf: Array) -> Array:
            return leaf if shared else leaf[:count]

        return self.map_leaves(cut, state)

    def with_first_rows(self, state: State, some: State) -> State:
        """Return the state with the first sequences and the shared leaves replaced by those of `some`."""

        def put(shared: bool, leaf: Array, own: Array) -> Array:
            if shared or leaf.shape == own.shape:
                return own
            return jax.lax.dynamic_update_slice_in_dim(leaf, own, 0, 0)

        return self.map_leaves(put, state, some)

    def release(self, state: State, rows: Bool[Array, " B"]) -> State:
        """Empty the sequences where `rows` is true; a no-op where positions alone say what is stored."""
        return state

    def bytes(self, capacity: int, batch: int = 1) -> int:
        """Return the bytes of the arrays of `create`: all memory that this layer occupies."""
        return _count_bytes(self, capacity, batch)

    def host_bytes(self, capacity: int, batch: int = 1) -> int:
        """Return the part of `bytes` that lies in host memory instead of device memory."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the spec stores in addition to `bytes`, once for all sequences and any capacity."""
        return 0

    def bytes_read(self, tokens: int) -> int:
        """Return the bytes read from the cache of one sequence of `tokens` tokens to decode the next token.

        Specs that do not choose tokens read everything.
        """
        return self.bytes(tokens)

    def on_heads(self, num_kv_heads: int) -> Self:
        """Return the same spec for a device that has `num_kv_heads` of the heads."""
        return replace(self, num_kv_heads=num_kv_heads)


@lru_cache(maxsize=4096)
def _count_bytes(spec: LayerCacheSpec, capacity: int, batch: int) -> int:
    shapes = jax.eval_shape(lambda: spec.create(batch, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def put_rows(buffer: Array, x: Array, start: Int[Array, " B"], kept: Bool[Array, "B T"]) -> Array:
    """Write x [B, T, K, C] into `buffer` [B, K, S, C] from slot `start` on, where `kept`.

    Other slots keep their values, and tokens past the last slot are dropped. A single token per sequence is
    scattered. Chunks are copied sequence by sequence instead, because a scatter of many tokens is several
    times slower. Each copy touches the slots of its chunk only.
    """
    (B, T), S = x.shape[:2], buffer.shape[2]
    if T == 1:
        slot = jnp.where(kept[:, 0], start, S)
        return buffer.at[jnp.arange(B), :, slot].set(x[:, 0], mode="drop")
    width = min(T, S)
    first = jnp.clip(start, 0, S - width)
    # A chunk whose padding would extend past the last slot is shifted until it fits.
    source = first[:, None] - start[:, None] + jnp.arange(width)
    inside = (source >= 0) & (source < T)
    source = jnp.clip(source, 0, T - 1)
    kept = jnp.take_along_axis(kept, source, axis=1) & inside
    x = jnp.take_along_axis(x, source[:, :, None, None], axis=1).swapaxes(1, 2)

    def put(row: Array | int, buffer: Array) -> Array:
        at = (row, 0, first[row], 0)
        old = jax.lax.dynamic_slice(buffer, at, (1, *x.shape[1:]))
        # The barrier orders the read before the write, so that XLA writes in place.
        old, target = jax.lax.optimization_barrier((old, buffer))
        new = jnp.where(kept[row][None, None, :, None], x[row][None], old)
        return jax.lax.dynamic_update_slice(target, new, at)

    return put(0, buffer) if B == 1 else jax.lax.fori_loop(0, B, put, buffer)
