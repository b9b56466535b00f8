"""ZDC: first coordinates of all tokens, or two token classes (ZDC §4–5); all coordinates near by (ours)."""

from dataclasses import replace

from zdc_jax.cache.classes import ClassLeader, ClassMember
from zdc_jax.cache.prefix_ring import PrefixRing
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.plan import CompressionPlan


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return tuple(_layer_cache(plan, index, dtype) for index in range(len(plan.layers)))


def _layer_cache(plan: CompressionPlan, index: int, dtype: str) -> LayerCacheSpec:
    K, H, (sinks, window) = plan.num_kv_heads, plan.head_dim, plan.near(index)
    near = PrefixRing(num_kv_heads=K, head_dim=H, dtype=dtype, R=0, Z=0, sinks=sinks, window=window)
    ranks = plan.layers[index]
    alike = replace(near, R=ranks.qk, Z=ranks.v)
    if plan.classes is None:
        return alike
    blocks = plan.classes.blocks(plan.classes.group_of(index))
    if not plan.has_classes(index):
        return ClassLeader(num_kv_heads=K, head_dim=H, dtype=dtype, tokens=alike, blocks=blocks)
    more = plan.classes.important[index]
    return ClassMember(
        num_kv_heads=K,
        head_dim=H,
        dtype=dtype,
        near=near,
        blocks=blocks,
        important=(more.qk, more.v),
        rest=(ranks.qk, ranks.v),
    )
