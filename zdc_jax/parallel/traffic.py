"""Bytes that leave a device in a sequence-parallel prefill: by formula, and as counted in a compiled program.

Both follow the ring algorithms: of x bytes on each of U devices an all-to-all sends x (U-1)/U, an all-gather
x (U-1), an all-reduce 2 x (U-1)/U. A device that does more than others is the one that counts.
"""

import math
import re

from zdc_jax.config import ModelConfig
from zdc_jax.parallel.attention import Method, check_method
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.near import halo_rows
from zdc_jax.parallel.partition import Partition, cache_slots
from zdc_jax.parallel.payload import Payload, row_bytes
from zdc_jax.plan import CompressionPlan, LayerRanks

_LSE_BYTES = 4


def prefill_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    *,
    length: int,
    degree: int,
    method: Method = "ulysses",
    payload: Payload = "native",
    batch: int = 1,
    itemsize: int = 2,
) -> int:
    """Bytes that the attention of all layers sends from one of `degree` devices along `sequence`.

    `length` T and `batch` count tokens and rows of one group of devices along `sequence`; the padding of T is
    counted. A full plan with method `ulysses` is dense Ulysses. `itemsize`: bytes of a native element.

    Raises:
      ValueError, NotImplementedError: as `check_method`.
    """
    check_method(method, payload)
    layer = lambda ranks: layer_bytes(
        config,
        ranks,
        (plan.sinks, plan.window),
        length=length,
        degree=degree,
        method=method,
        payload=payload,
        itemsize=itemsize,
    )
    return batch * sum(layer(ranks) for ranks in plan.layers)


def layer_bytes(
    config: ModelConfig,
    ranks: LayerRanks,
    near: tuple[int, int],
    *,
    length: int,
    degree: int,
    method: Method,
    payload: Payload,
    itemsize: int,
) -> int:
    """`prefill_bytes` of one layer and one row; near: sinks and window.

    Far keys, with K' = K · copies (`kv_copies`) and t = ⌈T/U⌉: `ulysses` N R + K' (R + Z) there and N Z back
    for each of t tokens, times (U-1)/U; `late_ulysses` the same with H for R and Z; `all_gather` and `ring`
    K (R + Z) for each of t (U-1) tokens. A near set adds the log-sum-exp on the way back of `ulysses`, a halo
    of min(W, (U-1) t) tokens and the sinks, with 2 K H coordinates each. A coordinate takes `itemsize` bytes;
    of far ones in `float8` only the first few do, and the others 1 (`row_bytes`).
    """
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    U, t = degree, -(-length // degree)
    is_near = any(near) and (ranks.qk < H or ranks.v < H)
    R, Z = (H, H) if method == "late_ulysses" else (ranks.qk, ranks.v)
    if method in ("all_gather", "ring"):
        far = t * (U - 1) * K * (R + Z) * itemsize
    else:
        token = sum(row_bytes(width, payload, itemsize) for width in (R, Z)) * (N + K * kv_copies(K, U))
        far = t * (U - 1) * token // U
    if not is_near or method == "late_ulysses":
        return far
    if method == "ulysses" and ranks.qk:
        far += t * (U - 1) * N * _LSE_BYTES // U
    sinks, window = (min(count, U * t) for count in near)
    token = 2 * K * H * itemsize
    return far + sum(halo_rows(window, t, U)) * token + 2 * (U - 1) * sinks * token // U


def cache_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    *,
    capacity: int,
    degree: int,
    batch: int = 1,
    itemsize: int = 2,
) -> int:
    """Bytes that one of `degree` devices sends once, after a prompt, to leave the cache divided by head.

    Trailing coordinates of the ring's slots, K' (M (2H - R - Z)) (U-1)/U a layer; first coordinates are where
    the exchange has brought them.
    """
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, degree)
    trailing = sum(2 * plan.head_dim - ranks.qk - ranks.v for ranks in plan.layers)
    return batch * heads * plan.ring_slots(capacity) * trailing * itemsize * (degree - 1) // degree


def handed_bytes(
    plan: CompressionPlan, partition: Partition, *, capacity: int, batch: int = 1, itemsize: int = 2
) -> tuple[int, ...]:
    """Bytes of KV cache that each device hands on to the next with KV-Runahead; none from the last.

    K (S (R + Z) + M (2H - R - Z)) a layer and row, with S slots of each device's cache (`cache_slots`) and M
    of the ring: a dense plan's sum is Eq. 6 of the paper. The hidden state of each row's last token comes on
    top, once a prompt.
    """
    ring, whole = plan.ring_slots(capacity), 2 * plan.head_dim * len(plan.layers)
    kept = sum(ranks.qk + ranks.v for ranks in plan.layers)
    caches = (slots * kept + ring * (whole - kept) for slots in cache_slots(partition, plan, capacity)[:-1])
    return (*(batch * plan.num_kv_heads * itemsize * cache for cache in caches), 0)


_COLLECTIVE = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<kind>[a-z]+)(?P<bits>\d+)\[(?P<dims>[\d,]*)\]")


def hlo_bytes(text: str) -> int:
    """Bytes that leave one device when a compiled program (`compiled.as_text()`) runs once.

    Each collective counts once: none may stand in a loop. Raises `ValueError` for groups it cannot read.
    """
    return sum(
        _collective_bytes(line, found) for line in text.splitlines() if (found := _COLLECTIVE.search(line))
    )


def _collective_bytes(line: str, found: re.Match[str]) -> int:
    arrays = [_array_bytes(array) for array in _ARRAY.finditer(found["shape"])]
    if found["kind"] == "collective-permute":
        return arrays[0]
    # The results of a `-start` come behind its operands, one for each.
    results = sum(arrays[len(arrays) // 2 :] if found["start"] and found["kind"] != "all-reduce" else arrays)
    U = _group_size(line)
    sent = {"all-to-all": 1, "all-gather": 1, "all-reduce": 2, "reduce-scatter": U}[found["kind"]]
    return results * sent * (U - 1) // U


def _array_bytes(array: re.Match[str]) -> int:
    return math.prod(int(size) for size in array["dims"].split(",") if size) * int(array["bits"]) // 8


def _group_size(line: str) -> int:
    """Devices in each group: `{{0,1},…}`, `[groups,size]<=…`, or `mesh['a'=2,…] {'a'}`."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    raise ValueError(f"cannot read the replica groups of {line.strip()!r}")
