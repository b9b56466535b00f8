"""How the next token is chosen."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.errors import PromptError

SEEDS = 2**32
_LARGEST = float(np.finfo(np.float32).max)
"""Beyond it is infinity, by which a logit of -inf would be NaN."""


@dataclass(frozen=True)
class Sampling:
    """Greedy at `temperature=0`; else softmax at that temperature, cut to `top_k` tokens and `top_p` mass.

    Raises:
      PromptError: a temperature that is no finite number >= 0 of float32, top_k no whole number >= 1, top_p
        no number in (0, 1], or a seed that is no whole number from 0 to 2**32 - 1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= _number(self.temperature) <= _LARGEST:
            raise PromptError(
                f"temperature={self.temperature!r:.80} must be a finite number >= 0 of float32 (0 is greedy)"
            )
        if self.top_k is not None and not (is_whole(self.top_k) and self.top_k >= 1):
            raise PromptError(f"top_k={self.top_k!r} must be a whole number >= 1, or None")
        if self.top_p is not None and not 0 < _number(self.top_p) <= 1:
            raise PromptError(f"top_p={self.top_p!r:.80} must be a number in (0, 1], or None")
        if not (is_whole(self.seed) and 0 <= self.seed < SEEDS):
            raise PromptError(f"seed={self.seed!r} must be a whole number from 0 to {SEEDS - 1}")


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer, of Python or numpy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A real number as a float: infinite where it is too large for one, NaN where it is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


class SamplingArrays(NamedTuple):
    """Samplings of a batch.

    temperature [B] float32, 0 for greedy rows; top_k [B] int32; top_p [B] float32; keys [B] of JAX.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    keys: Array


def request_keys(samplings: Sequence[Sampling], prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Keys [B, 2] uint32 that depend on each request alone, wherever it stands and with whatever others.

    A request is a prompt and its sampling. The key is a hash of seed and prompt and of how many equal
    requests stand before it, so that those differ.
    """
    seen: Counter[tuple[Sampling, bytes]] = Counter()
    keys = []
    for sampling, prompt in zip(samplings, prompts, strict=True):
        ids = prompt.astype("<u4").tobytes()
        numbers = np.array([sampling.seed, seen[sampling, ids]], "<u4").tobytes()
        keys.append(np.frombuffer(hashlib.sha256(numbers + ids).digest()[:8], "<u4"))
        seen[sampling, ids] += 1
    return np.stack(keys).astype(np.uint32)


def draw(
    logits: Float[Array, "B V"], sampling: SamplingArrays, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of each row; draws depend on the row's key and position alone, so streaming equals batch."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = sampling.temperature == 0
    # The largest is 0 before the division, so that no temperature makes it infinite.
    below = logits - logits.max(axis=-1, keepdims=True)
    scaled = below / jnp.where(is_greedy, 1, sampling.temperature)[:, None]
    kept = restrict(scaled, sampling.top_k, sampling.top_p)
    drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in)(sampling.keys, positions), kept)
    return jnp.where(is_greedy, greedy, drawn.astype(jnp.int32))


def restrict(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """-inf outside the `top_k` largest and outside the smallest set of largest that holds `top_p` mass."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    within = jnp.arange(logits.shape[-1]) < top_k[:, None]
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(within, ordered, -jnp.inf), axis=-1), axis=-1)
    before = jnp.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    kept = jnp.sum(within & (before < top_p[:, None]), axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(ordered, jnp.maximum(kept, 1) - 1, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
