"""Ways to attention of tokens divided over a mesh, by the names that rows of results give them."""

from typing import Literal

from benchmarks.rivals.far import all_gather_attention, ring_attention
from benchmarks.rivals.late_ulysses import late_ulysses
from benchmarks.rivals.runahead_mesh import runahead_attention
from benchmarks.rivals.zigzag import all_gather_zigzag, ring_zigzag
from zdc_jax.parallel.attention import ShardedAttention, sharded_attention

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
