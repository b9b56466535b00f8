"""ZDC: first coordinates of all tokens, or two token classes (ZDC §4–5); all coordinates near by (ours)."""

from dataclasses import dataclass
from functools import lru_cache

from zdc_jax.cache.classes import ClassLeader, ClassMember
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import MethodSettings
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """None: ranks, sinks, window and token classes say all."""


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return tuple(_layer_cache(plan, index, dtype) for index in range(len(plan.layers)))


def _layer_cache(plan: CompressionPlan, index: int, dtype: str) -> LayerCacheSpec:
    shape, near, ranks = (plan.num_kv_heads, plan.head_dim, dtype), plan.near(index), plan.layers[index]
    if plan.classes is None:
        return _ring(*shape, ranks.qk, ranks.v, *near)
    blocks = plan.classes.blocks(plan.classes.group_of(index))
    K, H, _ = shape
    if not plan.has_classes(index):
        alike = _ring(*shape, ranks.qk, ranks.v, *near)
        return ClassLeader(num_kv_heads=K, head_dim=H, dtype=dtype, tokens=alike, blocks=blocks)
    more = plan.classes.important[index]
    return ClassMember(
        num_kv_heads=K,
        head_dim=H,
        dtype=dtype,
        near=_ring(*shape, 0, 0, *near),
        blocks=blocks,
        important=(more.qk, more.v),
        rest=(ranks.qk, ranks.v),
    )


@lru_cache(maxsize=1024)  # A search asks for the bytes of many plans of few kinds of layers.
def _ring(K: int, H: int, dtype: str, R: int, Z: int, sinks: int, window: int) -> PrefixRing:
    return PrefixRing(num_kv_heads=K, head_dim=H, dtype=dtype, R=R, Z=Z, sinks=sinks, window=window)
