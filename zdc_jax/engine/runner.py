"""The steps of an engine on a device: pieces of prompts, and decoding of all rows.

They are those of `generate` (`zdc_jax.generation.steps`), for rows that come and go. All programs are
compiled before the first request. Results come back as arrays that are on their way; they are looked at while
the next step runs.

Layers and the choice of tokens are programs of their own, and in neither is a branch that the host must take
while it runs: a GPU would wait for it. So the host runs ahead, and says what is to be chosen. Several steps
are one program of both, a loop whose length is known.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import free_device_bytes
from zdc_jax.cache.near_far import NearFar
from zdc_jax.cache.paged import Paged
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.scheduler import Grouping
from zdc_jax.errors import CacheMemoryError, MeshError, PlanError
from zdc_jax.generation.next_token import Choice, Scores, score_tokens
from zdc_jax.generation.row_numbers import WIDTH
from zdc_jax.generation.steps import (
    DecodeState,
    Flat,
    Frontier,
    Network,
    SampledTokens,
    advance,
    advance_with,
    bucket,
    choose,
    decode_steps,
    take_last,
)
from zdc_jax.model.together import Place
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.parallel.mesh import DATA, SEQUENCE, whole_on
from zdc_jax.parallel.transformer import ShardedTransformer

logger = logging.getLogger("zdc_jax")

CLAUSES = frozenset({"chunked", "ragged", "order", "reuse"})
"""Of the contract of caches: texts are read in pieces, beside others, in rows that served others before."""
CHUNK_HEADER = 4
"""Numbers of a piece before its tokens: row, first position, tokens, whether it is the last of its text."""
SEVERAL = 3
"""Pieces of as many rows are read in one program at most. Attention is given each padded to all tokens."""
STEPS_ON_MESH = 4
"""Of decoding, in one program. On four H100 the host takes longer to start a step than the GPUs to run it: a
token of 8 rows of Llama-3-8B's shape in 16 bits takes 7.2 ms where each step is a program, 3.8 where four
are, and 3.7 where eight are (7a5629f)."""
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
"""Options of XLA for programs of many kernels of ours. It would put kernels together in CUDA graphs, and it
seems to make these anew where arrays have moved since, our kernels one by one. On an H200 a piece in four
layers of Llama-2-13B in codes takes 8.5 ms with them and 7.2 without, a decoded token 5.2 and 4.1; without
codes a piece takes 6.4 and 5.8, a token 3.1 and 3.4."""
PREFILL_OPTIONS = NO_GRAPHS | {"xla_gpu_dot_merger_threshold_mb": 0}
"""Options for pieces. XLA would make one product of those that give q and k, and copy their weights together
for it at each piece: 5 % of the time of 1024 tokens of Llama-2-13B."""


@dataclass(frozen=True)
class ChunkInputs:
    """A piece of a row's text: tokens from position `begin` on; behind the `last` of a text one is generated.

    numbers, choice: how that is chosen. following: the token behind the piece, where those behind each of
    its tokens are to be scored; None for no scores.
    """

    row: int
    tokens: Sequence[int]
    begin: int
    last: bool
    numbers: np.ndarray
    choice: Choice = "any"
    following: int | None = None

    @property
    def packed(self) -> list[int]:
        """As programs take it, before its tokens."""
        return [self.row, self.begin, len(self.tokens), self.last]


@dataclass
class Decoding:
    """Rows that get a token each: numbers [B, WIDTH] int32 of `row_numbers`, active [B] bool, and how these
    tokens are chosen."""

    numbers: np.ndarray
    active: np.ndarray
    choice: Choice

    def put(self, row: int, numbers: np.ndarray, choice: Choice) -> None:
        """A row more."""
        self.numbers[row], self.active[row] = numbers, True
        self.choice = max(choice, self.choice, key=get_args(Choice).index)

    def packed(self) -> Int[np.ndarray, "B 1+WIDTH"]:
        """As programs take them."""
        return np.concatenate([self.active[:, None].astype(np.int32), self.numbers], axis=1)


class Runner:
    """Arrays and compiled programs of one `servable` network.

    layout: of its cache. chunk: longest piece, in tokens. steps: of decoding that are one program, default
    `STEPS_ON_MESH` on a mesh and one elsewhere. whole: texts that are longer are read at once where nothing
    of them is held, None if none are. On a mesh with an axis `sequence` these are what does not fit into a
    piece: their tokens are divided. together: whether pieces are read in one program with the next tokens of
    other rows. grouping: of pieces.

    Raises:
      CacheMemoryError: the cache does not fit, or what steps need beside it.
    """

    def __init__(self, network: Network, layout: Layout, *, chunk: int, steps: int | None = None):
        self.layout, self._network = layout, network
        self._flat, self._ends = Flat.of(network), Flat.of(network.embeddings)
        self._where = whole_on(network.mesh) if isinstance(network, ShardedTransformer) else None
        self.steps = steps or (STEPS_ON_MESH if self._where else 1)
        self._widths = sorted({self._width(1 << i) for i in range(chunk.bit_length())}, reverse=True)
        devices = network.mesh.shape[SEQUENCE] if isinstance(network, ShardedTransformer) else 1
        self.whole = chunk if devices > 1 and layout.has_pages else None
        self.together = isinstance(network, Transformer) and layout.has_pages
        apart = any(spec.queries_apart for spec in layout.specs)
        several = SEVERAL if self.together and not apart else 1
        self.grouping = Grouping(several, self._widths[0], self._width)
        self._state: DecodeState
        self._tails: list[Array]
        self.reset()
        with ThreadPoolExecutor() as threads:  # XLA compiles one without Python's lock; the next is lowered.
            compiled = {name: threads.submit(lowered.compile) for name, lowered in self._lower_all()}
        self._programs = {name: future.result() for name, future in compiled.items()}
        self._check_memory()

    def reset(self) -> None:
        """All rows empty, in new arrays."""
        if hasattr(self, "_state"):
            del self._state, self._tails  # Two caches may not fit.
        layout, network = self.layout, self._network
        cache = network.new_cache(batch=layout.rows, capacity=layout.capacity, specs=layout.specs)
        self._state = DecodeState.of(cache, self._where)

        def copies(x):
            return jnp.zeros((layout.tails or 0, *x.shape[1:]), x.dtype, device=x.sharding)

        self._tails = list(map(copies, cache.own)) if layout.tails else []
        self._pages = np.zeros((layout.rows, layout.capacity // layout.page), np.int32)
        self._table: Array | None = None
        self._packed: tuple[np.ndarray, Array] | None = None

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Where the tokens of a row lie, in the steps from now on."""
        self._pages[row, : len(pages)] = pages
        self._table = None

    def keep(self, row: int, tail: int) -> None:
        """Copies what a row holds beside its pages."""
        pair = np.array([row, tail], np.int32)
        self._tails = self._programs["keep"](self._tails, self._state.cache.own, pair)

    def restore(self, row: int, tail: int) -> None:
        """Makes a row hold such a copy."""
        pair = np.array([row, tail], np.int32)
        self._state = self._programs["restore"](self._state, self._tails, pair)

    def read(
        self, chunks: Sequence[ChunkInputs], beside: "Decoding"
    ) -> tuple[list[SampledTokens], Scores | None, SampledTokens | None]:
        """Pieces of a group, and a token of each other row that decodes, in one program.

        Returns:
          what each piece gives; scores of the one piece that asks for them, which is by itself; tokens of
          other rows, None where there are none or they are left to `decode`.
        """
        (first, *more), found, decodes = chunks, None, beside.active.any()
        width = self._widths[0] if more else self._width(len(first.tokens))
        if self.together and (more or decodes or width < self._widths[0]):
            count, others = self.grouping.several if more else 1, beside.packed()
            packed = _packed(chunks, count, width, nowhere=self.layout.rows)
            given = np.concatenate([packed, others.ravel()])
            frontiers, hidden, decoded = self._step(_name_read_and_decode(count, width), given)
            if decodes:
                found = self._chosen(f"next {beside.choice}", decoded, self._sent(others))
        else:
            whole = " whole" if self._at_once(first) else ""
            packed = _packed(chunks, 1, width, nowhere=0)
            frontier, hidden, _ = self._step(f"read{whole} {width}", packed)
            frontiers = (frontier,)
        chosen = [self._first(chunk, frontier) for chunk, frontier in zip(chunks, frontiers, strict=False)]
        return chosen, self._scores(first, hidden), found

    def _at_once(self, chunk: ChunkInputs) -> bool:
        """Whether it is a text that is read whole."""
        long = self.whole is not None and len(chunk.tokens) > self.whole
        return long and chunk.begin == 0 and chunk.following is None

    def decode(self, rows: "Decoding", steps: int) -> list[SampledTokens]:
        """`steps` times one more token of rows that have not ended, in one program if it is for so many."""
        packed, found = self._sent(rows.packed()), []
        if steps == self.steps > 1:
            return [self._step(_in_one(rows.choice), packed)]
        for _ in range(steps):
            frontier = self._step("decode", packed)
            found.append(self._chosen(f"next {rows.choice}", frontier, packed))
        return found

    def _step(self, name: str, packed: np.ndarray | Array) -> Any:
        given = self._flat, self._state, self._on_device(), packed
        self._state, found = self._programs[name](*given)
        return found

    def _first(self, chunk: ChunkInputs, frontier: Frontier) -> SampledTokens:
        """The token behind a piece; behind one that is not the last none is made, of which there is word
        when the piece is read."""
        if not chunk.last:
            return SampledTokens(frontier.lengths, frontier.active, frontier.lengths, None, None, None)
        packed = np.concatenate([[np.int32(chunk.row)], chunk.numbers])[None]
        return self._chosen(f"first {chunk.choice}", frontier, packed)

    def _scores(self, chunk: ChunkInputs, hidden: Array) -> Scores | None:
        if chunk.following is None:
            return None
        behind = np.zeros(len(hidden), np.int32)
        behind[: len(chunk.tokens)] = *chunk.tokens[1:], chunk.following
        return self._programs[f"score {len(hidden)}"](self._ends, hidden, behind)

    def _chosen(self, name: str, frontier: Frontier, packed: np.ndarray | Array) -> SampledTokens:
        given = self._ends, self._state.last, self._state.done, frontier, packed
        last, done, chosen = self._programs[name](*given)
        self._state = self._state._replace(last=last, done=done)
        return chosen

    def nobody(self) -> "Decoding":
        """No rows; others are put in."""
        rows = self.layout.rows
        return Decoding(np.full((rows, WIDTH), -1, np.int32), np.zeros(rows, bool), "greedy")

    def _sent(self, packed: np.ndarray) -> Array:
        """On all devices: sent anew only where other rows decode than before."""
        if self._packed is None or not np.array_equal(packed, self._packed[0]):
            self._packed = packed, jax.device_put(packed, self._where)
        return self._packed[1]

    def _on_device(self) -> Array:
        """The table on all devices: sent anew only where it changed."""
        if self._table is None:
            self._table = jax.device_put(self._pages.copy(), self._where)
        return self._table

    def _lower_all(self) -> Iterator[tuple[str, Lowered]]:
        """All programs by name, those first that take longest to compile."""
        layout = self.layout

        def lower_read(step, width):
            return self._lowered(step, PREFILL_OPTIONS, CHUNK_HEADER + width)

        widest = self._widths[0]
        beside = dict.fromkeys([(self.grouping.several, widest), *((1, width) for width in self._widths)])
        for count, width in beside if self.together else ():
            step = partial(_read_and_decode, count, layout.rows)
            numbers = count * CHUNK_HEADER + width + layout.rows * (1 + WIDTH)
            yield _name_read_and_decode(count, width), self._lowered(step, PREFILL_OPTIONS, numbers)
        if (chunk := self.whole) is not None:
            whole = {self._width(chunk << i) for i in range(1, (layout.capacity // chunk).bit_length() + 1)}
            yield from ((f"read whole {width}", lower_read(_read_whole, width)) for width in whole)
        # Where nobody decodes, only long pieces would suffer from the room for others' tokens.
        alone = [widest] if self.together else self._widths
        yield from ((f"read {width}", lower_read(_read_chunk, width)) for width in alone)
        rows = layout.rows, 1 + WIDTH
        yield "decode", self._lowered(_decode, _decoding(layout), *rows)
        choices: tuple[Choice, ...] = ("greedy", "any") if self.steps > 1 else ()
        for choice in choices:
            in_one = partial(_decode_in_one, self.steps, choice)
            yield _in_one(choice), self._lowered(in_one, _decoding(layout), *rows)
        yield from self._choosing()
        if layout.tails:
            pair = jax.ShapeDtypeStruct((2,), jnp.int32)
            keep, restore = _donated(_keep, self._tails), _donated(_restore, self._state)
            yield "keep", keep.lower(self._tails, self._state.cache.own, pair)
            yield "restore", restore.lower(self._state, self._tails, pair)

    def _lowered(self, step: Callable[..., Any], options: dict[str, Any], *packed: int) -> Lowered:
        def run(
            flat: Flat[Network], state: DecodeState, table: Array, packed: Array
        ) -> tuple[DecodeState, Any]:
            state = state._replace(cache=replace(state.cache, table=table))
            state, given = step(flat.whole, state, packed)
            return state._replace(cache=replace(state.cache, table=None)), given

        whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self._where)
        table, like = map(whole, (self._pages.shape, packed))
        shardings = _shardings(self._state), self._where
        program = jax.jit(run, donate_argnums=1, out_shardings=shardings, compiler_options=options)
        return program.lower(self._flat, self._state, table, like)

    def _check_memory(self) -> None:
        """Raises `CacheMemoryError` where a step's own arrays do not fit beside weights and cache.

        Where those of several pieces in one program do not, pieces are read one by one.
        """
        several = (
            _name_read_and_decode(self.grouping.several, self._widths[0])
            if self.grouping.several > 1
            else None
        )
        if (free := free_device_bytes()) is None:
            return
        for name, program in self._programs.items():
            needed = needed_bytes(program)
            if needed > free and name == several:
                logger.warning("pieces of prompts are read one by one: %r needs %d bytes", name, needed)
                self.grouping = replace(self.grouping, several=1)
            elif needed > free:
                raise CacheMemoryError(
                    f"the step {name!r} needs {needed:,} bytes beside weights and cache, {free:,} are free: "
                    "need fewer rows, a smaller max_model_len or fewer cache_tokens"
                )

    def _choosing(self) -> Iterator[tuple[str, Lowered]]:
        """Programs that choose tokens, and that score those of a piece."""

        def lower(run, *given):
            return jax.jit(run, out_shardings=self._where).lower(self._ends, *given)

        def like(dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._where)

        hidden = partial(like, self._network.dtype)
        D = self._network.config.embed_dim
        steps = ("first", _first, 1), ("next", _next, self.layout.rows)
        for (name, step, count), choice in itertools.product(steps, get_args(Choice)):

            def run(ends, *given, step=step, choice=choice):
                return step(ends.whole, *given, choice)

            frontier: Any = hidden(count, D), like(bool, count), like(jnp.int32, count)
            given = self._state.last, self._state.done, Frontier(*frontier), like(jnp.int32, count, 1 + WIDTH)
            yield f"{name} {choice}", lower(run, *given)

        def score(ends, *given):
            return score_tokens(ends.whole.unembed, *given)

        for width in self._widths:
            yield f"score {width}", lower(score, hidden(width, D), like(jnp.int32, width))

    def _width(self, tokens: int) -> int:
        """Of the program that reads so many: a power of two, or the whole row."""
        return min(bucket(tokens), self.layout.capacity)


def _decoding(layout: Layout) -> dict[str, Any]:
    """Options of XLA for decoding: near tokens and far ones that are apart have kernels of their own."""
    apart = any(isinstance(spec, Paged) and isinstance(spec.spec, NearFar) for spec in layout.specs)
    return NO_GRAPHS if apart else {}


def _shardings(tree: Any) -> Any:
    """Of arrays, which lie the same after every step."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _donated(copy: Callable[..., Any], tree: Any) -> Any:
    """A program whose first argument and result is a tree like this."""
    return jax.jit(copy, donate_argnums=0, out_shardings=_shardings(tree))


def needed_bytes(program: Compiled) -> int:
    """Of memory that a program needs beside its arguments; 0 where a device does not tell."""
    if (found := program.memory_analysis()) is None:
        return 0
    # Results that take the place of arguments need no room of their own.
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def servable(network: Network) -> Network:
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


def _in_one(choice: Choice) -> str:
    """Name of a program of all `steps`; the one that draws serves all that are not greedy."""
    return f"decode in one {'greedy' if choice == 'greedy' else 'any'}"


def _name_read_and_decode(several: int, width: int) -> str:
    """Name of a program that reads so many pieces, of as many tokens together, and lets other rows decode."""
    return f"read {several} beside {width}"


def _packed(chunks: Sequence[ChunkInputs], count: int, width: int, *, nowhere: int) -> np.ndarray:
    """As programs take `count` pieces of `width` tokens; those that are none are of row `nowhere`."""
    heads = [chunk.packed for chunk in chunks] + [[nowhere, 0, 0, False]] * (count - len(chunks))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return np.array([*itertools.chain(*heads), *tokens, *[0] * (width - len(tokens))], np.int32)


def _read_chunk(
    network: Network, state: DecodeState, packed: Array
) -> tuple[DecodeState, tuple[Frontier, Array, None]]:
    """One piece of one row, whose own part of the cache is taken out and put back; its hidden states, too."""
    row, begin, count, last = packed[:CHUNK_HEADER]
    one, tokens, end = state.cache.row(row), packed[CHUNK_HEADER:], begin + count
    one = replace(one, lengths=begin[None]).release(begin[None] == 0)
    hidden, one = network.extend(one, tokens[None], end[None])
    frontier = Frontier(take_last(hidden, count[None]), last[None].astype(bool), end[None])
    return state._replace(cache=state.cache.with_row(row, one)), (frontier, hidden[0], None)


def _read_and_decode(
    several: int,
    rows: int,
    network: Transformer,
    state: DecodeState,
    packed: Array,
) -> tuple[DecodeState, tuple[tuple[Frontier, ...], Array, Frontier]]:
    """Pieces of `several` rows, and one step of all rows that are active."""
    heads, packed = (
        packed[: several * CHUNK_HEADER].reshape(several, CHUNK_HEADER),
        packed[several * CHUNK_HEADER :],
    )
    tokens, others = packed[: -rows * (1 + WIDTH)], packed[-rows * (1 + WIDTH) :].reshape(rows, 1 + WIDTH)
    row, begin, count, last = heads.T
    place = Place(row, begin, begin + count)
    given = others[:, 0].astype(bool), others[:, 1:], place, tokens
    cache, decoded, hidden = advance_with(network, state, *given)
    each = [slice(i, i + 1) for i in range(several)]
    ends = [take_last(hidden[None], jnp.cumsum(count)[one]) for one in each]
    frontiers = tuple(
        Frontier(end, last[one].astype(bool), place.end[one]) for end, one in zip(ends, each, strict=True)
    )
    return state._replace(cache=cache), (frontiers, hidden, decoded)


def _read_whole(
    network: ShardedTransformer, state: DecodeState, packed: Array
) -> tuple[DecodeState, tuple[Frontier, None, None]]:
    """A text of one row, from its first token to its last, divided over `sequence`; then put into pages."""
    row, _, count = packed[: CHUNK_HEADER - 1]
    tokens, one = packed[CHUNK_HEADER:], state.cache.row(row)
    capacity, pages = state.cache.capacity, cast(Array, one.table)
    end, new = network.prefill(tokens[None], count[None], capacity=capacity)
    layers = tuple(
        cast(Paged, spec).put_prompt(held, read, len(tokens), count[None], pages)
        for spec, held, read in zip(one.specs, one.layers, new.layers, strict=True)
    )
    one = replace(one, layers=layers, lengths=count[None])
    frontier = Frontier(end, jnp.ones(1, bool), count[None])
    return state._replace(cache=state.cache.with_row(row, one)), (frontier, None, None)


def _decode(network: Network, state: DecodeState, packed: Array) -> tuple[DecodeState, Frontier]:
    """One step of all rows that are active."""
    cache, frontier = advance(network, state, packed[:, 0].astype(bool), packed[:, 1:])
    return state._replace(cache=cache), frontier


def _decode_in_one(
    steps: int, choice: Choice, network: Network, state: DecodeState, packed: Array
) -> tuple[DecodeState, SampledTokens]:
    """So many steps of all rows that are active, which ask the host nothing between."""
    return decode_steps(network, state, packed[:, 0].astype(bool), packed[:, 1:], None, steps, choice)


def _next(
    embeddings: Embeddings, last: Array, done: Array, frontier: Frontier, packed: Array, choice: Choice
) -> tuple[Array, Array, SampledTokens]:
    """Tokens of all rows that get one."""
    return choose(embeddings, last, done, frontier, packed[:, 1:], choice)


def _first(
    embeddings: Embeddings, last: Array, done: Array, frontier: Frontier, packed: Array, choice: Choice
) -> tuple[Array, Array, SampledTokens]:
    """The first token of one row."""
    row = packed[0, 0]
    given = jax.lax.dynamic_slice_in_dim(last, row, 1), jax.lax.dynamic_slice_in_dim(done, row, 1)
    *new, chosen = _next(embeddings, *given, frontier, packed, choice)

    def put(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)

    return put(last, new[0]), put(done, new[1]), chosen


def _keep(tails: list[Array], own: list[Array], pair: Array) -> list[Array]:
    """What a row holds beside its pages, copied to a tail."""
    row, tail = pair
    return [held.at[tail].set(leaf[row]) for held, leaf in zip(tails, own, strict=True)]


def _restore(state: DecodeState, tails: list[Array], pair: Array) -> DecodeState:
    """The reverse."""
    row, tail = pair
    own = [leaf.at[row].set(held[tail]) for held, leaf in zip(tails, state.cache.own, strict=True)]
    return state._replace(cache=state.cache.with_own(own))
