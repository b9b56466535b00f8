"""Ways to attention of tokens divided over a mesh, by the names that rows of results give them."""

from typing import Literal

from benchmarks.rivals.far import all_gather_attention, ring_attention
from benchmarks.rivals.late_ulysses import late_ulysses
from zdc_jax.parallel.attention import ShardedAttention, sharded_attention

Method = Literal["ulysses", "late_ulysses", "all_gather", "ring"]
ATTENTION: dict[Method, ShardedAttention] = {
    "ulysses": sharded_attention,
    "late_ulysses": late_ulysses,
    "all_gather": all_gather_attention,
    "ring": ring_attention,
}
"""`ulysses` is the library's own: truncated coordinates are exchanged (dense Ulysses where the plan is full).
`late_ulysses`: all coordinates are exchanged and truncated after it, as methods do that compress only the
cache. `all_gather`, `ring`: truncated keys and values of all tokens come to the queries."""
