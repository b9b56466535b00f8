"""Bytes that a device sends in a sequence-parallel prefill: by formula, and counted in a compiled program.

Both assume ring algorithms. Of x bytes on each of U devices, an all-to-all sends x (U-1)/U, an all-gather
x (U-1) and an all-reduce 2 x (U-1)/U. Results are those of the device that sends most.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable

import jax

from zdc_jax.cache.specs.coded_far import CodedFar
from zdc_jax.cache.specs.prefix_ring import PrefixRing, ring_slots
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.config import ModelConfig
from zdc_jax.parallel.coded import check_caches
from zdc_jax.parallel.exchange import kv_copies
from zdc_jax.parallel.near import halo_rows
from zdc_jax.parallel.payload import EXACT, NEAR, Kind, Payload, coded_blocks, halo_blocks
from zdc_jax.plan import CompressionPlan, LayerRanks


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
    """Return the bytes that the attention of all layers sends from one of `degree` devices along `sequence`.

    A full plan is dense Ulysses.

    Args:
      config: architecture of the model.
      plan: compression plan.
      length: T, tokens of each prompt; its padding is counted as well.
      degree: U, devices along `sequence`.
      payload: payload of the exchange.
      batch: sequences per group of devices along `sequence`.
      itemsize: bytes of a native element.

    Raises:
      NotImplementedError: the plan's caches do not run on a mesh.
    """
    check_caches(plan, payload, degree)
    if plan.exchanges_quantized:
        layers = range(len(plan.layers))
        return batch * sum(
            _coded_bytes(
                config, plan, index, length=length, degree=degree, payload=payload, itemsize=itemsize
            )
            for index in layers
        )
    return batch * sum(
        layer_bytes(
            config,
            _exchanged_ranks(plan, index),
            plan.near(index),
            length=length,
            degree=degree,
            payload=payload,
            itemsize=itemsize,
        )
        for index in range(len(plan.layers))
    )


def _exchanged_ranks(plan: CompressionPlan, layer: int) -> LayerRanks:
    """Return the ranks of a layer, or 0 where its cache stores recent tokens only."""
    spec = plan.layer_caches("bfloat16")[layer]
    is_ring = isinstance(spec, PrefixRing) and not spec.R
    return LayerRanks(0, 0) if is_ring else plan.layers[layer]


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
    """Compute `prefill_bytes` of one layer and one sequence; `near` is sinks and window.

    Let K' = K · copies (`kv_copies`) and t = ⌈T/U⌉. Far attention sends N R + K' (R + Z) coordinates, and N Z
    on the way back, for each of t tokens, times (U-1)/U. Shifted keys add N H numbers in float32. A near set
    adds the log-sum-exp on the way back, and `near_bytes`. A coordinate has `itemsize` bytes, a far one in
    other payloads fewer (`row_bytes`).

    With `coded`, a layer without a near set gets one (`payload.NEAR`), at the rank of far tokens.
    """
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    U, t = degree, -(-length // degree)

    def sent(kind: Kind, width: int) -> int:
        return row_bytes(kind, width, payload, itemsize)

    query_bytes = sent("q", ranks.qk) + sent("o", ranks.v) + _shift_bytes(config, ranks)
    key_bytes = sent("k", ranks.qk) + sent("v", ranks.v)
    far = t * (U - 1) * (N * query_bytes + K * kv_copies(K, U) * key_bytes) // U
    lse = t * (U - 1) * N * lse_bytes(payload) // U if ranks.qk else 0
    if any(near) and (ranks.qk, ranks.v) != (H, H):
        return far + lse + near_bytes(config, near, t, U, itemsize)
    if payload != "coded":
        return far
    sinks, window = map(max, NEAR, near)
    halo = sum(block_bytes(halo_blocks(width)) for width in (ranks.qk, ranks.v))
    first = 2 * (U - 1) * min(sinks, U * t) * K * (ranks.qk + ranks.v) * itemsize // U
    return far + lse + sum(halo_rows(min(window, U * t), t, U)) * K * halo + first


def _shift_bytes(config: ModelConfig, ranks: LayerRanks) -> int:
    """Return the bytes that shifted keys add to each query, for models with a rotary embedding."""
    return 4 * config.head_dim if ranks.shift else 0


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
    """Compute `prefill_bytes` of one layer and sequence under a plan with quantized caches.

    As `layer_bytes`, but each token and head sends its quantized key and value, `stored_bytes`.
    """
    N, U, t = config.num_heads, degree, -(-length // degree)
    ranks, near = plan.layers[layer], plan.near(layer)
    near_total = near_bytes(config, near, t, U, itemsize) if any(near) else 0
    if not ranks.qk:
        return near_total
    query_bytes = row_bytes("q", ranks.qk, payload, itemsize) + row_bytes("o", ranks.v, payload, itemsize)
    query_bytes += (lse_bytes(payload) if any(near) else 0) + _shift_bytes(config, ranks)
    key_bytes = stored_bytes(plan.layer_caches(config.dtype)[layer])
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, U)
    return t * (U - 1) * (N * query_bytes + heads * key_bytes) // U + near_total


def near_bytes(config: ModelConfig, near: tuple[int, int], t: int, U: int, itemsize: int) -> int:
    """Return the bytes that one of U devices with t tokens each sends in a layer for the near set.

    The halo has min(W, (U-1) t) tokens. Halo and sinks have 2 K H coordinates of `itemsize` bytes per token.
    """
    sinks, window = (min(count, U * t) for count in near)
    token = 2 * config.num_kv_heads * config.head_dim * itemsize
    return sum(halo_rows(window, t, U)) * token + 2 * (U - 1) * sinks * token // U


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
    """Return the bytes that one of `degree` devices sends once, after a prompt, to divide the cache by head.

    The exchange has already brought the first coordinates. The ring's slots send their trailing coordinates,
    K' M (2H - R - Z) (U-1)/U per layer. A `coded` payload sends R + Z coordinates of near tokens again,
    unrounded. In quantized caches the ring holds all 2H coordinates.
    """
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, degree)
    ring = 0
    for index in range(len(plan.layers)):
        ranks = _exchanged_ranks(plan, index)
        exchanged = 0 if plan.exchanges_quantized else ranks.qk + ranks.v
        near = plan.near(index)
        ring += heads * ring_slots(*near, capacity) * (2 * plan.head_dim - exchanged) * itemsize
        if payload == "coded" and exchanged:
            of_plan = any(near) and exchanged < 2 * plan.head_dim
            sinks, window = near if of_plan else map(max, NEAR, near)
            ring += heads * ring_slots(sinks, window, capacity) * exchanged * itemsize
    return batch * ring * (degree - 1) // degree


_COLLECTIVE = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<kind>[a-z]+)(?P<bits>\d*)\w*\[(?P<dims>[\d,]*)\]")
_LAYOUT = re.compile(r"\{[^}]*\}")


def hlo_bytes(text: str) -> int:
    """Return the bytes sent by the device that sends most in one run of a compiled program.

    `text` is `compiled.as_text()`. Each collective counts once, so none may be in a loop. On GPUs collectives
    are `-start` operations, or wrapped in computations of their own.

    Raises:
      ValueError: replica groups or pairs have an unknown form.
    """
    by_all, by_source = 0, Counter[int]()
    for line in text.splitlines():
        if (match := _COLLECTIVE.search(line)) is None:
            continue
        count = _collective_bytes(line, match)
        if match["kind"] == "collective-permute":
            by_source.update(dict.fromkeys(_sources(line), count))
        else:
            by_all += count
    return by_all + max(by_source.values(), default=0)


def _collective_bytes(line: str, match: re.Match[str]) -> int:
    shape = _LAYOUT.sub("", match["shape"])
    arrays = [_array_bytes(array) for array in _ARRAY.finditer(shape)]
    nested = shape.startswith("((")
    if match["start"] and (nested or match["kind"] != "all-reduce"):
        # (operand, result, …) or ((operands), results, …), followed by scalars of the asynchronous call.
        count = len(_ARRAY.findall(shape[: shape.index(")")])) if nested else 1
        arrays = arrays[count : 2 * count]
    results = sum(arrays)
    if match["kind"] == "collective-permute":
        return results
    U = _group_size(line)
    sent = {"all-to-all": 1, "all-gather": 1, "all-reduce": 2, "reduce-scatter": U}[match["kind"]]
    return results * sent * (U - 1) // U


def _array_bytes(array: re.Match[str]) -> int:
    bits = 8 if array["kind"] == "pred" else int(array["bits"])
    return math.prod(int(size) for size in array["dims"].split(",") if size) * bits // 8


def _sources(line: str) -> set[int]:
    """Return the sending devices of a permute, `source_target_pairs={{0,1},…}`."""
    if match := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line):
        return {int(source) for source in re.findall(r"\{(\d+),", match[1])}
    raise ValueError(f"cannot read the pairs of {line.strip()!r}")


def _group_size(line: str) -> int:
    """Return the number of devices per group: `{{0,1},…}`, `[groups,size]<=…`, or `mesh['a'=2,…] {'a'}`."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    raise ValueError(f"cannot read the replica groups of {line.strip()!r}")


def row_bytes(kind: Kind, width: int, payload: Payload, itemsize: int) -> int:
    """Return the bytes of the first `width` coordinates of one token and head.

    `itemsize` is the size of a native element.
    """
    if payload == "native" or width == 0:
        return width * itemsize
    if payload == "coded":
        return block_bytes(coded_blocks(kind, width))
    exact = min(width, EXACT)
    return exact * itemsize + width - exact


def block_bytes(blocks: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of one token and head in `RotatedIntegers`: levels and scales."""
    return sum(size * bits // 8 + 1 for size, bits in blocks)


def lse_bytes(payload: Payload) -> int:
    """Return the bytes of the log-sum-exp of one token and head."""
    return 2 if payload == "coded" else 4


def stored_bytes(spec: LayerCacheSpec) -> int:
    """Return the bytes sent for the quantized key and value of one token and head; 0 without far tokens."""
    if not isinstance(spec, CodedFar):
        return 0
    own, tokens = spec.on_heads(1), 1024
    leaves = jax.tree.leaves(jax.eval_shape(lambda: own.create_far(1, tokens)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // leaves[0].shape[2]
