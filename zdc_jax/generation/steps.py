"""Compiled steps of generation: prefill of prompt chunks, and decoding.

Each step has two halves. Layers add tokens to the cache (`advance`, or the network's `extend`), and
`choose` picks the next token of each sequence. `generate`, `stream` and `chat` run both halves as one
program, for sequences that start together. An engine compiles a program for each half, for sequences that
come and go.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.generation.next_token import Choice, Token, choose_token
from zdc_jax.generation.packed_parameters import PackedParameters
from zdc_jax.generation.shaping import Shaping
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation

_GRAPHS = "xla_gpu_enable_command_buffer"
ONE_GRAPH = (
    {
        _GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    }
    if _GRAPHS not in os.environ.get("XLA_FLAGS", "")
    else {}
)
"""XLA options that put loops into CUDA graphs, in addition to what jaxlib 0.11.2 puts there by default.

A loop whose steps all fit into a graph becomes one graph, and no longer asks the host whether to continue.
This needs a driver for CUDA 12.9 or later. Collectives do not fit into a graph. The same flag in `XLA_FLAGS`
takes precedence.

Kernels of a graph that do not need each other's results run at the same time, such as attention to recent and
to older tokens. With equal matrix kernels, answers are the same, bit for bit.
"""

SEPARATE_PRODUCTS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""XLA options for prefill.

XLA would merge products of the same tokens, such as those of gate and up projection, and copy their weights
together for every chunk.
"""


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["tree", "empty"])
@dataclass(frozen=True)
class Flat[T]:
    """Modules, such as a network, or a cache, flattened to their arrays.

    JAX flattens the arguments of every call. For modules that is Python code, which takes milliseconds for a
    large network; a list of arrays is fast. Each array that a program takes and returns costs the host 5
    microseconds, so arrays without numbers are left out.

    Attributes:
      leaves: arrays with numbers.
      tree: structure of all arrays.
      empty: index, shape and dtype of each array without numbers.
    """

    leaves: list[Array]
    tree: jax.tree_util.PyTreeDef
    empty: tuple[tuple[int, tuple[int, ...], jnp.dtype], ...] = ()

    @classmethod
    def of(cls, whole: T) -> "Flat[T]":
        """Flatten; the arrays are shared."""
        leaves, tree = jax.tree.flatten(whole)
        empty = tuple((i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves) if leaf.size == 0)
        return cls([leaf for leaf in leaves if leaf.size], tree, empty)

    @property
    def whole(self) -> T:
        """The modules or the cache."""
        leaves = list(self.leaves)
        for index, shape, dtype in self.empty:
            leaves.insert(index, jnp.zeros(shape, dtype))
        return jax.tree.unflatten(self.tree, leaves)


def take_flat[T, **P, R](step: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[Flat[T], P], R]:
    """Return a step whose first argument is flattened."""

    @wraps(step)
    def run(flat: Flat[T], *args: P.args, **kwargs: P.kwargs) -> R:
        return step(flat.whole, *args, **kwargs)

    return run


class DecodeState(NamedTuple):
    """State of a batch between two steps.

    Attributes:
      cache: KV cache.
      last: newest token of each sequence, which is not in the cache yet, [B] int32.
      done: whether that token is a stop token, [B] bool.
      shaping: arrays from which logits are changed before a token is chosen; None for no changes.
    """

    cache: KVCache
    last: Int[Array, " B"]
    done: Bool[Array, " B"]
    shaping: Shaping | None = None

    @classmethod
    def of(cls, cache: KVCache, where: Sharding | None = None) -> "DecodeState":
        """Return the state of sequences without a newest token; `where` is the sharding of its arrays."""
        batch = len(cache.lengths)
        last, done = jax.device_put((np.zeros(batch, np.int32), np.ones(batch, bool)), where)
        return cls(cache, last, done)

    def first(self, count: int) -> "DecodeState":
        """Return the state of the first `count` sequences; without `shaping`."""
        return DecodeState(self.cache.first(count), self.last[:count], self.done[:count])

    def with_first(self, some: "DecodeState") -> "DecodeState":
        """Return the state with its first sequences taken from `some`, a `first` state."""
        last, done = (
            jnp.concatenate([new, old[len(new) :]])
            for new, old in ((some.last, self.last), (some.done, self.done))
        )
        return self._replace(cache=self.cache.with_first(some.cache), last=last, done=done)


class Frontier(NamedTuple):
    """Inputs from which the next tokens are chosen.

    Attributes:
      hidden: last hidden state of each sequence, [B, D].
      active: sequences that get a token, [B] bool.
      lengths: tokens of each sequence before the new one, [B] int32.
    """

    hidden: Float[Array, "B D"]
    active: Bool[Array, " B"]
    lengths: Int[Array, " B"]


class SampledTokens(NamedTuple):
    """Tokens generated by a step.

    Attributes:
      new: the tokens, each array [B, steps, …]. One from logits that are not finite is a sequence's last.
      counts: number of valid tokens of each sequence, [B] int32.
      lengths: cache length of each sequence that got tokens, after the step, [B] int32.
    """

    new: Token
    counts: Array
    lengths: Array

    @property
    def tokens(self) -> Array:
        """Token ids, [B, steps] int32."""
        return self.new.token


def choose(
    embeddings: Embeddings,
    last: Int[Array, " B"],
    done: Bool[Array, " B"],
    frontier: Frontier,
    numbers: Int[Array, "B WIDTH"],
    choice: Choice = "any",
    shaping: Shaping | None = None,
) -> tuple[Array, Array, SampledTokens, Array | None]:
    """Choose the next token of the active sequences.

    Args:
      embeddings: embeddings that turn hidden states into logits.
      last: newest token of each sequence.
      done: whether each newest token is a stop token.
      frontier: hidden states and lengths of the sequences.
      numbers: packed request parameters (`pack_parameters`).
      choice: kind of program.
      shaping: arrays from which logits are changed before the choice; None for no changes.

    Returns:
      The new `last` and `done`, the tokens as one step, and the new counts of `shaping`, if any. A token from
      logits that are not finite ends its sequence.
    """
    rows, logits = PackedParameters.of(numbers), embeddings.unembed(frontier.hidden)
    new = choose_token(logits, rows, frontier.lengths, choice, shaping)
    last = jnp.where(frontier.active, new.token, last)
    ends = rows.stops(new.token, frontier.lengths) | ~new.finite
    done = jnp.where(frontier.active, ends, done)
    one_step = jax.tree.map(lambda x: x[:, None], new)
    chosen = SampledTokens(one_step, frontier.active.astype(jnp.int32), frontier.lengths)
    counts = None if shaping is None else shaping.counted(new.token, frontier.active)
    return last, done, chosen, counts


def _choose_in_state(
    embeddings: Embeddings,
    state: DecodeState,
    frontier: Frontier,
    numbers: Int[Array, "B WIDTH"],
    choice: Choice,
) -> tuple[DecodeState, SampledTokens]:
    """Run `choose` on a state whose cache is up to date; return the new state and the tokens."""
    last, done, chosen, counts = choose(
        embeddings, state.last, state.done, frontier, numbers, choice, state.shaping
    )
    shaping = None if counts is None or state.shaping is None else state.shaping._replace(counts=counts)
    return DecodeState(state.cache, last, done, shaping), chosen


def advance(
    network: Transformer,
    state: DecodeState,
    wanted: Bool[Array, " B"],
    numbers: Int[Array, "B WIDTH"],
    implementation: Implementation | None = None,
) -> tuple[KVCache, Frontier]:
    """Add the newest tokens to the cache, for `wanted` sequences that are neither done nor full."""
    cache, active, end = select_active(state, wanted, numbers)
    hidden, longer = network.extend(cache, state.last[:, None], end, implementation)
    lengths = jnp.where(wanted, end, state.cache.lengths)
    return replace(longer, lengths=lengths), Frontier(hidden[:, 0], active, end)


def select_active(
    state: DecodeState, wanted: Bool[Array, " B"], numbers: Int[Array, "B WIDTH"]
) -> tuple[KVCache, Array, Array]:
    """Select the wanted sequences that get a token: those neither done nor full.

    Returns the cache, which sequences are active, and the cache length of each after the step. In that cache,
    sequences that are not wanted have length 0: their pages may belong to others by now and must not be read.
    """
    lengths = state.cache.lengths
    active = wanted & ~state.done & (lengths < PackedParameters.of(numbers).limit)
    visible = jnp.where(wanted, lengths, 0)
    return replace(state.cache, lengths=visible), active, visible + active


def take_last(hidden: Float[Array, "B T D"], count: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Return the hidden state of the last of `count` tokens of each sequence."""
    return jnp.take_along_axis(hidden, jnp.clip(count - 1, 0)[:, None, None], axis=1)[:, 0]


def read_chunks(
    network: Transformer,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    ends: Bool[Array, " B"],
    numbers: Int[Array, "B WIDTH"],
    choice: Choice = "any",
    implementation: Implementation | None = None,
) -> tuple[DecodeState, SampledTokens]:
    """Prefill one chunk of each prompt, and choose the first token where a prompt ends.

    Args:
      network: network.
      state: state after earlier chunks.
      tokens: chunk of each prompt, padded on the right. Padding may exceed the cache's capacity.
      count: tokens of each chunk.
      ends: prompts that end with this chunk.
      numbers: packed request parameters (`pack_parameters`).
      choice: kind of program that chooses tokens.
      implementation: attention implementation.
    """
    hidden, cache = network.extend_last(state.cache, tokens, state.cache.lengths + count, implementation)
    return choose_first(network, state._replace(cache=cache), hidden, ends, numbers, choice)


def read_new_prompts(
    network: Transformer,
    shaping: Shaping | None,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    numbers: Int[Array, "B WIDTH"],
    specs: tuple[LayerCacheSpec, ...],
    capacity: int,
    choice: Choice = "any",
    implementation: Implementation | None = None,
) -> tuple[DecodeState, SampledTokens]:
    """Create a cache and run `read_chunks` of whole prompts, in one program.

    A program that only creates the cache returns hundreds of arrays to the host, and the device then waits
    until the host has passed them on. The cache must fit in memory (`check_fits_now`).
    """
    batch = len(tokens)
    cache = KVCache.trace(specs, batch=batch, capacity=capacity)
    state = DecodeState(cache, jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), shaping)
    return read_chunks(network, state, tokens, count, jnp.ones(batch, bool), numbers, choice, implementation)


def choose_first(
    network: Transformer,
    state: DecodeState,
    hidden: Float[Array, "B D"],
    ends: Bool[Array, " B"],
    numbers: Int[Array, "B WIDTH"],
    choice: Choice = "any",
) -> tuple[DecodeState, SampledTokens]:
    """Choose the first token of the prompts that end; `hidden` is the state of each prompt's last token."""
    frontier = Frontier(hidden, ends, state.cache.lengths)
    return _replicate_results(
        network, *_choose_in_state(network.embeddings, state, frontier, numbers, choice)
    )


def decode_steps(
    network: Transformer,
    state: DecodeState,
    wanted: Bool[Array, " B"],
    numbers: Int[Array, "B WIDTH"],
    limit: Int[Array, ""] | int | None,
    steps: int,
    choice: Choice = "any",
    implementation: Implementation | None = None,
) -> tuple[DecodeState, SampledTokens]:
    """Decode tokens of the wanted sequences in one loop on the device.

    With a `limit` the loop ends after `min(limit, steps)` tokens, or when all sequences are done or full. On
    a mesh such a loop asks the host after each token, so the call returns only when its tokens are computed.
    With `limit=None` it always runs `steps` steps and asks the host nothing.

    Args:
      network: network.
      state: state after earlier steps.
      wanted: sequences to decode.
      numbers: packed request parameters (`pack_parameters`).
      limit: most tokens of this call, or None.
      steps: size of the result, a static number.
      choice: kind of program that chooses tokens.
      implementation: attention implementation.
    """
    full_length = PackedParameters.of(numbers).limit
    most = steps if limit is None else jnp.minimum(limit, steps)

    def is_unfinished(carry: tuple[DecodeState, Array, Array, Token]) -> Array:
        state, index, *_ = carry
        active = wanted & ~state.done & (state.cache.lengths < full_length)
        return active.any() & (index < most)

    def run_step(carry: tuple[DecodeState, Array, Array, Token]) -> tuple[DecodeState, Array, Array, Token]:
        state, index, counts, tokens = carry
        cache, frontier = advance(network, state, wanted, numbers, implementation)
        state, new = _choose_in_state(
            network.embeddings, state._replace(cache=cache), frontier, numbers, choice
        )

        def write(all_steps: Array, one_step: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(all_steps, one_step, index, 1)

        tokens = jax.tree.map(write, tokens, new.new)
        return state, index + 1, counts + new.counts, tokens

    batch = len(state.last)
    begin = state, jnp.int32(0), jnp.zeros(batch, jnp.int32), Token.zeros(choice, batch, steps)
    if limit is None:
        state, _, counts, tokens = jax.lax.fori_loop(0, steps, lambda _, carry: run_step(carry), begin)
    else:
        state, _, counts, tokens = jax.lax.while_loop(is_unfinished, run_step, begin)
    return _replicate_results(network, state, SampledTokens(tokens, counts, state.cache.lengths))


def _replicate_results(
    network: Transformer, state: DecodeState, chosen: SampledTokens
) -> tuple[DecodeState, SampledTokens]:
    """Copy tokens to all devices of a mesh, so that every process sees them; the cache stays sharded."""
    if network.on_all_devices is None:
        return state, chosen
    results = (state.last, state.done, chosen)
    last, done, chosen = jax.lax.with_sharding_constraint(results, network.on_all_devices)
    return state._replace(last=last, done=done), chosen


prefill = jax.jit(
    take_flat(read_chunks),
    donate_argnums=1,
    static_argnames=("choice", "implementation"),
    compiler_options=SEPARATE_PRODUCTS,
)
"""Compiled `read_chunks` of a flattened network; the state is donated."""
prefill_new = jax.jit(
    take_flat(read_new_prompts),
    static_argnames=("specs", "capacity", "choice", "implementation"),
    compiler_options=SEPARATE_PRODUCTS,
)
"""Compiled `read_new_prompts` of a flattened network."""
first = jax.jit(take_flat(choose_first), donate_argnums=1, static_argnames="choice")
"""Compiled `choose_first` of a flattened network; the state is donated."""
decode = jax.jit(
    take_flat(decode_steps),
    donate_argnums=1,
    static_argnames=("steps", "choice", "implementation"),
    compiler_options=ONE_GRAPH,
)
"""Compiled `decode_steps` of a flattened network; the state is donated."""
