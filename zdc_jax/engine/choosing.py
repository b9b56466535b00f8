"""Programs of an engine that choose tokens from hidden states, and that score known tokens."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from zdc_jax.axes import Array
from zdc_jax.engine.compiling import Lowering
from zdc_jax.generation.masks import mask_width
from zdc_jax.generation.next_token import Choice, Scores, score_tokens
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.shaping import Shaping
from zdc_jax.generation.steps import DecodeState, Flat, Frontier, SampledTokens, choose
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer

SHAPED: tuple[Choice, ...] = ("scored", "any")
"""Kinds of programs that choose tokens from changed logits (`Shaping`)."""
SHAPE = "shape"
"""Name of the program that stores the counts and biases of one sequence."""


def list_choosing(
    network: Transformer,
    state: DecodeState,
    shaping: Shaping,
    *,
    widths: Sequence[int],
    where: Sharding | None,
) -> Iterator[tuple[str, Lowering]]:
    """Yield the names of the programs and how to lower them.

    Args:
      network: network of the engine.
      state: state of its batch.
      shaping: arrays from which logits of its batch are changed.
      widths: numbers of tokens of the programs that score.
      where: sharding of all arrays.
    """
    embeddings = Flat.of(network.embeddings)

    def lower(run: Callable[..., Any], *inputs: Any, **options: Any) -> Lowering:
        return partial(jax.jit(run, out_shardings=where, **options).lower, embeddings, *inputs)

    def describe(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    D, vocab = network.config.embed_dim, network.config.vocab_size
    steps = ("first", _choose_first, 1), ("next", _choose_next, len(state.last))
    kinds = [(choice, False) for choice in get_args(Choice)] + [(choice, True) for choice in SHAPED]
    for (name, step, count), (choice, is_shaped) in itertools.product(steps, kinds):

        def run(
            flat: Flat[Embeddings],
            counts: Array | None,
            rest: tuple[Array, Array] | None,
            *inputs: Any,
            step: Any = step,
            choice: Choice = choice,
        ) -> tuple[Array, Array, SampledTokens, Array | None]:
            changes = None if counts is None or rest is None else Shaping(counts, *rest)
            return step(flat.whole, *inputs, choice, changes)

        hidden = describe(network.dtype, count, D)
        frontier = Frontier(hidden, describe(bool, count), describe(jnp.int32, count))
        inputs = state.last, state.done, frontier, describe(jnp.int32, count, 1 + WIDTH)
        changes: Any = None, None
        if is_shaped:
            changes = shaping.counts, (shaping.bias, describe(jnp.int32, count, mask_width(vocab)))
        # The counts are updated in place.
        yield (
            name_choosing(name, choice, is_shaped),
            lower(run, *changes, *inputs, donate_argnums=1 if is_shaped else ()),
        )

    def score(flat: Flat[Embeddings], hidden: Array, tokens: Array) -> Scores:
        return score_tokens(flat.whole.unembed, hidden, tokens)

    for width in widths:
        yield name_score(width), lower(score, describe(network.dtype, width, D), describe(jnp.int32, width))

    one = describe(jnp.int32, vocab), describe(jnp.float32, vocab)
    put = jax.jit(_put_row, donate_argnums=0, out_shardings=where)
    yield SHAPE, partial(put.lower, shaping[:2], describe(jnp.int32), one)


def name_choosing(step: str, choice: Choice, is_shaped: bool) -> str:
    """Name the program that chooses tokens; `scored` ones serve `greedy` sequences with changed logits."""
    if not is_shaped:
        return f"choose {step}, {choice}"
    return f"choose {step}, {'any' if choice == 'any' else 'scored'}, shaped"


def name_score(width: int) -> str:
    """Name the program that scores `width` tokens."""
    return f"score, {width} tokens"


def _choose_next(
    embeddings: Embeddings,
    last: Array,
    done: Array,
    frontier: Frontier,
    packed: Array,
    choice: Choice,
    shaping: Shaping | None,
) -> tuple[Array, Array, SampledTokens, Array | None]:
    """Choose the next tokens of all sequences in the frontier."""
    return choose(embeddings, last, done, frontier, packed[:, 1:], choice, shaping)


def _choose_first(
    embeddings: Embeddings,
    last: Array,
    done: Array,
    frontier: Frontier,
    packed: Array,
    choice: Choice,
    shaping: Shaping | None,
) -> tuple[Array, Array, SampledTokens, Array | None]:
    """Choose the first token of one sequence; `shaping` has the mask of this sequence only."""
    row = packed[0, 0]

    def read(whole: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(whole, row, 1)

    def write(whole: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)

    own = None if shaping is None else Shaping(read(shaping.counts), read(shaping.bias), shaping.mask)
    new_last, new_done, chosen, counts = _choose_next(
        embeddings, read(last), read(done), frontier, packed, choice, own
    )
    if shaping is not None and counts is not None:
        counts = write(shaping.counts, counts)
    return write(last, new_last), write(done, new_done), chosen, counts


def _put_row(whole: tuple[Array, ...], row: Array, one: tuple[Array, ...]) -> tuple[Array, ...]:
    """Replace one sequence's part of some arrays."""
    return tuple(array.at[row].set(part) for array, part in zip(whole, one, strict=True))
