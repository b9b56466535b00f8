"""What the steps must know of a row: one small array a row, so that no value of a request compiles anew."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from zdc_jax.axes import Array
from zdc_jax.generation.sampling import Sampling, SamplingArrays

MAX_STOP_TOKENS = 16
FIELDS = ("limit", "least", "top_k", "key_0", "key_1", "temperature", "top_p")
"""Of a row: tokens it may hold, tokens it must hold before a stop token ends it, and its sampling; the last
two are bits of float32. Ids of stop tokens follow, -1 for none."""
WIDTH = len(FIELDS) + MAX_STOP_TOKENS
AT = {name: column for column, name in enumerate(FIELDS)}
_MOST = np.iinfo(np.int32).max
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def row_numbers(
    prompt_tokens: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    key: np.ndarray,
    *,
    min_tokens: int = 0,
) -> Int[np.ndarray, " WIDTH"]:
    """Numbers of a row whose prompt has so many tokens.

    max_tokens, min_tokens: of its answer. stop_ids: at most `MAX_STOP_TOKENS`. key: uint32 [2], of
    `request_keys`.
    """
    held = prompt_tokens - 1  # The newest token is not in the cache yet.
    temperature = sampling.temperature if sampling.temperature >= _SMALLEST_TEMPERATURE else 0.0
    floats = np.array([temperature, sampling.top_p or 1.0], np.float32)
    numbers = np.full(WIDTH, -1, np.int32)
    numbers[: len(FIELDS)] = [
        held + max_tokens,
        held + min_tokens,
        min(sampling.top_k or _MOST, _MOST),
        *key.view(np.int32),
        *floats.view(np.int32),
    ]
    numbers[len(FIELDS) : len(FIELDS) + len(stop_ids)] = stop_ids
    return numbers


class RowNumbers(NamedTuple):
    """The numbers of B rows in a step.

    limit, least [B] int32; stop_ids [B, MAX_STOP_TOKENS] int32.
    """

    limit: Array
    least: Array
    sampling: SamplingArrays
    stop_ids: Array

    @classmethod
    def of(cls, numbers: Int[Array, "B WIDTH"]) -> "RowNumbers":
        """Out of `row_numbers`."""

        def column(name):
            return numbers[:, AT[name]]

        def floats(name):
            return jax.lax.bitcast_convert_type(column(name), jnp.float32)

        keys = jax.lax.bitcast_convert_type(numbers[:, AT["key_0"] : AT["key_1"] + 1], jnp.uint32)
        sampling = SamplingArrays(
            floats("temperature"),
            column("top_k"),
            floats("top_p"),
            jax.random.wrap_key_data(keys, impl="threefry2x32"),
        )
        return cls(column("limit"), column("least"), sampling, numbers[:, len(FIELDS) :])

    def stops(self, token: Int[Array, " B"], held: Int[Array, " B"]) -> Array:
        """Which rows [B] a token ends, where so many tokens are held before it."""
        return (token[:, None] == self.stop_ids).any(-1) & (held >= self.least)
