"""One training step of the demo checkpoint: loss, gradients and AdamW."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int

from convert.demo_checkpoint.options import Options
from zdc_jax.axes import Array
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation

WARM_UP = 0.02
"""Share of training in which the learning rate rises."""


class Losses(NamedTuple):
    """Cross entropies of one step in nats per token: of all tokens, and of numbers in answers."""

    text: Array
    answers: Array


def make_optimizer() -> optax.GradientTransformation:
    """Return AdamW without its learning rate; only projections of attention decay."""

    def choose_decayed(params: Transformer) -> Transformer:
        return jax.tree.map(is_projection, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1, mask=choose_decayed),
    )


def is_projection(weight: Array) -> bool:
    """Return whether a weight has an axis of heads."""
    return weight.ndim > 2


def choose_rate(progress: float, highest: float) -> float:
    """Return the learning rate after a share of training: a short rise, then a cosine to a tenth."""
    if progress < WARM_UP:
        return highest * progress / WARM_UP
    falling = (progress - WARM_UP) / (1 - WARM_UP)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, falling))) / 2)


def cast_weight(weight: Array) -> Array:
    """Cast a weight to bfloat16."""
    return weight.astype(jnp.bfloat16)


def compute_loss(
    network: Transformer,
    tokens: Int[Array, "B T"],
    answers: Bool[Array, "B T"],
    *,
    answer_weight: float,
    attention: Implementation,
) -> tuple[Float[Array, ""], Losses]:
    """Return the weighted cross entropy, computed in bfloat16 from float32 parameters, and its parts."""
    network = jax.tree.map(cast_weight, network)
    logits = network(tokens, attention)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    marked = answers[:, 1:].astype(jnp.float32)
    weights = 1 + (answer_weight - 1) * marked
    weighted = (weights * losses).sum() / weights.sum()
    return weighted, Losses(losses.mean(), (marked * losses).sum() / jnp.maximum(1, marked.sum()))


def make_step(options: Options, network: Transformer) -> tuple[Callable[..., Any], optax.OptState]:
    """Return the function of one training step, and the optimizer's first state."""
    optimizer = make_optimizer()
    attention = options.attention or ("cudnn" if jax.default_backend() == "gpu" else "xla")
    loss = partial(compute_loss, answer_weight=options.answer_weight, attention=attention)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(network: Transformer, state: optax.OptState, tokens: Array, answers: Array, rate: Array) -> Any:
        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(network, tokens, answers)
        updates, state = optimizer.update(gradients, state, network)

        def scale(update: Array) -> Array:
            return -rate * update

        return optax.apply_updates(network, jax.tree.map(scale, updates)), state, losses

    return step, optimizer.init(network)
