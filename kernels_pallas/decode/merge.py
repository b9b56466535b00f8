"""Partial results of attention over disjoint keys, and their merging (ours).

    grid: (B, K·G, tiles of Z), Triton; 1 warp per program, no explicit barriers
    each program: log-sum-exps of all P parts of one query head → weights → weighted sum of some coordinates

A query head reads P (Z + 1) float32, and costs 2 P Z FLOP and P exponentials.

Decode kernels divide the keys of a sequence among many CTAs, and near and far tokens have different kernels.
All parts are merged into one softmax by their log-sum-exp (Flash-Decoding, Dao et al., 2023). `merged` runs
on XLA in several launches, `merged_at_once` in one.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from kernels_pallas.common import NEVER, divide
from kernels_pallas.lowering import lower_once
from kernels_pallas.triton import check_back_end, plt

TOGETHER = 16
"""Parts that a program reads at a time."""
COLUMNS = 16
"""Fewest coordinates that a program merges. Parts of few sequences are read by many multiprocessors."""
PROGRAMS = 4096
"""Number of programs above which each merges more coordinates."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["o", "lse"], meta_fields=["pitch"])
@dataclass(frozen=True)
class Parts:
    """Partial attention over P parts of the keys, for G query heads of each of K KV heads.

    Attributes:
      o: outputs, float32 [B, K, P, at least G, Z]. Those with a log-sum-exp of -inf have any values.
      lse: natural log-sum-exp, float32 [B, K, P, rows]; the query heads of KV head k begin at row k · pitch
        mod 8.
      pitch: rows per KV head in `lse`.
    """

    o: Array
    lse: Array
    pitch: int = 0

    @property
    def Z(self) -> int:
        """Number of coordinates."""
        return self.o.shape[4]


@functools.partial(jax.jit, static_argnames=("G", "dtype"))
def merged(parts: Parts, G: int, dtype: DTypeLike) -> tuple[Float[Array, "B N Z"], Float[Array, "B N"]]:
    """Merge the parts; return attention and its natural log-sum-exp, zeros and -inf without visible keys."""
    (B, K), lse = parts.o.shape[:2], parts.lse[..., :G]
    if parts.pitch:
        rows = (jnp.arange(K) * parts.pitch % 8)[:, None] + jnp.arange(G)
        lse = jnp.take_along_axis(parts.lse, rows[None, :, None], axis=3, mode="promise_in_bounds")
    highest = jnp.maximum(lse.max(2, keepdims=True), NEVER)
    weight = jnp.exp(lse - highest)
    total = weight.sum(2)
    partial = parts.o[..., :G, :]
    # A weight that is NaN makes the result NaN.
    weighted = jnp.where(weight[..., None] != 0, partial * weight[..., None], 0.0)
    o = weighted.sum(2) / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.log(total) + highest[:, :, 0]
    return o.reshape(B, K * G, -1).astype(dtype), lse.reshape(B, K * G)


@lower_once("G", "dtype", "copies", "interpret")
def merged_at_once(
    parts: Sequence[Parts], G: int, dtype: DTypeLike, *, copies: int = 1, interpret: bool = False
) -> tuple[Float[Array, "rows N Z"], Float[Array, "B N"]]:
    """Merge the parts of several kernels in one launch; narrower outputs are zero-padded to the widest.

    The output has B rows, or `copies` equal rows of a single sequence.

    Raises:
      ValueError: there are copies of several sequences.
      NotImplementedError: JAX has no Triton back end.
    """
    check_back_end()
    if copies > 1 < len(parts[0].o):
        raise ValueError(f"copies={copies} of {len(parts[0].o)} sequences: must be 1")
    B, K = parts[0].o.shape[:2]
    Z = max(each.Z for each in parts)
    columns = COLUMNS
    while columns < Z and B * K * G * pl.cdiv(Z, columns) > PROGRAMS:
        columns *= 2
    like = jax.ShapeDtypeStruct
    o, lse = pl.pallas_call(
        functools.partial(_kernel, G=G, count=columns),
        out_shape=(like((copies * B, K * G, Z), dtype), like((B, K * G), jnp.float32)),
        grid=(B, K * G, pl.cdiv(Z, columns)),
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=interpret,
        name="zdc_merge",
    )(parts)
    return o, lse


def _kernel(parts: Sequence[Any], o_ref: Any, lse_ref: Any, *, G: int, count: int) -> None:
    """Merge `count` coordinates of the parts of one query head."""
    found = [_Source(each) for each in parts]
    b, n = pl.program_id(0), pl.program_id(1)
    kv, member = divide(n, G)
    lses = [each.lses(b, kv, member) for each in found]
    highest = functools.reduce(jnp.maximum, (lse.max() for each in lses for lse in each), jnp.float32(NEVER))
    weights = [[jnp.exp(lse - highest) for lse in each] for each in lses]
    total = functools.reduce(jnp.add, (weight.sum() for each in weights for weight in each))
    columns = pl.program_id(2) * count + lax.broadcasted_iota(jnp.int32, (1, count), 1)
    sums = (each.results(b, kv, member, columns, weight) for each, weight in zip(found, weights, strict=True))
    o = functools.reduce(jnp.add, sums) / jnp.where(total > 0, total, 1.0)
    of_row, there = columns[0], columns[0] < o_ref.shape[2]
    for row in range(o_ref.shape[0] // lse_ref.shape[0]):
        plt.store(o_ref.at[b + row, n, of_row], o.astype(o_ref.dtype), mask=there)
    lse_ref[b, n] = jnp.log(total) + highest


class _Source(NamedTuple):
    """References to `Parts` of one kernel."""

    parts: Any

    @property
    def _some(self) -> list[Array]:
        """Indices of the parts, in groups of [TOGETHER, 1]."""
        iota = lax.broadcasted_iota(jnp.int32, (TOGETHER, 1), 0)
        return [first + iota for first in range(0, self.parts.o.shape[2], TOGETHER)]

    def lses(self, b: Array, kv: Array, member: Array) -> list[Array]:
        """Load the log-sum-exp of all parts, some at a time; -inf for indices past the last part."""
        count, row = self.parts.o.shape[2], lax.rem(kv * self.parts.pitch, jnp.int32(8)) + member

        def load(part):
            return plt.load(self.parts.lse.at[b, kv, part, row], mask=part < count, other=-jnp.inf)

        return [load(part) for part in self._some]

    def results(self, b: Array, kv: Array, member: Array, columns: Array, weights: list[Array]) -> Array:
        """Load these columns of all parts, and return their weighted sum."""
        there = columns < self.parts.Z
        total = jnp.zeros(columns.shape[1], jnp.float32)
        for part, weight in zip(self._some, weights, strict=True):
            mask = there & (part < self.parts.o.shape[2]) & (weight != 0)
            of_parts = plt.load(self.parts.o.at[b, kv, part, member, columns], mask=mask, other=0.0)
            total += (weight * of_parts).sum(0)
        return total
