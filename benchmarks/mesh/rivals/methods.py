"""Methods of sequence parallelism by name, and the bytes that leave a device with each.

`benchmarks.mesh.traffic` has the bytes of our own method.
"""

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
from benchmarks.mesh.traffic import near_bytes, prefill_bytes
from zdc_jax.cache.specs.prefix_ring import ring_slots
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.attention import ShardedAttention, check_attention, sharded_attention
from zdc_jax.parallel.payload import Payload
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
"""Attention functions of tokens in order.

`ulysses` is the library's own method, which exchanges truncated coordinates (dense Ulysses for a full plan).
`late_ulysses` exchanges all coordinates and truncates afterwards. `all_gather` and `ring` bring truncated
keys and values of all tokens to the queries.
"""
ZIGZAG: dict[Zigzag, ShardedAttention] = {
    "all_gather_zigzag": all_gather_zigzag,
    "ring_zigzag": ring_zigzag,
}
"""Attention functions of zigzag shards, without recent tokens at full rank."""


def attention_of(method: Method) -> ShardedAttention:
    """Return the attention function of a method; of KV-Runahead for even chunks."""
    return {**ATTENTION, **ZIGZAG, "runahead": runahead_attention}[method]


def padded(method: Method, length: int, degree: int) -> int:
    """Return the padded length of a prompt, a multiple of the devices or of the zigzag chunks."""
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
    """Return `prefill_bytes` of any method.

    `late_ulysses` sends what dense Ulysses does. `all_gather` and `ring` send K (R + Z) numbers for each of t
    (U-1) tokens, t = ⌈T/U⌉, and recent tokens as `ulysses` does, without its log-sum-exp. On zigzag shards t
    = 2 ⌈T/2U⌉, and there are no recent tokens.

    Raises:
      NotImplementedError: the method cannot send this payload, or `prefill_bytes` refuses.
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
    """Return bytes of the KV cache that each device passes to the next with KV-Runahead; 0 for the last.

    The formula is K (S (R + Z) + M (2H - R - Z)) a layer and sequence. S counts the slots of a device's cache
    (`cache_slots`), and M those of the ring. For a dense plan the sum is Eq. 6 of the paper. The hidden state
    of each sequence's last token is added once a prompt.
    """
    kept = sum(ranks.qk + ranks.v for ranks in plan.layers)
    ring = 0
    for index, ranks in enumerate(plan.layers):
        ring += ring_slots(*plan.near(index), capacity) * (2 * plan.head_dim - ranks.qk - ranks.v)
    caches = (slots * kept + ring for slots in cache_slots(partition, plan.sinks, capacity)[:-1])
    return (*(batch * plan.num_kv_heads * itemsize * cache for cache in caches), 0)
