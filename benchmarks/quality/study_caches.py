"""Codes and choices that a study tries and no method has: quality is theirs, bytes often are not.

A scale of fewer bits is kept in 16 here; a choice by each query head copies keys and values for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.nn import logsumexp

from zdc_jax.axes import Array
from zdc_jax.cache.choosing import FarTokens
from zdc_jax.cache.coded_choosing import CodedChoosing, put_coded
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.codes import SCALE_DTYPE, Code, Coded, Int8, Split, pack
from zdc_jax.cache.gaussian_codes import Gaussian, nearest_levels, turn
from zdc_jax.cache.near_far import NearFarState
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec
from zdc_jax.methods import Rotations, layer_shape
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.importance import received_attention, token_importance
from zdc_jax.ops.xla import by_query_blocks, query_block
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Varied(CompressionPlan):
    """A plan whose layers keep tokens by `cache(**layer_shape)`, with turns of these blocks folded in."""

    cache: Callable[..., LayerCacheSpec] = PrefixRing
    blocks: Rotations | None = None

    @classmethod
    def of(
        cls, plan: CompressionPlan, cache: Callable[..., LayerCacheSpec], blocks: Rotations | None = None
    ) -> "Varied":
        """`plan`, so varied; its own turns where there are no `blocks`."""
        return cls(**vars(plan), cache=cache, blocks=blocks)

    def layer_caches(self, dtype: str) -> tuple[LayerCacheSpec, ...]:
        """As in the plan, where a layer has no far tokens."""
        shapes = [layer_shape(self, dtype, index) for index in range(len(self.layers))]
        return tuple((self.cache if shape["R"] else PrefixRing)(**shape) for shape in shapes)

    def rotations(self, layer: int) -> Rotations:
        """`CompressionPlan.turns`."""
        return super().rotations(layer) if self.blocks is None else self.blocks

    def to_json(self) -> dict[str, Any]:
        """Of the plan without what is varied: that is in the label of its row."""
        own = CompressionPlan.__dataclass_fields__
        return CompressionPlan(**{name: getattr(self, name) for name in own}).to_json()


def parts(*each: tuple[int, Code]) -> Code:
    """Consecutive coordinates in codes of their own: (coordinates, code) of each part."""
    (width, code), *others = each
    return Split(width, code, parts(*others)) if others else code


@dataclass(frozen=True)
class PowerOfTwoScale(Gaussian):
    """`Gaussian` whose scale is the next power of two below a token's root mean square, times √2."""

    def encode(self, x: Array) -> Coded:
        """`Code.encode`."""
        x = x.astype(jnp.float32)
        size = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
        _, exponent = jnp.frexp(jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
        coarse = jnp.ldexp(2**-0.5, exponent)
        return pack(nearest_levels(x / coarse, self.bits), self.bits), coarse.astype(SCALE_DTYPE)


@dataclass(frozen=True, kw_only=True)
class BestTokenOfPage(CodedChoosing):
    """Pages by their best token, not by the sum."""

    def of_pages(self, scores: Array) -> Array:
        """`CodedChoosing.of_pages`."""
        return scores.max(-1)


@dataclass(frozen=True, kw_only=True)
class LayerChoice(CodedChoosing):
    """All heads of a layer share what is read."""

    def probabilities(self, far: FarTokens, q: Array, positions: Array, scale: float) -> Array:
        """`Choosing.probabilities`, summed over all heads."""
        of_heads = super().probabilities(far, q, positions, scale)
        return jnp.broadcast_to(logsumexp(of_heads, axis=2, keepdims=True), of_heads.shape)


@dataclass(frozen=True, kw_only=True)
class HeadChoice(CodedChoosing):
    """Each query head reads tokens of its own, from copies of its KV head's; `group` query heads a KV head.

    `num_kv_heads` is that of query heads; the ring keeps those of keys.
    """

    group: int

    @property
    def near(self) -> PrefixRing:
        """`NearFar.near`."""
        return replace(super().near, num_kv_heads=self.num_kv_heads // self.group)

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        """`NearFar.write_far`."""
        k, v = (jnp.repeat(x, self.group, axis=2) for x in (k, v))
        return super().write_far(state, k, v, positions, end)


@dataclass(frozen=True, kw_only=True)
class WholeMass(CodedChoosing):
    """What is chosen answers for all far tokens: it weighs as much as the index says that all of them do."""

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        """`NearFar.attend_far`, with the index's log-sum-exp over all where that is larger."""
        o, lse = super().attend_far(far, q, positions, call)

        def mass(q: Array, positions: Array) -> Array:
            heads = q.reshape(*q.shape[:2], self.num_kv_heads, -1, q.shape[-1])
            scores = self.page_scores(far, heads, call.scale)
            is_far = self._is_far(jnp.arange(scores.shape[-1]), positions[:, :, None, None, None])
            found = logsumexp(jnp.where(is_far, scores, -jnp.inf), axis=-1)
            return found.reshape(*found.shape[:2], -1)

        block = query_block(q.shape[0] * q.shape[2] * self.capacity(far), q.shape[1])
        of_all = by_query_blocks(mass, block, q, positions).swapaxes(1, 2)
        return o, jnp.where(jnp.isneginf(lse), lse, jnp.maximum(lse, of_all))


@dataclass(frozen=True, kw_only=True)
class CopiedIndex(CodedChoosing):
    """The index is a copy: keys are turned over all R coordinates, `index` of them lie beside them again.

    Weights have turned all coordinates of q and k together, so that the index is turned back here.
    """

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        """`NearFar.create_far`: a plane of all coordinates of keys."""
        far = super().create_far(batch, capacity)
        return far._replace(k=self._whole.create_far(batch, capacity).k)

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        """`NearFar.write_far`."""
        whole = self._whole.write_far(state, k, v, positions, end)
        index = self._index_of(k)[..., : self.index]
        put = partial(put_coded, positions=positions, end=end)
        return whole._replace(index=put(state.far.index, self.index_code, index))

    def all_rows(self, far: FarTokens) -> tuple[Array, Array]:
        """`Choosing.all_rows`."""
        return self._whole.all_rows(far._replace(index=()))

    def page_scores(self, far: FarTokens, q: Array, scale: float) -> Array:
        """`Choosing.page_scores`."""
        return super().page_scores(far, self._index_of(q), scale)

    @property
    def _whole(self) -> CodedChoosing:
        """The same without an index."""
        own = {each.name: getattr(self, each.name) for each in fields(CodedChoosing)}
        return CodedChoosing(**own | {"index": 0})

    def _index_of(self, x: Array) -> Array:
        return x[..., : self.R] @ jnp.asarray(turn(self.R).T, x.dtype)


@dataclass(frozen=True, kw_only=True)
class RoundedNear(CodedStore):
    """Near tokens in 8 bits, as the ring would keep them; the ring here holds what those say."""

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, Array, Array]:
        """`LayerCacheSpec.project`: keys are rounded once they are turned."""
        return attention.project(x, positions, implementation)

    def write(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> NearFarState:
        """`LayerCacheSpec.write`."""
        return super().write(state, _in_8_bits(k), _in_8_bits(v), positions, end)

    def attend(self, state: NearFarState, q: Array, k: Any, v: Array, *rest: Any) -> Attended:
        """`LayerCacheSpec.attend`."""
        return super().attend(state, q, _in_8_bits(k), _in_8_bits(v), *rest)


@dataclass(frozen=True, kw_only=True)
class ImportantBits(CodedStore):
    """Of a prompt that is read exactly, the `share` of tokens that matter most keep more bits.

    by: `denominators` of their softmax (ZDC §5.2), or attention `received` as keys (as in ZipCache and MiKV).
    Both codes are rounded to, and stored in the eight bits of the store's.
    """

    share: float
    by: str
    more: Code
    less: Code

    def keep_prompt(
        self,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        positions: Array,
        end: Array,
        capacity: int,
        call: Call,
    ) -> NearFarState:
        """`LayerCacheSpec.keep_prompt`."""
        if self.by == "received":
            weight = received_attention(q, k, lse, positions, scale=call.scale).swapaxes(1, 2)
        else:
            weight = jnp.broadcast_to(token_importance(lse)[..., None], k.shape[:3])
        weight = jnp.where(positions[..., None] < end[:, None, None], weight, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-weight, axis=1), axis=1)
        important = (rank < self.share * end[:, None, None])[..., None]

        def mixed(x, width):
            return jnp.concatenate(
                [
                    jnp.where(
                        important, _through(self.more, x[..., :width]), _through(self.less, x[..., :width])
                    ),
                    x[..., width:],
                ],
                axis=-1,
            ).astype(x.dtype)

        far = (
            super()
            .keep_prompt(q, mixed(k, self.R), mixed(v, self.Z), lse, positions, end, capacity, call)
            .far
        )
        near = super().keep_prompt(q, k, v, lse, positions, end, capacity, call).near
        return NearFarState(near, far)


def _through(code: Code, x: Array) -> Array:
    """What a code of single tokens says of vectors."""
    return code.decode(code.encode(x[..., None, :]), x.shape[-1])[..., 0, :]


def _in_8_bits(x: Array) -> Array:
    return _through(Int8(), x).astype(x.dtype)
