"""The steps of an engine on a device: pieces of prompts, one row after another, and decoding of all rows.

All programs are compiled before the first request. Numbers of requests are one small array each: what a row
asks for stands in it, so that no value compiles anew. Results come back as arrays that are on their way;
they are looked at while the next step runs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.paged import Paged
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.request import MOST_LOGPROBS, EngineRequest
from zdc_jax.errors import MeshError, PlanError
from zdc_jax.generation.sampling import SamplingArrays, choose, request_keys
from zdc_jax.generation.steps import MAX_STOP_TOKENS, bucket
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.mesh import DATA, SEQUENCE, whole_on
from zdc_jax.parallel.transformer import ShardedTransformer

CLAUSES = frozenset({"chunked", "ragged", "order", "reuse"})
"""Of the contract of caches: texts are read in pieces, beside others, in rows that served others before."""
FIELDS = ("limit", "least", "logprobs", "top_k", "key_0", "key_1", "temperature", "top_p")
"""Of a row: tokens it may hold, tokens it must hold before a stop token ends it, whether likeliest tokens are
asked for, and its sampling; the last two are bits of float32. Ids of stop tokens follow, -1 for none."""
WIDTH = len(FIELDS) + MAX_STOP_TOKENS
AT = {name: column for column, name in enumerate(FIELDS)}


class Chosen(NamedTuple):
    """Tokens that a step generated.

    tokens [B, steps] int32, made [B] int32 of them, lengths [B] int32: tokens that the rows hold then;
    logprob [B, steps], likeliest [B, steps, 5] int32 and their logprobs: of tokens, natural logarithms.
    Likeliest ones are zeros where no row asked.
    """

    tokens: Array
    made: Array
    lengths: Array
    logprob: Array
    likeliest: Array
    logprobs: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """cache, without its table; last [B] int32, each row's newest token, not yet in the cache; done [B]: it
    ended the row. tails: leaves [tails, …], copies of rows of the cache's `own` leaves."""

    cache: KVCache
    last: Array
    done: Array
    tails: list[Array]


def row_numbers(request: EngineRequest, stop_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """What the steps must know of a request, int32 [WIDTH]."""
    held, sampling = len(request.prompt) - 1, request.sampling
    ids = np.asarray(request.prompt, np.int32)
    key = request_keys([sampling], [ids])[0].view(np.int32)
    numbers = np.full(WIDTH, -1, np.int32)
    numbers[: len(FIELDS) - 2] = [
        held + request.max_tokens,
        held + request.min_tokens,
        bool(request.logprobs),
        min(sampling.top_k or vocab_size, vocab_size),
        *key,
    ]
    smallest = np.finfo(np.float32).tiny
    temperature = sampling.temperature if sampling.temperature >= smallest else 0.0
    floats = np.array([temperature, sampling.top_p or 1.0], np.float32)
    numbers[len(FIELDS) - 2 : len(FIELDS)] = floats.view(np.int32)
    numbers[len(FIELDS) : len(FIELDS) + len(stop_ids)] = stop_ids
    return numbers


class Runner:
    """Arrays and compiled programs of one `servable` network.

    layout: of its cache. chunk: longest piece, in tokens. steps: of decoding, beside one. whole: texts that
    are longer are read at once where nothing of them is held, None if none are. On a mesh with an axis
    `sequence` these are what does not fit into a piece: their tokens are divided.

    Raises:
      CacheMemoryError: the cache does not fit.
    """

    def __init__(
        self,
        network: Transformer | ShardedTransformer,
        layout: Layout,
        *,
        chunk: int,
        steps: int,
        implementation: Implementation | None = None,
    ):
        self.layout, self._network = layout, network
        self._leaves, self._tree = jax.tree.flatten(network)
        self.whole: int | None = None
        self.reset()
        piece = lambda step, width: self._lowered(partial(step, implementation), 4 + WIDTH + width)
        widths = {self._width(1 << i) for i in range(chunk.bit_length())}
        lowered = {f"read {width}": piece(_read_piece, width) for width in widths}
        for count in {1, steps}:
            step = partial(_decode, implementation, count)
            lowered[f"decode {count}"] = self._lowered(step, layout.rows, 1 + WIDTH)
        if isinstance(network, ShardedTransformer) and network.mesh.shape[SEQUENCE] > 1 and layout.has_pages:
            self.whole = chunk
            widths = {self._width(chunk << i) for i in range(1, (layout.capacity // chunk).bit_length() + 1)}
            lowered |= {f"read whole {width}": piece(_read_whole, width) for width in widths}
        if layout.tails:
            lowered |= {"keep": self._lowered_copy(_keep), "restore": self._lowered_copy(_restore)}
        with ThreadPoolExecutor() as threads:  # XLA compiles without Python's lock.
            compiled = threads.map(Lowered.compile, lowered.values())
            self._programs = dict(zip(lowered, compiled, strict=True))

    def reset(self) -> None:
        """All rows empty, in new arrays."""
        self._state = None  # Two caches may not fit.
        layout, network = self.layout, self._network
        cache = network.new_cache(batch=layout.rows, capacity=layout.capacity, specs=layout.specs)
        copies = lambda x: jnp.zeros((layout.tails or 0, *x.shape[1:]), x.dtype, device=x.sharding)
        where = whole_on(network.mesh) if isinstance(network, ShardedTransformer) else None
        self._state = EngineState(
            cache,
            jnp.zeros(layout.rows, jnp.int32, device=where),
            jnp.ones(layout.rows, bool, device=where),
            list(map(copies, cache.own)) if layout.tails else [],
        )
        self._pages = np.zeros((layout.rows, layout.capacity // layout.page), np.int32)
        self._table: Array | None = None

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Where the tokens of a row lie, in the steps from now on."""
        self._pages[row, : len(pages)] = pages
        self._table = None

    def keep(self, row: int, tail: int) -> None:
        """Copies what a row holds beside its pages."""
        self._state = self._programs["keep"](self._state, np.array([row, tail], np.int32))

    def restore(self, row: int, tail: int) -> None:
        """Makes a row hold such a copy."""
        self._state = self._programs["restore"](self._state, np.array([row, tail], np.int32))

    def read(self, row: int, tokens: Sequence[int], begin: int, last: bool, numbers: np.ndarray) -> Chosen:
        """A row's tokens from position `begin` on; behind the `last` of its text one is generated."""
        at_once = self.whole is not None and begin == 0 and len(tokens) > self.whole
        width = self._width(len(tokens))
        piece = np.zeros(4 + WIDTH + width, np.int32)
        piece[:4] = row, begin, len(tokens), last
        piece[4 : 4 + WIDTH] = numbers
        piece[4 + WIDTH :][: len(tokens)] = tokens
        program = self._programs[f"read whole {width}" if at_once else f"read {width}"]
        self._state, chosen = program(self._leaves, self._state, self._on_device(), piece)
        return chosen

    def decode(self, numbers: np.ndarray, active: np.ndarray, steps: int) -> Chosen:
        """`steps` more tokens of the rows that are `active`, fewer where they end.

        numbers [B, WIDTH] int32, active [B] bool.
        """
        packed = np.concatenate([active[:, None].astype(np.int32), numbers], axis=1)
        program = self._programs[f"decode {steps}"]
        self._state, chosen = program(self._leaves, self._state, self._on_device(), packed)
        return chosen

    def no_numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """What `decode` takes where no row is active."""
        rows = self.layout.rows
        return np.full((rows, WIDTH), -1, np.int32), np.zeros(rows, bool)

    def _on_device(self) -> Array:
        """The table: sent anew only where it changed."""
        if self._table is None:
            self._table = jnp.array(self._pages)
        return self._table

    def _lowered(self, step: Callable[..., Any], *packed: int) -> Lowered:
        def run(leaves: list[Array], state: EngineState, table: Array, packed: Array) -> Any:
            return step(jax.tree.unflatten(self._tree, leaves), state, table, packed)

        table, like = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (self._pages.shape, packed))
        program = jax.jit(run, donate_argnums=1, out_shardings=(self._shardings(), None))
        return program.lower(self._leaves, self._state, table, like)

    def _lowered_copy(self, copy: Callable[..., EngineState]) -> Lowered:
        pair = jax.ShapeDtypeStruct((2,), jnp.int32)
        program = jax.jit(copy, donate_argnums=0, out_shardings=self._shardings())
        return program.lower(self._state, pair)

    def _shardings(self) -> Any:
        """Of the state, which lies the same after every step."""
        return jax.tree.map(lambda leaf: leaf.sharding, self._state)

    def _width(self, tokens: int) -> int:
        """Of the program that reads so many: a power of two, or the whole row."""
        return min(bucket(tokens), self.layout.capacity)


def servable(network: Transformer | ShardedTransformer) -> Transformer | ShardedTransformer:
    """The network itself.

    Raises:
      PlanError: its cache lacks a clause of the contract, or lies beside the device; on a mesh, a plan with
        token classes. MeshError: a mesh that divides rows.
    """
    if isinstance(network, ShardedTransformer):
        if (data := network.mesh.shape[DATA]) > 1:
            raise MeshError(
                f"data={data}: an engine has one scheduler for all rows; need data=1, and replicas"
            )
        if network.plan.classes is not None:
            raise PlanError("token classes are not served on a mesh")
    for layer, spec in enumerate(network.layer_caches):
        if missing := CLAUSES - spec.clauses:
            kind = type(spec).__name__
            raise PlanError(f"layer {layer}: {kind} does not keep {sorted(missing)}; the engine needs it")
        if spec.host_bytes(1024):
            raise PlanError(f"layer {layer}: memory='host' is not served by the engine")
    return network


def _read_piece(
    implementation: Implementation | None,
    network: Transformer | ShardedTransformer,
    state: EngineState,
    table: Array,
    packed: Array,
) -> tuple[EngineState, Chosen]:
    """One piece of one row, whose own part of the cache is taken out and put back."""
    row, begin, count, _ = packed[:4]
    tokens = packed[4 + WIDTH :]
    one = replace(replace(state.cache, table=table).row(row), lengths=begin[None])
    one = one.release(begin[None] == 0)
    hidden, one = network.extend(one, tokens[None], (begin + count)[None], implementation)
    end = jax.lax.dynamic_slice_in_dim(hidden[0], count - 1, 1)
    return _with_row(network, state, one, end, packed)


def _read_whole(
    implementation: Implementation | None,
    network: ShardedTransformer,
    state: EngineState,
    table: Array,
    packed: Array,
) -> tuple[EngineState, Chosen]:
    """A text of one row, from its first token to its last, divided over `sequence`; then put into pages."""
    row, _, count, _ = packed[:4]
    tokens, cache, pages = packed[4 + WIDTH :], state.cache, jax.lax.dynamic_slice_in_dim(table, row, 1)
    capacity = cache.capacity
    end, read = network.prefill(tokens[None], count[None], capacity=capacity, implementation=implementation)
    one = cache.row(row)
    layers = tuple(
        cast(Paged, spec).put_prompt(held, new, len(tokens), count[None], pages)
        for spec, held, new in zip(cache.specs, one.layers, read.layers, strict=True)
    )
    return _with_row(network, state, replace(one, layers=layers, lengths=count[None]), end, packed)


def _with_row(
    network: Transformer | ShardedTransformer, state: EngineState, one: KVCache, end: Array, packed: Array
) -> tuple[EngineState, Chosen]:
    """The state with a row as a piece left it, `one`; end [1, D]: hidden state of its last token."""
    row, last = packed[0], packed[3].astype(bool)
    numbers = packed[4 : 4 + WIDTH]
    token, *logprobs = _chosen(network.embeddings.unembed(end), numbers[None], one.lengths)
    new = EngineState(
        state.cache.with_row(row, one),
        state.last.at[row].set(jnp.where(last, token[0], state.last[row])),
        state.done.at[row].set(jnp.where(last, _ends(token, numbers[None], one.lengths)[0], True)),
        state.tails,
    )
    one_step = lambda x: x[:, None]
    return new, Chosen(one_step(token), last[None].astype(jnp.int32), one.lengths, *map(one_step, logprobs))


def _decode(
    implementation: Implementation | None,
    steps: int,
    network: Transformer | ShardedTransformer,
    state: EngineState,
    table: Array,
    packed: Array,
) -> tuple[EngineState, Chosen]:
    """So many steps of all rows that are active, not done and below their limit."""
    wanted, numbers = packed[:, 0].astype(bool), packed[:, 1:]

    def step(state: EngineState, _: None) -> tuple[EngineState, tuple[Array, ...]]:
        # Nothing is read of other rows: their pages may be others' by now.
        held = jnp.where(wanted, state.cache.lengths, 0)
        active = wanted & ~state.done & (held < numbers[:, AT["limit"]])
        end = held + active
        cache = replace(state.cache, lengths=held, table=table)
        hidden, cache = network.extend(cache, state.last[:, None], end, implementation)
        cache = replace(cache, lengths=jnp.where(wanted, end, state.cache.lengths), table=None)
        token, *logprobs = _chosen(network.embeddings.unembed(hidden[:, 0]), numbers, end)
        done = state.done | (active & _ends(token, numbers, end))
        new = EngineState(cache, jnp.where(active, token, state.last), done, state.tails)
        return new, (token, active, *logprobs)

    state, (tokens, active, *logprobs) = jax.lax.scan(step, state, None, length=steps)
    by_row = lambda x: jnp.moveaxis(x, 0, 1)
    return state, Chosen(
        by_row(tokens), active.sum(0, dtype=jnp.int32), state.cache.lengths, *map(by_row, logprobs)
    )


def _keep(state: EngineState, pair: Array) -> EngineState:
    """What a row holds beside its pages, copied to a tail."""
    row, tail = pair
    copies = [held.at[tail].set(leaf[row]) for held, leaf in zip(state.tails, state.cache.own, strict=True)]
    return replace(state, tails=copies)


def _restore(state: EngineState, pair: Array) -> EngineState:
    """The reverse."""
    row, tail = pair
    own = [leaf.at[row].set(held[tail]) for held, leaf in zip(state.tails, state.cache.own, strict=True)]
    return replace(state, cache=state.cache.with_own(own))


def _chosen(logits: Array, numbers: Array, positions: Array) -> tuple[Array, Array, Array, Array]:
    """Next tokens [B], their log-probabilities [B], and the likeliest [B, 5] with theirs, where asked for."""
    floats = jax.lax.bitcast_convert_type(numbers, jnp.float32)
    keys = jax.lax.bitcast_convert_type(numbers[:, AT["key_0"] : AT["key_1"] + 1], jnp.uint32)
    sampling = SamplingArrays(
        floats[:, AT["temperature"]],
        numbers[:, AT["top_k"]],
        floats[:, AT["top_p"]],
        jax.random.wrap_key_data(keys, impl="threefry2x32"),
    )
    allowed = _without_stops(logits, numbers, positions)
    token = jax.lax.cond(
        (sampling.temperature > 0).any(),
        lambda: choose(allowed, sampling, positions),
        lambda: choose(allowed, None, positions),
    )
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total

    def likeliest() -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(logits, MOST_LOGPROBS)
        return ids.astype(jnp.int32), values - total[:, None]

    shape = (len(token), MOST_LOGPROBS)
    nothing = lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype))
    ids, values = jax.lax.cond((numbers[:, AT["logprobs"]] > 0).any(), likeliest, nothing)
    return token, logprob, ids, values


def _without_stops(logits: Array, numbers: Array, held: Array) -> Array:
    """Logits [B, V] with -inf at the tokens that would end a row too early, where so many are held before."""
    stops, early = numbers[:, len(FIELDS) :], held < numbers[:, AT["least"]]
    nowhere = logits.shape[1]
    columns = jnp.where(early[:, None] & (stops >= 0), stops, nowhere)
    return logits.at[jnp.arange(len(logits))[:, None], columns].set(-jnp.inf, mode="drop")


def _ends(token: Array, numbers: Array, held: Array) -> Array:
    """Which rows [B] a token ends, where so many tokens are held before it."""
    stop = (token[:, None] == numbers[:, len(FIELDS) :]).any(-1)
    return stop & (held >= numbers[:, AT["least"]])
