"""Bytes that leave a device in a sequence-parallel prefill: by formula, and as counted in a compiled program.

Both follow the ring algorithms: of x bytes on each of U devices an all-to-all sends x (U-1)/U, an all-gather
x (U-1), an all-reduce 2 x (U-1)/U. A device that does more than others is the one that counts.
"""

import math
import re
from collections import Counter
from typing import Any

from zdc_jax.cache.prefix_ring import ring_slots
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.classes import check_classes
from zdc_jax.parallel.coded import check_codes, stored_bytes
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.near import halo_rows
from zdc_jax.parallel.payload import NEAR, Kind, Payload, block_bytes, halo_blocks, lse_bytes, row_bytes
from zdc_jax.plan import CompressionPlan, LayerRanks, TokenClasses


def prefill_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    *,
    length: int,
    degree: int,
    payload: Payload = "native",
    batch: int = 1,
    itemsize: int = 2,
) -> int:
    """Bytes that the attention of all layers sends from one of `degree` devices along `sequence`.

    `length` T and `batch` count tokens and rows of one group of devices along `sequence`; the padding of T is
    counted. A full plan is dense Ulysses. `itemsize`: bytes of a native element.

    Raises:
      NotImplementedError: a payload that cannot exchange the plan's token classes; a plan whose caches do not
        run on a mesh.
    """
    if plan.method != "zdc":
        check_codes(plan, payload, degree)
        how: Any = {"length": length, "degree": degree, "payload": payload, "itemsize": itemsize}
        layers = range(len(plan.layers))
        return batch * sum(_coded_bytes(config, plan, index, **how) for index in layers)

    def layer(index):
        return layer_bytes(
            config,
            plan.layers[index],
            plan.near(index),
            length=length,
            degree=degree,
            payload=payload,
            itemsize=itemsize,
        )

    if plan.classes is not None:
        check_classes(payload)
        return batch * _class_bytes(
            config, plan, plan.classes, length=length, degree=degree, itemsize=itemsize
        )
    return batch * sum(layer(index) for index in range(len(plan.layers)))


def layer_bytes(
    config: ModelConfig,
    ranks: LayerRanks,
    near: tuple[int, int],
    *,
    length: int,
    degree: int,
    payload: Payload,
    itemsize: int,
) -> int:
    """`prefill_bytes` of one layer and one row; near: sinks and window.

    Far keys, with K' = K · copies (`kv_copies`) and t = ⌈T/U⌉: N R + K' (R + Z) there and N Z back for each
    of t tokens, times (U-1)/U. A near set adds the log-sum-exp on the way back, and `near_bytes`. A
    coordinate takes `itemsize` bytes, a far one in other payloads less (`row_bytes`). In `coded` a layer
    without a near set gets one (`payload.NEAR`), of as many coordinates as far tokens have.
    """
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    U, t = degree, -(-length // degree)

    def sent(kind: Kind, width: int) -> int:
        return row_bytes(kind, width, payload, itemsize)

    of_query = sent("q", ranks.qk) + sent("o", ranks.v)
    of_key = sent("k", ranks.qk) + sent("v", ranks.v)
    far = t * (U - 1) * (N * of_query + K * kv_copies(K, U) * of_key) // U
    lse = t * (U - 1) * N * lse_bytes(payload) // U if ranks.qk else 0
    if any(near) and (ranks.qk, ranks.v) != (H, H):
        return far + lse + near_bytes(config, near, t, U, itemsize)
    if payload != "coded":
        return far
    sinks, window = map(max, NEAR, near)
    halo = sum(block_bytes(halo_blocks(width)) for width in (ranks.qk, ranks.v))
    first = 2 * (U - 1) * min(sinks, U * t) * K * (ranks.qk + ranks.v) * itemsize // U
    return far + lse + sum(halo_rows(min(window, U * t), t, U)) * K * halo + first


def _coded_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    layer: int,
    *,
    length: int,
    degree: int,
    payload: Payload,
    itemsize: int,
) -> int:
    """`prefill_bytes` of one layer and row of a plan whose caches are codes.

    As `layer_bytes`, but of a key and value of each token and head the codes travel, `stored_bytes`.
    """
    N, U, t, ranks, near = (
        config.num_heads,
        degree,
        -(-length // degree),
        plan.layers[layer],
        plan.near(layer),
    )
    around = near_bytes(config, near, t, U, itemsize) if any(near) else 0
    if not ranks.qk:
        return around
    of_query = row_bytes("q", ranks.qk, payload, itemsize) + row_bytes("o", ranks.v, payload, itemsize)
    of_query += lse_bytes(payload) if any(near) else 0
    of_key = stored_bytes(plan.layer_caches(config.dtype)[layer])
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, U)
    return t * (U - 1) * (N * of_query + heads * of_key) // U + around


def near_bytes(config: ModelConfig, near: tuple[int, int], t: int, U: int, itemsize: int) -> int:
    """Bytes that one of U devices with t tokens each sends in a layer for the near set, sinks and window.

    A halo of min(W, (U-1) t) tokens and the sinks, with 2 K H coordinates of `itemsize` bytes each.
    """
    sinks, window = (min(count, U * t) for count in near)
    token = 2 * config.num_kv_heads * config.head_dim * itemsize
    return sum(halo_rows(window, t, U)) * token + 2 * (U - 1) * sinks * token // U


def _class_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    classes: TokenClasses,
    *,
    length: int,
    degree: int,
    itemsize: int,
) -> int:
    """`prefill_bytes` of one row under a plan with token classes; t tokens a device, in whole blocks.

    A leader sends what `layer_bytes` says, its log-sum-exp also without a near set, and then the int32
    positions of its group, 4 t (U-1). In the other layers t₁ important tokens keep (R₁, Z₁), and the t₂
    others, but for q and o, (R₂, Z₂): t N (R₁ + Z₁) + K' (t₁ (R₁ + Z₁) + t₂ (R₂ + Z₂)) coordinates, times
    (U-1)/U, and the near set as there.
    """
    N, K, H, U = config.num_heads, config.num_kv_heads, config.head_dim, degree
    t = -(-length // (U * classes.block)) * classes.block
    near, lse = (plan.sinks, plan.window), t * (U - 1) * N * lse_bytes("native") // U
    total = len(classes.leaders) * 4 * t * (U - 1)
    for index, less in enumerate(plan.layers):
        if plan.has_classes(index):
            more, important = (
                classes.important[index],
                classes.blocks(classes.group_of(index)).important_in(t),
            )
            kept = important * (more.qk + more.v) + (t - important) * (less.qk + less.v)
            coordinates = t * N * (more.qk + more.v) + K * kv_copies(K, U) * kept
            total += coordinates * itemsize * (U - 1) // U
            total += (lse + near_bytes(config, near, t, U, itemsize)) if any(near) else 0
        else:
            alike = {"length": U * t, "degree": U, "itemsize": itemsize}
            total += layer_bytes(config, less, near, payload="native", **alike)
            total += 0 if any(near) and (less.qk < H or less.v < H) else lse  # It is counted, or none goes.
    return total


def cache_bytes(
    config: ModelConfig,
    plan: CompressionPlan,
    *,
    capacity: int,
    degree: int,
    payload: Payload = "native",
    batch: int = 1,
    itemsize: int = 2,
) -> int:
    """Bytes that one of `degree` devices sends once, after a prompt, to leave the cache divided by head.

    Trailing coordinates of the ring's slots, K' (M (2H - R - Z)) (U-1)/U a layer; first coordinates are where
    the exchange has brought them, but a `coded` payload sends R + Z of near tokens once more, whole. In
    layers with token classes the ring holds all 2H; each group adds the float32 importance of one block,
    summed over the devices. The ring of a cache in codes holds all 2H.
    """
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, degree)
    ring = 0
    for index, ranks in enumerate(plan.layers):
        whole = plan.has_classes(index) or plan.method != "zdc"
        kept = 0 if whole else ranks.qk + ranks.v
        near = plan.near(index)
        ring += heads * ring_slots(*near, capacity) * (2 * plan.head_dim - kept) * itemsize
        if payload == "coded" and kept:
            own = any(near) and kept < 2 * plan.head_dim
            sinks, window = near if own else map(max, NEAR, near)
            ring += heads * ring_slots(sinks, window, capacity) * kept * itemsize
    blocks = 0 if plan.classes is None else 2 * 4 * len(plan.classes.leaders) * plan.classes.block
    return batch * (ring + blocks) * (degree - 1) // degree


_COLLECTIVE = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<kind>[a-z]+)(?P<bits>\d*)\w*\[(?P<dims>[\d,]*)\]")
_LAYOUT = re.compile(r"\{[^}]*\}")


def hlo_bytes(text: str) -> int:
    """Bytes that leave the device that sends most when a compiled program (`compiled.as_text()`) runs once.

    Each collective counts once: none may stand in a loop. On GPUs they are `-start` operations, or wrapped in
    a computation of their own. Raises `ValueError` for groups or pairs it cannot read.
    """
    by_all, by_source = 0, Counter[int]()
    for line in text.splitlines():
        if (found := _COLLECTIVE.search(line)) is None:
            continue
        count = _collective_bytes(line, found)
        if found["kind"] == "collective-permute":
            by_source.update(dict.fromkeys(_sources(line), count))
        else:
            by_all += count
    return by_all + max(by_source.values(), default=0)


def _collective_bytes(line: str, found: re.Match[str]) -> int:
    shape = _LAYOUT.sub("", found["shape"])
    arrays = [_array_bytes(array) for array in _ARRAY.finditer(shape)]
    nested = shape.startswith("((")
    if found["start"] and (nested or found["kind"] != "all-reduce"):
        # (operand, result, …) or ((operands), results, …), with scalars of the asynchronous call behind.
        count = len(_ARRAY.findall(shape[: shape.index(")")])) if nested else 1
        arrays = arrays[count : 2 * count]
    results = sum(arrays)
    if found["kind"] == "collective-permute":
        return results
    U = _group_size(line)
    sent = {"all-to-all": 1, "all-gather": 1, "all-reduce": 2, "reduce-scatter": U}[found["kind"]]
    return results * sent * (U - 1) // U


def _array_bytes(array: re.Match[str]) -> int:
    bits = 8 if array["kind"] == "pred" else int(array["bits"])
    return math.prod(int(size) for size in array["dims"].split(",") if size) * bits // 8


def _sources(line: str) -> set[int]:
    """Devices that send in a permute, `source_target_pairs={{0,1},…}`."""
    if found := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line):
        return {int(source) for source in re.findall(r"\{(\d+),", found[1])}
    raise ValueError(f"cannot read the pairs of {line.strip()!r}")


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
