"""Integers whose step is fitted to each token: what `coded` stores (ours)."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import Plane
from kernels_pallas.encode import SMALLEST, reaches_tried
from kernels_pallas.short_scales import NAN_CODE, from_e5m3
from zdc_jax.axes import Array
from zdc_jax.cache.codes import Code, Coded, Split, pack, packing_refusal, unpack
from zdc_jax.cache.pages import in_pages, pools_of
from zdc_jax.ops.stored import encode_with_kernel


@dataclass(frozen=True)
class FittedIntegers(Code):
    """Odd multiples of reach/2^bits, from -reach to reach; of `reaches_tried` a token takes what errs least.

    Coded: levels uint8 [*batch, 1, C·bits/8], level l is (2l + 1 - 2^bits)·reach/2^bits; reach uint8
    [*batch, 1, 1], in `from_e5m3`'s 8 bits. Zeros are read as zeros, a token with a coordinate that is no
    finite number as NaN.

    A step of its own makes up for levels that stand evenly: turned vectors of 64 coordinates err as little as
    in the best levels for a Gaussian (0.97 to 1.00 times the square at 2 to 5 bits), those of 16 less (0.66
    to 0.92), those of 128 more (1.01 to 1.10). Even levels are what integer arithmetic can score.
    """

    bits: int

    def refusal(self, C: int) -> str | None:
        """`Code.refusal`."""
        return packing_refusal(C)

    def encode(self, x: Array) -> Coded:
        """`Code.encode`."""
        x, half = x.astype(jnp.float32), 2 ** (self.bits - 1)
        largest = jnp.abs(x).max(-1, keepdims=True)

        def tried(code: Array) -> tuple[Array, ...]:
            step = jnp.maximum(from_e5m3(code), SMALLEST) / half
            # In steps, for squares of the coordinates themselves could overflow.
            at = jnp.abs(x) / step - 0.5
            level = jnp.minimum(jnp.round(at), half - 1)
            return jnp.square(level - at).sum(-1, keepdims=True) * jnp.square(step), code, level

        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        _, code, level = functools.reduce(_better, map(tried, reaches_tried(bits, self.bits, x.shape[-1])))
        level = jnp.nan_to_num(level).astype(jnp.int32)
        level = half + jnp.where(x < 0, -1 - level, level)
        code = jnp.where(jnp.isfinite(largest), code, NAN_CODE)
        return pack(level.astype(jnp.uint8), self.bits), code.astype(jnp.uint8)

    def decode(self, coded: Coded, C: int) -> Array:
        """`Code.decode`."""
        levels, reach = coded
        odd = 2 * unpack(levels, self.bits).astype(jnp.float32) + (1 - 2**self.bits)
        return odd * (from_e5m3(reach) / 2**self.bits)


def _better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """What errs less, the first of each, of each token; one of two that err alike."""
    return tuple(jnp.where(other[0] < one[0], y, x) for x, y in zip(one, other, strict=True))


def kernel_planes(stored: Iterable[tuple[Code, Coded]]) -> list[Plane]:
    """What codes and their arrays [B, K, S, …], of single tokens, are to kernels; a `Split` is two planes.

    Empty if any is another code.
    """
    planes: list[Plane] = []
    for code, coded in stored:
        if isinstance(code, Split):
            found = kernel_planes(zip((code.first, code.rest), coded, strict=True))
        elif isinstance(code, FittedIntegers):
            levels, reach = coded
            tokens = reach.shape[:3]
            found = [Plane(levels.reshape(*tokens, -1), reach.reshape(tokens), code.bits)]
        else:
            found = []
        if not found:
            return []
        planes += found
    return planes


def put_by_kernel(
    groups: Sequence[tuple[Array, Sequence[tuple[Code, Coded]]]], positions: Array, end: Array
) -> list[list[Coded]] | None:
    """Coded arrays [B, K, S, …] with new tokens by one kernel; None where there is none for their codes.

    groups: tokens [B, T, K, C] at `positions`, and the codes that take their coordinates one after another;
    their arrays may all be `Pages`.
    """
    arrays, table = pools_of([[coded for _, coded in stored] for _, stored in groups])
    codes = [[code for code, _ in stored] for _, stored in groups]
    planes = [kernel_planes(zip(each, held, strict=True)) for each, held in zip(codes, arrays, strict=True)]
    found = encode_with_kernel([x for x, _ in groups], planes, positions, end, table)
    if found is None:
        return None
    return in_pages([as_before(*pair) for pair in zip(arrays, found, strict=True)], table)


def as_before(held: Any, written: Iterable[Plane | Array]) -> Any:
    """A tree of arrays with what kernels made of them: planes that `kernel_planes` gave, or arrays."""
    leaves = iter(leaf for each in written for leaf in (each[:2] if isinstance(each, Plane) else (each,)))
    return jax.tree.map(lambda leaf: next(leaves).reshape(leaf.shape), held)
