"""What benchmarks of coded caches share: plans of a layer, and random keys and values in their codes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import Plane

N, H, SINKS, WINDOW = 32, 128, 4, 512
SCALE = H**-0.5
HEADS = {"MHA": 32, "GQA-4": 8}
REACHES = (112, 128)
"""Codes of random reaches: 1/4 to 1."""
Coded = tuple[tuple[jax.Array, jax.Array], ...]
"""Levels and reach of planes."""


class Plan(NamedTuple):
    """Coordinates and bits of the planes of keys, and of values; read: tokens chosen by the first, 0: all."""

    keys: tuple[tuple[int, int], ...]
    values: tuple[int, int]
    read: int = 0

    @property
    def bits(self) -> tuple[int, ...]:
        """Of all planes."""
        return tuple(bits for _, bits in (*self.keys, self.values))

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Of the levels of a token, of all planes."""
        return tuple(C * bits // 8 for C, bits in (*self.keys, self.values))


PLANS = {
    "whole": Plan(keys=((H, 4),), values=(H, 4)),
    "bit planes": Plan(keys=((32, 6), (H - 32, 3)), values=(H, 3)),
    "chosen": Plan(keys=((32, 4), (H - 32, 4)), values=(H, 4), read=1024),
}


@partial(jax.jit, static_argnums=(1, 2))
def random_plane(key: jax.Array, tokens: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array]:
    """Levels of `width` bytes and reaches of random tokens."""
    levels, reach = jax.random.split(key)
    return (
        jax.random.bits(levels, (*tokens, width), jnp.uint8),
        jax.random.randint(reach, tokens, *REACHES).astype(jnp.uint8),
    )


def random_tokens(plan: Plan, B: int, K: int, S: int) -> Coded:
    """All planes of so many tokens."""
    seeds = jax.random.split(jax.random.key(3, impl="rbg"), len(plan.bits))
    return tuple(random_plane(seed, (B, K, S), width) for seed, width in zip(seeds, plan.nbytes, strict=True))


def planes(far: Coded, plan: Plan) -> list[Plane]:
    """Of keys, then of values."""
    return [Plane(*pair, bits) for pair, bits in zip(far, plan.bits, strict=True)]


def span(B: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Slots of far tokens of each row."""
    return jnp.full(B, SINKS, jnp.int32), jnp.full(B, S - WINDOW, jnp.int32)
