"""snapkv: keep far tokens that the last queries attended to, and their neighbors (Li et al. 2024).

The score is the mean attention of the last `observed` queries and of the heads of a group, pooled along the
candidates in order of position. The paper chooses once, at the end of a prompt, for each query head, and
keeps all later tokens. Here each KV head chooses again after each block, with neighbors among the remaining
tokens (ours). The defaults are those of the paper's long tasks.

If a prompt is read exactly and its length is a multiple of `block`, the kept tokens are those of
SnapKVPress(window_size=64, kernel_size=5) in kvpress. The settings for this are observed=64, pool=5,
pooling="average", sinks=0, window=64.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.cache.specs.evicting import Scoring
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.methods import EvictingSettings, evicting_layers
from zdc_jax.ops.slots import EMPTY
from zdc_jax.planned_layers import PlannedLayers

POOLINGS = "max", "average"
"""Allowed poolings."""


@dataclass(frozen=True)
class Settings(EvictingSettings):
    """Settings of the method.

    Attributes:
      observed: number of queries that score tokens, at most the window and `block`.
      pool: number of tokens that are pooled, odd.
      pooling: "max" or "average". An average counts missing neighbors as zeros.
    """

    observed: int = 32
    pool: int = 7
    pooling: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observed < 1:
            raise PlanError(f"observed={self.observed} must be at least 1 query")
        if self.pool < 1 or self.pool % 2 == 0:
            raise PlanError(f"pool={self.pool} must be an odd number of tokens")
        if self.pooling not in POOLINGS:
            raise PlanError(f"pooling={self.pooling!r:.80} must be one of {POOLINGS}")


@dataclass(frozen=True, kw_only=True)
class PooledScoring(Scoring):
    """Attention received by a token and its neighbors, (pool - 1)/2 candidates on each side."""

    pool: int
    pooling: str

    def finalize(
        self, scores: Float[Array, "B K S"], positions: Int[Array, "B #K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        initial, combine = (-jnp.inf, jax.lax.max) if self.pooling == "max" else (0.0, jax.lax.add)
        scores = jnp.where(positions != EMPTY, scores, initial)
        return jax.lax.reduce_window(scores, initial, combine, (1, 1, self.pool), (1, 1, 1), "SAME")


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def scoring(settings: Settings) -> Scoring:
        return PooledScoring(observed=settings.observed, pool=settings.pool, pooling=settings.pooling)

    return evicting_layers(plan, dtype, scoring)
