"""zdc: first coordinates of all tokens, or two token classes (ZDC §4–5); near tokens at full width (ours)."""

from dataclasses import dataclass
from functools import lru_cache

from zdc_jax.cache.specs.classes import ClassLeader, ClassMember
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method, which has none besides ranks, sinks, window and token classes."""

    token_classes = True
    search = "ranks"


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    return tuple(_create_spec(plan, index, dtype) for index in range(len(plan.layers)))


def _create_spec(plan: PlannedLayers, index: int, dtype: str) -> LayerCacheSpec:
    K, H = plan.num_kv_heads, plan.head_dim
    ranks, (sinks, window) = plan.layers[index], plan.near(index)
    if plan.classes is not None and plan.has_classes(index):
        important = plan.classes.important[index]
        return ClassMember(
            num_kv_heads=K,
            head_dim=H,
            dtype=dtype,
            near=_create_ring(K, H, dtype, R=0, Z=0, sinks=sinks, window=window),
            blocks=plan.classes.blocks(plan.classes.group_of(index)),
            important=(important.qk, important.v),
            rest=(ranks.qk, ranks.v),
        )
    ring = _create_ring(K, H, dtype, R=ranks.qk, Z=ranks.v, sinks=sinks, window=window)
    if plan.classes is None:
        return ring
    blocks = plan.classes.blocks(plan.classes.group_of(index))
    return ClassLeader(num_kv_heads=K, head_dim=H, dtype=dtype, tokens=ring, blocks=blocks)


@lru_cache(maxsize=1024)  # A search counts the bytes of many plans with few distinct layers.
def _create_ring(K: int, H: int, dtype: str, R: int, Z: int, sinks: int, window: int) -> PrefixRing:
    return PrefixRing(num_kv_heads=K, head_dim=H, dtype=dtype, R=R, Z=Z, sinks=sinks, window=window)
