"""x"""

from typing import Literal

from benchmarks.mesh.rivals.exchanges import (
    all_gather_attention,
    all_gather_zigzag,
    late_ulysses,
    ring_attention,
    ring_zigzag,
)
from benchmarks.mesh.rivals.partition import Partition, cache_slots
from benchmarks.mesh.rivals.runahead_mesh import runahead_attention
from zdc_jax.cache.prefix_ring import ring_slots
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.attention import ShardedAttention, check_attention, sharded_attention
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.traffic import near_bytes, prefill_bytes
from zdc_jax.plan import CompressionPlan

InOrder = Literal["ulysses", "late_ulysses", "all_gather", "ring"]
Zigzag = Literal["all_gather_zigzag", "ring_zigzag"]
Method = InOrder | Zigzag | Literal["runahead"]
ATTENTION: dict[InOrder, ShardedAttention] = {
    "ulysses": sharded_attention,
    "late_ulysses": late_ulysses,
    "all_gather": all_gather_attention,
    "ring": ring_attention,
}
"""`ulysses` is the library's own: truncated coordinates are exchanged (dense Ulysses where the plan is full).
`late_ulysses`: all coordinates are exchanged and truncated after it, as methods do that compress only the
cache. `all_gather`, `ring`: truncated keys and values of all tokens come to the queries."""
ZIGZAG: dict[Zigzag, ShardedAttention] = {
    "all_gather_zigzag": all_gather_zigzag,
    "ring_zigzag": ring_zigzag,
}
"""The same where each device holds an early and a late chunk, without near sets (`rivals.zigzag`)."""


def attention_of(method: Method) -> ShardedAttention:
    """Of any of them; of KV-Runahead in even pieces."""
    return {**ATTENTION, **ZIGZAG, "runahead": runahead_attention}[method]


def padded(method: Method, length: int, degree: int) -> int:
    """Tokens of a prompt of `length`, padded: as many on each of `degree` devices, or in each chunk."""
    unit = 2 * degree if method in ZIGZAG else degree
    return -(-length // unit) * unit


def method_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    *,
    length: int,
    degree: int,
    method: Method,
    payload: Payload = "native",
    batch: int = 1,
    itemsize: int = 2,
) -> int:
    """`prefill_bytes` of any method; other arguments as there.

    `late_ulysses` sends what dense Ulysses does. `all_gather` and `ring` send K (R + Z) for each of t (U-1)
    tokens, t = ⌈T/U⌉, of `itemsize` bytes, and the near set as `ulysses` does, without its log-sum-exp; on
    zigzag shards t = 2 ⌈T/2U⌉, and there is no near set.

    Raises:
      NotImplementedError: the method cannot send this payload or token classes; what `prefill_bytes` raises.
    """
    check_attention(attention_of(method), payload, plan)
    if method in ("ulysses", "late_ulysses"):
        sent = plan if method == "ulysses" else CompressionPlan.full(config)
        how = {"length": length, "degree": degree, "batch": batch, "itemsize": itemsize}
        return prefill_bytes(config, sent, payload=payload, **how)
    K, H, U, t = config.num_kv_heads, config.head_dim, degree, padded(method, length, degree) // degree
    total = 0
    for index, ranks in enumerate(plan.layers):
        kept = ranks.qk + ranks.v
        total += t * (U - 1) * K * kept * itemsize
        total += near_bytes(config, plan.near(index), t, U, itemsize) if kept < 2 * H else 0
    return batch * total


def handed_bytes(
    plan: CompressionPlan, partition: Partition, *, capacity: int, batch: int = 1, itemsize: int = 2
) -> tuple[int, ...]:
    """Bytes of KV cache that each device hands on to the next with KV-Runahead; none from the last.

    K (S (R + Z) + M (2H - R - Z)) a layer and row, with S slots of each device's cache (`cache_slots`) and M
    of the ring: a dense plan's sum is Eq. 6 of the paper. The hidden state of each row's last token comes on
    top, once a prompt.
    """
    kept = sum(ranks.qk + ranks.v for ranks in plan.layers)
    ring = 0
    for index, ranks in enumerate(plan.layers):
        ring += ring_slots(*plan.near(index), capacity) * (2 * plan.head_dim - ranks.qk - ranks.v)
    caches = (slots * kept + ring for slots in cache_slots(partition, plan.sinks, capacity)[:-1])
    return (*(batch * plan.num_kv_heads * itemsize * cache for cache in caches), 0)
