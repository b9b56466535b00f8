"""One training step of the demo checkpoint: loss, gradients and AdamW."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int

from zdc_jax.axes import Array
from zdc_jax.model.transformer import Transformer

WARM_UP = 0.02
"""Share of training in which the learning rate rises."""


class Losses(NamedTuple):
    """Cross entropies of one step in nats per token: of all tokens, and of numbers in answers."""

    text: Array
    answers: Array


def has_heads(weight: Array) -> bool:
    """Return whether a weight has an axis of heads: only projections of attention decay."""
    return weight.ndim > 2


def choose_rate(progress: float, highest: float) -> float:
    """Return the learning rate after a share of training: a short rise, then a cosine to a tenth."""
    if progress < WARM_UP:
        return highest * progress / WARM_UP
    falling = (progress - WARM_UP) / (1 - WARM_UP)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, falling))) / 2)


def compute_loss(
    network: Transformer, tokens: Int[Array, "B T"], answers: Bool[Array, "B T"], *, answer_weight: float
) -> tuple[Float[Array, ""], Losses]:
    """Return the weighted cross entropy, computed in bfloat16 from float32 parameters, and its parts."""

    def cast(weight: Array) -> Array:
        return weight.astype(jnp.bfloat16)

    # Of the GPU implementations only cuDNN's has gradients.
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    logits = jax.tree.map(cast, network)(tokens, attention)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    marked = answers[:, 1:].astype(jnp.float32)
    weights = 1 + (answer_weight - 1) * marked
    weighted = (weights * losses).sum() / weights.sum()
    return weighted, Losses(losses.mean(), (marked * losses).sum() / jnp.maximum(1, marked.sum()))


def make_step(network: Transformer, *, answer_weight: float) -> tuple[Callable[..., Any], optax.OptState]:
    """Return the function of one training step, and the first state of AdamW, which lacks the rate."""

    def choose_decayed(params: Transformer) -> Transformer:
        return jax.tree.map(has_heads, params)

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1, mask=choose_decayed),
    )
    loss = partial(compute_loss, answer_weight=answer_weight)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(network: Transformer, state: optax.OptState, tokens: Array, answers: Array, rate: Array) -> Any:
        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(network, tokens, answers)
        updates, state = optimizer.update(gradients, state, network)

        def scale(update: Array) -> Array:
            return -rate * update

        return optax.apply_updates(network, jax.tree.map(scale, updates)), state, losses

    return step, optimizer.init(network)
