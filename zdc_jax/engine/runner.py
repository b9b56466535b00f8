"""Device side of an engine: compiled programs for prefill chunks and for decoding all sequences.

The steps are those of `generate` (`zdc_jax.generation.steps`), for sequences that come and go. All programs
are compiled before the first request. Results are arrays still being computed; the engine reads them while
the next step runs.

Layers and the choice of tokens are separate programs. Neither has a branch that the host must take, for which
a GPU would wait. So the host runs ahead, and says which kind of choice is needed. Several decode steps run as
one program that contains both, in a loop of known length.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache, free_device_bytes
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.near_far import NearFar
from zdc_jax.cache.tails import TailArrays
from zdc_jax.engine import programs
from zdc_jax.engine.choosing import SHAPE, Step, list_choosing, name_choosing, name_score
from zdc_jax.engine.compiling import compile_all, needed_bytes
from zdc_jax.engine.inputs import ChunkInputs, DecodeInputs, pack_chunks
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.programs import CHUNK_HEADER, FlatPrefillState, FlatState
from zdc_jax.engine.scheduler import Grouping
from zdc_jax.engine.uncompiled import Program
from zdc_jax.errors import CacheMemoryError
from zdc_jax.generation.chunks import bucket, list_widths
from zdc_jax.generation.masks import full_mask
from zdc_jax.generation.next_token import Choice, Scores, Token
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.shaping import Shaping
from zdc_jax.generation.steps import (
    ONE_GRAPH,
    SEPARATE_PRODUCTS,
    DecodeState,
    Flat,
    Frontier,
    SampledTokens,
)
from zdc_jax.model.block import HalfLayer
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import SEQUENCE

logger = logging.getLogger("zdc_jax")

MAX_CHUNKS = 3
"""Most chunks of one program, twice as many in a long one; attention pads each of them."""
LONGEST_OF_SEVERAL = 2048
"""Most tokens of each of several chunks in one program."""
ALONE = 8192
"""Tokens of the longest chunk on GPUs if nothing else runs."""
FEW_ROWS = (1, 8, 16, 32)
"""Numbers of sequences that have programs of several decode steps of their own (decision 0023).

A step computes all its sequences, active or not.
"""
STEPS = 4
"""Default decode steps of one program on GPUs and on a mesh (decision 0014).

There the host takes longer to start a step and to send its tokens than GPUs to run it. More steps gain
little.
"""
LARGE_WEIGHTS, LARGE_STEPS = 8_000_000_000, 2
"""Bytes of weights from which a GPU's program has fewer decode steps. Their steps take longer than the host
needs, and a new request waits for the programs that were started."""
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
"""XLA options for programs with many custom kernels.

By default XLA puts kernels into CUDA graphs, and appears to rebuild a graph, kernel by kernel, whenever an
array has moved. That costs more than it saves in prefill, and where several graphs make up a step.
"""
PREFILL_OPTIONS = NO_GRAPHS | SEPARATE_PRODUCTS


class Runner:
    """Arrays and compiled programs of one network that passes `check_servable`.

    Args:
      network: network to run.
      layout: layout of its cache.
      chunk: most tokens of a chunk.
      steps: decode steps of one program; default `STEPS` on GPUs and on a mesh, `LARGE_STEPS` for large
        weights on a GPU, and 1 elsewhere.

    Attributes:
      layout: layout of the cache.
      steps: decode steps of one program.
      whole: longer prompts are prefilled in one chunk if none of their tokens are cached; None for no such
        prompts. On a mesh with an axis `sequence` it is the chunk size, and their tokens are split.
      together: whether chunks and the next tokens of other sequences share a program.
      cuts: whether chunks must end where snapshots are taken.
      alone: most tokens of a chunk that runs alone.
      grouping: rule for combining chunks.

    Raises:
      CacheMemoryError: the cache does not fit, or leaves too little memory for the steps.
    """

    def __init__(self, network: Transformer, layout: Layout, *, chunk: int, steps: int | None = None):
        self.layout, self._network = layout, network
        self._flat, self._flat_embeddings = Flat.of(network), Flat.of(network.embeddings)
        self._where = network.on_all_devices
        self.steps = steps or choose_decode_steps(self._flat.leaves, on_mesh=self._where is not None)
        self._widths = sorted({min(width, layout.capacity) for width in list_widths(chunk)}, reverse=True)
        self.whole = chunk if network.count_devices(SEQUENCE) > 1 and layout.has_pages else None
        self.together = network.mesh is None and layout.has_pages
        self.cuts = not self.together or network.reproducible
        self.alone = self._widths[0]
        if self.together and jax.default_backend() == "gpu":
            most = min(ALONE, layout.capacity)
            self.alone = max(self.alone, 1 << (most.bit_length() - 1))
        # On a mesh, arrays of few sequences would be divided otherwise.
        few = FEW_ROWS if self.steps > 1 and network.mesh is None else ()
        self._row_counts = [*(count for count in few if count < layout.rows), layout.rows]
        apart = any(spec.queries_apart for spec in layout.specs)
        widest = self._widths[0]
        several = MAX_CHUNKS * (1 + (widest > 2 * LONGEST_OF_SEVERAL)) if self.together and not apart else 1
        self.grouping = Grouping(several, widest, min(widest, LONGEST_OF_SEVERAL), self._pad_width)
        self._state: FlatState
        self._tails: Flat[TailArrays | None]
        self._frontier: Frontier
        self._shaping: Shaping
        self.reset()
        self._programs = compile_all(dict(self._list_programs()))
        self._check_memory()

    def reset(self) -> None:
        """Replace the cache with an empty one, in new arrays."""
        if hasattr(self, "_state"):
            del self._state, self._tails, self._frontier, self._shaping  # Two caches may not fit.
        layout, network = self.layout, self._network
        cache = network.new_cache(
            batch=layout.rows, capacity=layout.capacity, specs=layout.specs, join=self.together
        )
        self._state = FlatState.of(DecodeState.of(cache, self._where))
        in_place = self.together and not network.reproducible
        tails = TailArrays.empty(cache, layout.tails, in_place=in_place) if layout.tails else None
        self._tails = Flat.of(tails)
        hidden = jnp.zeros((layout.rows, network.config.embed_dim), network.dtype, device=self._where)
        self._frontier = Frontier(hidden, *(jnp.copy(x) for x in (self._state.done, cache.lengths)))
        vocab = network.config.vocab_size
        self._shaping = Shaping(
            counts=jnp.zeros((layout.rows, vocab), jnp.int32, device=self._where),
            bias=jnp.zeros((layout.rows, vocab), jnp.float32, device=self._where),
            mask=jax.device_put(full_mask(vocab, layout.rows), self._where),
        )
        self._pages = np.zeros((layout.rows, layout.capacity // layout.page), np.int32)
        self._table: Array | None = None
        self._sent: tuple[np.ndarray, Array] | None = None

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Set the pages of a sequence for all later steps.

        The table ends with repeats of the last page, since attention may multiply unused slots by 0. Slots of
        another sequence could hold NaN.
        """
        self._pages[row] = pages[-1]
        self._pages[row, : len(pages)] = pages
        self._table = None

    def clear(self, row: int, pages: Sequence[int]) -> None:
        """Fill pages, and the state of a sequence outside pages, with zeros."""
        padded = np.full(self._pages.shape[1], self.layout.pages, np.int32)
        padded[: len(pages)] = pages
        if "clear" not in self._programs:  # Compiled at the first failure, since most engines have none.
            program = _update(programs.clear, self._state.cache, np.int32(row), padded)
            self._programs["clear"] = program.compile()
        cache = self._programs["clear"](self._state.cache, np.int32(row), padded)
        self._state = self._state._replace(cache=cache)

    def restore_tail(self, row: int, tail: int) -> None:
        """Copy a snapshot to a sequence's state outside pages."""
        pair = np.array([row, tail], np.int32)
        cache = self._programs["restore tail"](self._state.cache, self._tails, pair)
        self._state = self._state._replace(cache=cache)

    def prefill(
        self, chunks: Sequence[ChunkInputs], decoding: DecodeInputs
    ) -> tuple[list[SampledTokens], Scores | None, Frontier | None]:
        """Prefill a group of chunks and, if possible, advance other sequences in the same program.

        Args:
          chunks: chunks of different sequences. A chunk that needs scores must be the only one.
          decoding: other sequences to decode.

        Returns:
          The token after each chunk, scores of the only chunk if it needs them, and the frontier of the other
          sequences for `choose_next`. It is None if nothing decodes, or if decoding is left to `advance` or
          `decode`.
        """
        (first, *more), decodes = chunks, decoding.active.any()
        width = self._widths[0] if more else self._pad_width(len(first.tokens))
        count = self.grouping.several if more else 1
        packed = pack_chunks(chunks, count, width, empty_row=self.layout.rows if self.together else 0)
        if self._is_whole(first):
            name = programs.name_prefill_whole(width)
        elif self.together and (more or decodes or width < self._widths[0]):
            name = programs.name_prefill_and_decode(count, width)
            packed = np.concatenate([packed, decoding.pack().ravel()])
        else:
            name = programs.name_prefill(width)
        (self._state, self._tails), (frontiers, half, others) = self._programs[name](
            self._flat, FlatPrefillState(self._state, self._tails), self._send_table(), packed
        )
        pairs = zip(chunks, frontiers, strict=False)
        chosen = [self._choose_first(chunk, frontier) for chunk, frontier in pairs]
        return chosen, self._score(first, half), others if decodes and self.together else None

    def _is_whole(self, chunk: ChunkInputs) -> bool:
        """Return whether a chunk is a whole text, to be split over devices."""
        is_long = self.whole is not None and len(chunk.tokens) > self.whole
        return is_long and chunk.begin == 0 and chunk.following is None

    def decode(self, inputs: DecodeInputs, steps: int) -> list[SampledTokens]:
        """Decode `steps` tokens of each active sequence that has not ended.

        They are one program if `steps` is `self.steps` and no logits are changed, and otherwise two programs
        for each step.
        """
        if steps == self.steps > 1 and not inputs.is_shaped:
            last = int(np.flatnonzero(inputs.active)[-1])
            count = next(count for count in self._row_counts if count > last)
            program = self._programs[programs.name_decode_loop(count, inputs.choice)]
            packed = self._send(inputs.pack(count))
            self._state, chosen = program(self._flat, self._state, self._send_table(), packed)
            return [chosen]
        return [self.choose_next(self.advance(inputs), inputs) for _ in range(steps)]

    def advance(self, inputs: DecodeInputs) -> Frontier:
        """Run the layers of one decode step of all active sequences.

        The result is valid until the next call, which writes to the same arrays.
        """
        state, table, packed = self._state, self._send_table(), self._send(inputs.pack())
        cache, self._frontier = self._programs["decode"](
            self._flat, state.cache, self._frontier, state.last, state.done, table, packed
        )
        self._state = state._replace(cache=cache)
        return self._frontier

    def choose_next(
        self, frontier: Frontier, inputs: DecodeInputs, mask: np.ndarray | None = None
    ) -> SampledTokens:
        """Choose the next tokens of sequences that were advanced.

        Args:
          frontier: result of `advance` or `prefill` with the same inputs.
          inputs: sequences to decode.
          mask: a bit for each token that each sequence may get (`Shaping.mask`), [B, W] int32; None for all.
            It applies to inputs with `is_shaped` only.
        """
        shaping = self._shaping if inputs.is_shaped else None
        if shaping is not None and mask is not None:
            shaping = shaping._replace(mask=jax.device_put(mask, self._where))
        return self._choose("next", inputs.choice, frontier, self._send(inputs.pack()), shaping)

    def _choose_first(self, chunk: ChunkInputs, frontier: Frontier) -> SampledTokens:
        """Choose the token after a text's last chunk; earlier chunks yield no token.

        The result for an earlier chunk has a count of 0. Its arrays are ready when the chunk is prefilled.
        """
        if not chunk.last:
            lengths, active = frontier.lengths, frontier.active
            return SampledTokens(Token(lengths, active), active, lengths)
        packed, shaping = np.concatenate([[np.int32(chunk.row)], chunk.numbers])[None], None
        if chunk.shaping is not None:
            counts, bias = self._programs[SHAPE](self._shaping[:2], np.int32(chunk.row), chunk.shaping[:2])
            self._shaping = Shaping(counts, bias, self._shaping.mask)
            shaping = Shaping(counts, bias, jax.device_put(chunk.shaping.mask[None], self._where))
        return self._choose("first", chunk.choice, frontier, packed, shaping)

    def _score(self, chunk: ChunkInputs, half: HalfLayer) -> Scores | None:
        """Score the token after each token of a chunk, if the chunk needs scores."""
        if chunk.following is None:
            return None
        following = np.zeros(half.x.shape[1], np.int32)
        following[: len(chunk.tokens)] = *chunk.tokens[1:], chunk.following
        return self._programs[name_score(len(following))](self._flat, half, following)

    def _choose(
        self,
        step: Step,
        choice: Choice,
        frontier: Frontier,
        packed: np.ndarray | Array,
        shaping: Shaping | None,
    ) -> SampledTokens:
        """Run a program that chooses tokens."""
        state, program = self._state, self._programs[name_choosing(step, choice, shaping is not None)]
        changes = (None, None, None) if shaping is None else shaping
        last, done, chosen, counts = program(
            self._flat_embeddings, *changes, state.last, state.done, frontier, packed
        )
        self._state = state._replace(last=last, done=done)
        if counts is not None:
            self._shaping = self._shaping._replace(counts=counts)
        return chosen

    def new_decode_inputs(self) -> DecodeInputs:
        """Return inputs without active sequences."""
        return DecodeInputs.empty(self.layout.rows)

    def _send(self, packed: np.ndarray) -> Array:
        """Return packed inputs on all devices, transferred only if they differ from the last ones."""
        if self._sent is None or not np.array_equal(packed, self._sent[0]):
            self._sent = packed, jax.device_put(packed, self._where)
        return self._sent[1]

    def _send_table(self) -> Array:
        """Return the page table on all devices, transferred only if it changed."""
        if self._table is None:
            self._table = jax.device_put(self._pages.copy(), self._where)
        return self._table

    def _list_programs(self) -> Iterator[tuple[str, Program]]:
        """Yield the names and the programs.

        Small ones come first: XLA times products for them, which is exact while most cores are idle. Of the
        others, those that compile longest come first.
        """
        layout, widest = self.layout, self._widths[0]
        yield from list_choosing(
            self._network, self._state, self._shaping, widths=self._widths, where=self._where
        )
        if layout.tails:
            pair = jax.ShapeDtypeStruct((2,), jnp.int32)
            yield "restore tail", _update(programs.restore_tail, self._state.cache, self._tails, pair)

        def prefill(step: Callable[..., Any], *lengths: int) -> Program:
            state = FlatPrefillState(self._state, self._tails)
            return self._step(partial(programs.run_flat, step), PREFILL_OPTIONS, state, sum(lengths))

        sizes = dict.fromkeys([(self.grouping.several, widest), *((1, width) for width in self._widths)])
        for count, width in sizes if self.together else ():
            step = partial(programs.prefill_and_decode, count, self.grouping.longest, layout.rows)
            lengths = count * CHUNK_HEADER, width, layout.rows * (1 + WIDTH)
            yield programs.name_prefill_and_decode(count, width), prefill(step, *lengths)
        if (chunk := self.whole) is not None:
            doublings = range(1, (layout.capacity // chunk).bit_length() + 1)
            for width in {self._pad_width(chunk << i) for i in doublings}:
                yield programs.name_prefill_whole(width), prefill(programs.prefill_whole, CHUNK_HEADER, width)
        # If nothing decodes, only chunks of full width would suffer from the room for others' tokens.
        alone = partial(programs.prefill_and_decode, 1, 0, 0) if self.together else programs.prefill_chunk
        for width in self._list_alone_widths() if self.together else self._widths:
            yield programs.name_prefill(width), prefill(alone, CHUNK_HEADER, width)
        options = _choose_decode_options(self._network, layout)
        state, frontier = self._state, self._frontier
        numbers = self._describe(self._pages.shape), self._describe((layout.rows, 1 + WIDTH))
        arguments = self._flat, state.cache, frontier, state.last, state.done, *numbers
        jit_options = {"donate_argnums": (1, 2), "keep_unused": True, "compiler_options": options}
        jit_options["out_shardings"] = _get_shardings((state.cache, frontier))
        yield "decode", Program(programs.advance_in_place, arguments, jit_options)
        choices: tuple[Choice, ...] = ("greedy", "any") if self.steps > 1 else ()
        for count, choice in itertools.product(self._row_counts, choices):
            loop = partial(programs.run_flat, partial(programs.decode_loop, self.steps, choice))
            name = programs.name_decode_loop(count, choice)
            yield name, self._step(loop, options, self._state, count, 1 + WIDTH)

    def _list_alone_widths(self) -> list[int]:
        """Return the widths of chunks that run alone."""
        doublings = range((self.alone // self._widths[0]).bit_length() + 1)
        return sorted({min(self._widths[0] << i, self.alone) for i in doublings}, reverse=True)

    def _step(
        self,
        step: Callable[..., Any],
        options: dict[str, Any],
        state: FlatState | FlatPrefillState,
        *packed_shape: int,
    ) -> Program:
        """Return a program of layers whose packed inputs have this shape; it updates `state`."""
        arguments = self._flat, state, self._describe(self._pages.shape), self._describe(packed_shape)
        shardings = _get_shardings(state), self._where
        jit_options = {"donate_argnums": 1, "out_shardings": shardings, "compiler_options": options}
        return Program(step, arguments, jit_options)

    def _describe(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Describe numbers that the host sends."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._where)

    def _check_memory(self) -> None:
        """Raise `CacheMemoryError` if the arrays of a step do not fit together with weights and cache.

        Programs with several chunks or with long ones are left out if they do not fit.
        """
        several, widest = self.grouping.several, self._widths[0]
        grouped = programs.name_prefill_and_decode(several, widest) if several > 1 else None
        long = {programs.name_prefill(width): width for width in self._list_alone_widths() if width > widest}
        if (free := free_device_bytes()) is None:
            return
        for name, program in self._programs.items():
            if (needed := needed_bytes(program)) <= free:
                continue
            if name != grouped and name not in long:
                raise CacheMemoryError(
                    f"the program {name!r} needs {needed:,} bytes in addition to weights and cache, "
                    f"{free:,} are free; lower chunk, max_sequences, max_model_len or cache_tokens"
                )
            logger.warning("the program %r is left out: it needs %d bytes, %d are free", name, needed, free)
            if name == grouped:
                self.grouping = replace(self.grouping, several=1)
            else:
                self.alone = min(self.alone, max(widest, long[name] // 2))

    def _pad_width(self, tokens: int) -> int:
        """Return the width of the program for a chunk, at most the capacity."""
        fitting = (width for width in self._widths if width >= tokens)
        return min(fitting, default=min(bucket(tokens), self.layout.capacity))


def choose_decode_steps(weights: Sequence[Array | jax.ShapeDtypeStruct], *, on_mesh: bool) -> int:
    """Return the default number of decode steps of one program, for a network's arrays."""
    if on_mesh:
        return STEPS
    if jax.default_backend() != "gpu":
        return 1
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in weights)
    return STEPS if size < LARGE_WEIGHTS else LARGE_STEPS


def _choose_decode_options(network: Transformer, layout: Layout) -> dict[str, Any]:
    """Return XLA options for decoding (decision 0013).

    On a mesh, collectives split graphs. Caches of recent and older tokens then have many small ones.
    """
    if network.mesh is None:
        return ONE_GRAPH
    split = any(isinstance(spec, Paged) and isinstance(spec.spec, NearFar) for spec in layout.specs)
    return NO_GRAPHS if split else {}


def _get_shardings(tree: Any) -> Any:
    """Return the shardings of arrays, which no step changes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _update(function: Callable[..., Any], cache: Flat[KVCache], *inputs: Any) -> Program:
    """Return a program that updates the cache in place."""
    options = {"donate_argnums": 0, "out_shardings": _get_shardings(cache)}
    return Program(function, (cache, *inputs), options)
