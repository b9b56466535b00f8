"""Partial results of attention over disjoint keys, as kernels leave them, and their merging (ours).

Kernels that decode divide the keys of a row among many CTAs, and those of near and far tokens are different
kernels. All their parts become one softmax by their log-sum-exp (Flash-Decoding, Dao et al., 2023): on XLA in
several launches, or in one by `merged_at_once`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from kernels_pallas.common import NEVER
from kernels_pallas.triton import check_back_end, pieces, plt

TOGETHER = 16
"""Parts that a program reads at a time."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["o", "lse"], meta_fields=["order", "pitch", "transposed"]
)
@dataclass(frozen=True)
class Parts:
    """Of P parts of the keys, for G query heads of each of K KV heads.

    o: float32 [B, K, P, G, Z], or [B, K, P, Z, at least G] if `transposed`. lse: float32 [B, K, P, rows],
    natural log-sum-exp, of KV head k's query heads from row k · pitch mod 8 on. order: which coordinate each
    of Z is; as they come if None.
    """

    o: Array
    lse: Array
    order: tuple[int, ...] | None = None
    pitch: int = 0
    transposed: bool = False

    @property
    def Z(self) -> int:
        """Coordinates."""
        return self.o.shape[3 if self.transposed else 4]


@functools.partial(jax.jit, static_argnames=("G", "dtype"))
def merged(parts: Parts, G: int, dtype: DTypeLike) -> tuple[Float[Array, "B N Z"], Float[Array, "B N"]]:
    """Attention by its parts, and its natural log-sum-exp; zeros and -inf where no key was seen."""
    (B, K), lse = parts.o.shape[:2], parts.lse[..., :G]
    if parts.pitch:
        rows = (jnp.arange(K) * parts.pitch % 8)[:, None] + jnp.arange(G)
        lse = jnp.take_along_axis(parts.lse, rows[None, :, None], axis=3, mode="promise_in_bounds")
    highest = jnp.maximum(lse.max(2, keepdims=True), NEVER)
    weight = jnp.exp(lse - highest)
    total = weight.sum(2)
    partial = parts.o[..., :G].swapaxes(3, 4) if parts.transposed else parts.o
    o = (partial * weight[..., None]).sum(2) / jnp.where(total > 0, total, 1.0)[..., None]
    if parts.order is not None:
        o = o[..., np.argsort(parts.order)]
    lse = jnp.log(total) + highest[:, :, 0]
    return o.reshape(B, K * G, -1).astype(dtype), lse.reshape(B, K * G)


def merged_at_once(
    parts: Sequence[Parts], G: int, dtype: DTypeLike, *, interpret: bool = False
) -> tuple[Float[Array, "B N Z"], Float[Array, "B N"]]:
    """`merged` of all parts of several kernels in one launch; coordinates that one has not count as zeros.

    Raises:
      NotImplementedError: JAX has no Triton back end.
    """
    check_back_end()
    return _launch(tuple(parts), G=G, dtype=jnp.dtype(dtype), interpret=interpret)


@functools.partial(jax.jit, static_argnames=("G", "dtype", "interpret"))
def _launch(parts: tuple[Parts, ...], *, G: int, dtype: jnp.dtype, interpret: bool) -> tuple[Array, Array]:
    B, K = parts[0].o.shape[:2]
    Z = max(each.Z for each in parts)
    places = [np.argsort(each.order).astype(np.int32) for each in parts if each.order is not None]
    like = jax.ShapeDtypeStruct
    o, lse = pl.pallas_call(
        functools.partial(_kernel, forms=[_Form.of(each) for each in parts], G=G),
        out_shape=(like((B, K * G, Z), dtype), like((B, K * G), jnp.float32)),
        grid=(B, K * G),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_merge",
    )(*(x for each in parts for x in (each.o, each.lse)), *map(jnp.asarray, places))
    return o, lse


@dataclass(frozen=True)
class _Form:
    """Static shape of `Parts`."""

    count: int
    Z: int
    ordered: bool
    pitch: int
    transposed: bool

    @classmethod
    def of(cls, parts: Parts) -> "_Form":
        ordered = parts.order is not None
        return cls(parts.o.shape[2], parts.Z, ordered, parts.pitch, parts.transposed)


def _kernel(*refs: Any, forms: list[_Form], G: int) -> None:
    """One query head."""
    *inputs, o_ref, lse_ref = refs
    arrays, places = inputs[: 2 * len(forms)], iter(inputs[2 * len(forms) :])
    found = [
        _Of(form, o, lse, next(places) if form.ordered else None, G)
        for form, o, lse in zip(forms, arrays[::2], arrays[1::2], strict=True)
    ]
    b, n = pl.program_id(0), pl.program_id(1)
    kv, member = lax.div(n, jnp.int32(G)), lax.rem(n, jnp.int32(G))
    lses = [each.lses(b, kv, member) for each in found]
    highest = functools.reduce(jnp.maximum, (lse.max() for each in lses for lse in each), jnp.float32(NEVER))
    weights = [[jnp.exp(lse - highest) for lse in each] for each in lses]
    total = functools.reduce(jnp.add, (weight.sum() for each in weights for weight in each))
    for begin, width in pieces(o_ref.shape[2]):
        columns = begin + lax.broadcasted_iota(jnp.int32, (1, width), 1)
        parts = (
            each.results(b, kv, member, columns, weight) for each, weight in zip(found, weights, strict=True)
        )
        o = functools.reduce(jnp.add, parts) / jnp.where(total > 0, total, 1.0)
        plt.store(o_ref.at[b, n, pl.ds(begin, width)], o.astype(o_ref.dtype))
    lse_ref[b, n] = jnp.log(total) + highest


@dataclass(frozen=True)
class _Of:
    """What one kernel left."""

    form: _Form
    o: Any
    lse: Any
    place: Any
    G: int

    @property
    def _some(self) -> list[Array]:
        """Numbers of parts, [TOGETHER, 1] each."""
        iota = lax.broadcasted_iota(jnp.int32, (TOGETHER, 1), 0)
        return [first + iota for first in range(0, self.form.count, TOGETHER)]

    def lses(self, b: Array, kv: Array, member: Array) -> list[Array]:
        """Of all parts, some at a time; of those that are not there, as of parts without keys."""
        row = lax.rem(kv * self.form.pitch, jnp.int32(8)) + member

        def load(part):
            return plt.load(self.lse.at[b, kv, part, row], mask=part < self.form.count, other=-jnp.inf)

        return [load(part) for part in self._some]

    def results(self, b: Array, kv: Array, member: Array, columns: Array, weights: list[Array]) -> Array:
        """Weighed and added up, of these columns."""
        there = columns < self.form.Z
        if self.place is not None:
            columns = plt.load(self.place.at[columns], mask=there, other=0)
        total = jnp.zeros(columns.shape[1], jnp.float32)
        for part, weight in zip(self._some, weights, strict=True):
            at = (columns, member) if self.form.transposed else (member, columns)
            mask = there & (part < self.form.count)
            total += (weight * plt.load(self.o.at[b, kv, part, *at], mask=mask, other=0.0)).sum(0)
        return total
