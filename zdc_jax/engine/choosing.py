"""Programs of an engine that choose tokens from hidden states, and that score known tokens."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from zdc_jax.axes import Array
from zdc_jax.engine.programs import FlatState
from zdc_jax.engine.uncompiled import Program
from zdc_jax.generation.masks import mask_width
from zdc_jax.generation.next_token import Choice, Scores, score_tokens
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.shaping import Shaping
from zdc_jax.generation.steps import Flat, Frontier, SampledTokens, choose
from zdc_jax.model.block import HalfLayer
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer

Step = Literal["first", "next"]
"""Step whose tokens are chosen: the first token of one sequence, or the next ones of all."""
SHAPE = "shape"
"""Name of the program that stores the counts and biases of one sequence."""


def list_choosing(
    network: Transformer,
    state: FlatState,
    shaping: Shaping,
    *,
    widths: Sequence[int],
    where: Sharding | None,
) -> Iterator[tuple[str, Program]]:
    """Yield the names and the programs.

    Args:
      network: network of the engine.
      state: state of its batch.
      shaping: arrays from which logits of its batch are changed.
      widths: numbers of tokens of the programs that score.
      where: sharding of all arrays.
    """
    embeddings = Flat.of(network.embeddings)

    def program(step: Callable[..., Any], *inputs: Any, **options: Any) -> Program:
        return Program(partial(_run, step), (embeddings, *inputs), {"out_shardings": where, **options})

    def describe(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    D, vocab = network.config.embed_dim, network.config.vocab_size
    for name, choice, is_shaped in itertools.product(get_args(Step), get_args(Choice), (False, True)):
        count = 1 if name == "first" else len(state.last)
        frontier = Frontier(
            describe(network.dtype, count, D), describe(bool, count), describe(jnp.int32, count)
        )
        changes: Any = None, None, None
        if is_shaped:
            changes = shaping.counts, shaping.bias, describe(jnp.int32, count, mask_width(vocab))
        inputs = *changes, state.last, state.done, frontier, describe(jnp.int32, count, 1 + WIDTH)
        step = partial(choose_in_batch, step=name, choice=choice)
        # What is updated stays in its place: the next step's CUDA graph is updated if an address changes.
        donated = (1, 4, 5) if is_shaped else (4, 5)
        yield name_choosing(name, choice, is_shaped), program(step, *inputs, donate_argnums=donated)
    for width in widths:
        o = describe(network.dtype, 1, width, *network.layers[-1].attention.o.shape[:2])
        half = HalfLayer(describe(network.dtype, 1, width, D), o if network.mesh is None else None)
        arguments = Flat.of(network), half, describe(jnp.int32, width)
        yield name_score(width), Program(_score, arguments, {"out_shardings": where})
    one = describe(jnp.int32, vocab), describe(jnp.float32, vocab)
    options = {"donate_argnums": 0, "out_shardings": where}
    yield SHAPE, Program(_put_row, (shaping[:2], describe(jnp.int32), one), options)


def name_choosing(step: Step, choice: Choice, is_shaped: bool) -> str:
    """Name the program that chooses tokens, from changed logits if `is_shaped` (`Shaping`)."""
    return f"choose {step}, {choice}{', shaped' if is_shaped else ''}"


def name_score(width: int) -> str:
    """Name the program that scores `width` tokens."""
    return f"score, {width} tokens"


def choose_in_batch(
    embeddings: Embeddings,
    counts: Array | None,
    bias: Array | None,
    mask: Array | None,
    last: Array,
    done: Array,
    frontier: Frontier,
    packed: Array,
    *,
    step: Step,
    choice: Choice,
) -> tuple[Array, Array, SampledTokens, Array | None]:
    """Choose tokens and update the arrays of a batch.

    Args:
      embeddings: embeddings that turn hidden states into logits.
      counts: `Shaping.counts` of the batch; None for no changes of logits.
      bias: `Shaping.bias` of the batch, or None.
      mask: `Shaping.mask` of the sequences in the frontier, or None.
      last: newest token of each sequence.
      done: whether each newest token is a stop token.
      frontier: hidden states and lengths of the batch, or of one sequence.
      packed: batch index and packed request parameters of each of these sequences.
      step: `first` for one sequence, `next` for the batch.
      choice: kind of program.

    Returns:
      The new `last` and `done`, the tokens as one step, and the new counts.
    """
    row, whole = packed[0, 0], (last, done, counts)
    if step == "first":
        last, done, counts, bias = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, row, 1), (last, done, counts, bias)
        )
    shaping = None if counts is None or bias is None else Shaping(counts, bias, mask)
    last, done, chosen, counts = choose(embeddings, last, done, frontier, packed[:, 1:], choice, shaping)
    # The host keeps the tokens. A copy leaves the frontier's own array free for the next step.
    chosen = chosen._replace(lengths=jnp.copy(chosen.lengths))
    if step == "first":
        last, done, counts = jax.tree.map(
            lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, row, 0),
            whole,
            (last, done, counts),
        )
    return last, done, chosen, counts


def _run(step: Callable[..., Any], embeddings: Flat[Embeddings], *inputs: Any) -> Any:
    return step(embeddings.whole, *inputs)


def _score(flat: Flat[Transformer], half: HalfLayer, tokens: Array) -> Scores:
    network = flat.whole
    return score_tokens(network.embeddings.unembed, network.finish(half)[0], tokens)


def _put_row(whole: tuple[Array, ...], row: Array, one: tuple[Array, ...]) -> tuple[Array, ...]:
    """Replace one sequence's part of some arrays."""
    return tuple(array.at[row].set(part) for array, part in zip(whole, one, strict=True))
