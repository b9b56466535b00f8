"""Request parameters that the steps need on the device, packed into one int32 vector for each sequence.

They are arrays rather than static arguments, so that a new value never recompiles a program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from zdc_jax.axes import Array
from zdc_jax.generation.sampling import Sampling

MAX_STOP_TOKENS = 16
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
FIELDS = ("limit", "minimum", "top_k", "key_0", "key_1", "is_shaped", *FLOATS)
"""Names of the first numbers of a vector; the ids of stop tokens follow, padded with -1.

`limit` is the cache length at which a sequence is full, `minimum` the one from which a stop token may end it.
Numbers in `FLOATS` are the bits of float32 numbers.
"""
WIDTH = len(FIELDS) + MAX_STOP_TOKENS
_MAX_INT32 = np.iinfo(np.int32).max
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)


def pack_parameters(
    prompt_tokens: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    key: np.ndarray,
    *,
    min_tokens: int = 0,
) -> Int[np.ndarray, " WIDTH"]:
    """Pack the parameters of one request.

    Args:
      prompt_tokens: length of the prompt.
      max_tokens: most tokens to generate.
      stop_ids: ids that end the sequence, at most `MAX_STOP_TOKENS`.
      sampling: sampling parameters.
      key: random key, [2] uint32, from `request_keys`.
      min_tokens: fewest tokens to generate before a stop token may end the sequence.
    """
    cached = prompt_tokens - 1  # The newest token is not in the cache yet.
    temperature = sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    floats = np.array([temperature, sampling.top_p or 1.0, sampling.min_p, *penalties], np.float32)
    numbers = np.full(WIDTH, -1, np.int32)
    numbers[: len(FIELDS)] = [
        cached + max_tokens,
        cached + min_tokens,
        min(sampling.top_k or _MAX_INT32, _MAX_INT32),
        *key.view(np.int32),
        sampling.is_shaped,
        *floats.view(np.int32),
    ]
    numbers[len(FIELDS) : len(FIELDS) + len(stop_ids)] = stop_ids
    return numbers


class PackedParameters(NamedTuple):
    """Parameters of B requests on the device.

    Attributes:
      limit: cache length at which each sequence is full, [B] int32.
      minimum: cache length from which a stop token may end each sequence, [B] int32.
      temperature: softmax temperature, 0 for greedy sequences, [B] float32.
      top_k: number of most likely tokens to sample from, [B] int32.
      top_p: probability of the set of most likely tokens to sample from, [B] float32.
      min_p: smallest share of the largest probability that a token must have, [B] float32.
      keys: [B] JAX random keys.
      is_shaped: whether biases apply, [B] bool; other sequences may still have those of an earlier one.
      presence: subtracted from logits of generated tokens, [B] float32.
      frequency: subtracted for each time that a token was generated, [B] float32.
      repetition: divisor or factor of logits of tokens in the prompt or the answer, [B] float32.
      stop_ids: stop tokens of each sequence, -1 for none, [B, MAX_STOP_TOKENS] int32.
    """

    limit: Array
    minimum: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    keys: Array
    is_shaped: Array
    presence: Array
    frequency: Array
    repetition: Array
    stop_ids: Array

    @classmethod
    def of(cls, numbers: Int[Array, "B WIDTH"]) -> "PackedParameters":
        """Unpack vectors of `pack_parameters`."""
        ints = dict(zip(FIELDS, numbers.T, strict=False))
        floats = {name: jax.lax.bitcast_convert_type(ints[name], jnp.float32) for name in FLOATS}
        keys = jax.lax.bitcast_convert_type(jnp.stack([ints["key_0"], ints["key_1"]], axis=1), jnp.uint32)
        return cls(
            limit=ints["limit"],
            minimum=ints["minimum"],
            top_k=ints["top_k"],
            keys=jax.random.wrap_key_data(keys, impl="threefry2x32"),
            is_shaped=ints["is_shaped"] == 1,
            stop_ids=numbers[:, len(FIELDS) :],
            **floats,
        )

    def stops(self, token: Int[Array, " B"], lengths: Int[Array, " B"]) -> Array:
        """Return which sequences a new token ends, [B] bool; `lengths` counts the tokens before it."""
        return (token[:, None] == self.stop_ids).any(-1) & (lengths >= self.minimum)
