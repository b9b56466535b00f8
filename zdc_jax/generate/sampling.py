"""How the next token is chosen."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.errors import PromptError


@dataclass(frozen=True)
class Sampling:
    """Greedy at `temperature=0`; else softmax at that temperature, cut to `top_k` tokens and `top_p` mass.

    Raises:
      PromptError: temperature < 0, top_k < 1, or top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise PromptError(f"temperature={self.temperature} must be >= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise PromptError(f"top_k={self.top_k} must be >= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise PromptError(f"top_p={self.top_p} must lie in (0, 1]")

    def arrays(self, vocab_size: int) -> "SamplingArrays | None":
        """Traced form, so that new values never recompile; None for greedy."""
        if self.temperature == 0:
            return None
        return SamplingArrays(
            jnp.float32(self.temperature),
            jnp.int32(min(self.top_k or vocab_size, vocab_size)),
            jnp.float32(self.top_p or 1.0),
            jax.random.key(self.seed),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as device scalars."""

    temperature: Array
    top_k: Array
    top_p: Array
    key: Array


def choose(
    logits: Float[Array, "B V"], sampling: SamplingArrays | None, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of each row; draws depend on seed, row and position alone, so streaming equals batch."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = restrict(logits / sampling.temperature, sampling.top_k, sampling.top_p)

    def draw(row: Array, position: Array, logits: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(sampling.key, row), position)
        return jax.random.categorical(key, logits)

    rows = jnp.arange(logits.shape[0])
    return jax.vmap(draw)(rows, positions, kept).astype(jnp.int32)


def restrict(
    logits: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """-inf outside the `top_k` largest and outside the smallest set of largest that holds `top_p` mass."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    rank = jnp.arange(logits.shape[-1])
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(rank < top_k, ordered, -jnp.inf), axis=-1), axis=-1)
    before = jnp.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    kept = jnp.sum((rank < top_k) & (before < top_p), axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(ordered, jnp.maximum(kept, 1) - 1, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
