"""Prefill kernel: lowering for CUDA everywhere, refusals, and results on the device."""

import itertools
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import check, prefill
from jumps import jumping
from near_and_far import NEAR_AND_FAR, check_needed, near_and_far

from kernels_pallas import (
    PrefillConfig,
    Trailing,
    merge_partial,
    prefill_attention,
)
from kernels_pallas.prefill import attention as prefill_kernel
from kernels_pallas.prefill import items

BF16, F16 = jnp.bfloat16, jnp.float16
TWO_RANKS = [
    (32, 64, 128),
    (16, 16, 64),
    (64, 96, 128),
    (48, 80, 128),
    (128, 128, 256),
    (16, 112, 128),
    (32, 64, 64),
    (64, 32, 64),
]
ONE_RANK = [(128, 128), (64, 96), (32, 64), (48, 96), (16, 16), (256, 256), (64, 128), (240, 16), (80, 48)]


def draw(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def lower(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


def trailing_shapes(B, K, M, H, R, Z, dtype=BF16):
    tail = [shape(B, K, n, H - rank, dtype=dtype) for n in (M, 8) for rank in (R, Z)]
    return Trailing(*tail[:2], shape(B, dtype=jnp.int32), *tail[2:])


def without_sinks(trailing):
    return trailing._replace(sink_k=None, sink_v=None)


def pool(pages, page):
    return {name: shape(pages, 2, page, 32) for name in "kv"}


WIDE, NO_SCORES = shape(1, 64, 4, 64), trailing_shapes(1, 2, 64, 64, 0, 32)
TABLE = shape(1, 4, dtype=jnp.int32)


NEAR = {"near": without_sinks(trailing_shapes(1, 2, 64, 32, 0, 0)), "window": 64, "keys": "far"}


@pytest.mark.parametrize(("R", "Z"), ONE_RANK)
@pytest.mark.parametrize(("T", "S", "N", "K"), [(256, 256, 4, 4), (1, 40, 8, 2), (203, 1001, 4, 1)])
@pytest.mark.matrix
def test_lowers(R, Z, T, S, N, K):
    def f(q, k, v):
        return prefill_attention(q, k, v, scale=1.0)

    o, lse = lower(f, shape(2, T, N, R), shape(2, K, S, R), shape(2, K, S, Z)).out_info
    assert (o.shape, lse.shape, lse.dtype) == ((2, T, N, Z), (2, N, T), jnp.float32)


@pytest.mark.parametrize(("R", "Z", "H"), TWO_RANKS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.full
def test_lowers_with_two_ranks(R, Z, H, dtype):
    def f(q, k, v, t):
        return prefill_attention(q, k, v, scale=1.0, trailing=t, sinks=4, window=192)

    prefix = shape(1, 2, 300, R, dtype=dtype), shape(1, 2, 300, Z, dtype=dtype)
    args = shape(1, 77, 4, H, dtype=dtype), *prefix, trailing_shapes(1, 2, 256, H, R, Z, dtype)
    assert lower(f, *args).out_info[0].shape == (1, 77, 4, H)


@pytest.mark.full
def test_lowers_far_keys_alone():
    def f(q, k, v):
        return prefill_attention(q, k, v, scale=1.0, sinks=4, window=128, keys="far")

    lower(f, shape(1, 300, 4, 64), shape(1, 2, 300, 64), shape(1, 2, 300, 64))


@pytest.mark.parametrize(("H", "sinks"), [(64, 0), (128, 4), (256, 4)])
@pytest.mark.full
def test_lowers_near_keys_alone(H, sinks):
    def f(q, k, v, t):
        return prefill_attention(q, k, v, scale=1.0, trailing=t, sinks=sinks, window=100)

    trailing = trailing_shapes(1, 2, 500, H, 0, 0)
    trailing = trailing if sinks else without_sinks(trailing)
    args = shape(1, 300, 4, H), shape(1, 2, 9999, 0), shape(1, 2, 9999, 0), trailing
    assert lower(f, *args).out_info[0].shape == (1, 300, 4, H)


def geometry(**given):
    """Return a geometry with zeros for all other fields."""
    return items.Geometry(**dict.fromkeys(items.Geometry._fields, 0) | given)


def near_item(g, block, first, end, base):
    """Return an item of near keys alone."""
    steps = items.steps_of(g, block, *(jnp.int32(x) for x in (first, end, base)))
    return items.Item(0, 0, 0, first, end, base, *map(int, steps))


@pytest.mark.parametrize("seed", range(40))
def test_near_keys_alone_visit_their_blocks_and_no_more(seed):
    # Queries are at first … end - 1. Steps cover window and sinks once, however far from the beginning. All
    # queries see unmasked blocks, and only blocks that need one have a mask.
    rng = np.random.default_rng(seed)
    block, sinks, window = int(rng.choice([64, 128])), int(rng.integers(0, 9)), int(rng.integers(1, 900))
    first = int(rng.integers(0, rng.choice([300, 2**17])))
    end, base = first + int(rng.integers(1, 193)), first - int(rng.integers(0, window + 300))
    g = geometry(keys="near", sinks=sinks, window=window)
    item = near_item(g, block, first, end, base)
    assert (item.mixed, item.sink_step) == (0, sinks > 0)
    assert item.at_sinks(item.plain) == (sinks > 0)
    visited = [int(item.block(g, i)) for i in range(item.plain + item.inner) if not item.at_sinks(i)]
    rows = (np.array(visited)[:, None] * block + np.arange(block)).ravel() + base
    wanted = np.arange(max(first - window + 1, base, 0), end)
    assert np.isin(wanted, rows).all()
    assert len(np.unique(rows)) == len(rows) <= len(wanted) + max(0, -base) + 2 * block
    whole = np.arange(max(end - window, sinks, base), first + 1)
    seen_by_all = [np.isin(np.arange(i * block, (i + 1) * block) + base, whole).all() for i in visited]
    assert seen_by_all == [True] * item.plain + [False] * (len(visited) - item.plain)


@pytest.mark.parametrize("base", [0, 300, -100])
def test_near_keys_of_no_queries_are_not_visited(base):
    # These tiles are after the end of a row, one of them directly.
    g = geometry(keys="near", sinks=4, window=700)
    for first, end in ((512, 512), (1024, 900), (64, 0)):
        item = near_item(g, 64, first, end, base)
        assert (item.plain, item.mixed, item.inner) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_far_keys_are_visited_where_they_are(seed):
    # Blocks without a mask hold only keys that are far for every query, and all blocks hold all far keys.
    rng = np.random.default_rng(seed)
    block, S = int(rng.choice([64, 128])), int(rng.integers(1, 700))
    sinks, window, first = (int(rng.integers(0, most)) for most in (9, 300, 900))
    end = first + int(rng.integers(1, 193))
    g = geometry(keys="far", sinks=sinks, window=window, S=S)
    begin, plain, mixed, inner, edge, sink_step = map(
        int, items.steps_of(g, block, *(jnp.int32(x) for x in (first, end, 0)))
    )

    def far(t):
        return set(range(sinks, min(t - window + 1, S)))

    def rows(blocks):
        return {row for i in blocks for row in range(i * block, (i + 1) * block)}

    unmasked = rows(range(begin, begin + plain))
    masked = rows(([0] if sink_step else []) + list(range(edge, edge + inner - sink_step)))
    assert mixed == 0
    assert unmasked <= far(first)
    assert far(end - 1) <= unmasked | masked
    assert not unmasked & masked
    assert max(unmasked | masked, default=0) < S + block


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.matrix
def test_lowers_with_each_config(warpgroups, overlap):
    config = PrefillConfig(block_kv=64, warpgroups=warpgroups, overlap=overlap)

    def f(q, k, v):
        return prefill_attention(q, k, v, scale=1.0, config=config)

    lower(f, shape(1, 300, 4, 32), shape(1, 2, 300, 32), shape(1, 2, 300, 64))


@pytest.mark.parametrize("page", [64, 128, 192, 256])
@pytest.mark.parametrize(("R", "Z", "H"), [(64, 96, 0), (32, 64, 128), (0, 0, 128)])
@pytest.mark.matrix
def test_lowers_paged(page, R, Z, H):
    trailing = trailing_shapes(2, 2, 512, H, R, Z) if H else None
    near = {"sinks": 4, "window": 192} if H else {}

    def f(q, k, v, trailing, table):
        return prefill_attention(q, k, v, scale=1.0, trailing=trailing, block_table=table, **near)

    held = [shape(20, 2, page, rank) for rank in (R, Z)]
    lowered = lower(f, shape(2, 77, 4, H or R), *held, trailing, shape(2, 5, dtype=jnp.int32))
    assert lowered.out_info[0].shape == (2, 77, 4, H or Z)


def test_blocks_divide_pages(monkeypatch):
    # Measured blocks divide pages too; without pages they stay as measured.
    found = {"block_kv": 256, "stages": 1, "warpgroups": 2, "overlap": False}
    monkeypatch.setattr(prefill_kernel, "measured", lambda kernel, **widths: found)

    def config(**page):
        return prefill_kernel.config_for(64, 64, 64, 64, **page)

    assert config() == config(page=256) == config(page=512) == PrefillConfig(**found)
    for page, block in ((64, 64), (128, 128), (192, 64), (320, 64), (384, 128)):
        assert config(page=page) == PrefillConfig(**found | {"block_kv": block})


def test_turns_are_of_whole_blocks(monkeypatch):
    # Default and table configs have turns. A page that a block does not divide cuts the block, without
    # turns.
    config = prefill_kernel.config_for
    for found in (prefill_kernel.IN_TURNS, PrefillConfig(128, 3, 3, turns=96)):
        table = asdict(found) if found.stages == 3 else None
        monkeypatch.setattr(prefill_kernel, "measured", lambda kernel, table=table, **widths: table)
        for R, H, page in itertools.product((48, 64), (0, 128), (0, 128, 256, 384)):
            assert config(R, 96, H or R, H or 96, page=page) == found
        for page in (64, 192, 320):
            assert config(64, 96, 64, 96, page=page) == PrefillConfig(64, found.stages, 3)


def test_short_prompts_have_smaller_ctas():
    # Measured on an H200: heads, tokens, and the fastest number of warpgroups.
    fastest = [(12, 500, 1), (12, 1000, 1), (32, 1000, 2), (12, 2000, 2), (32, 2000, 3), (12, 4000, 3)]
    config = PrefillConfig(128, 2, 3, turns=80)
    for heads, T, count in fastest:
        found = prefill_kernel.split_further(config, heads, T, S=T + 100)
        assert found == replace(config, warpgroups=count, turns=80 if count > 1 else 0)
        assert prefill_kernel.split_further(config, heads, T, S=2 * T) == config, "chunks after a prefix"
    assert prefill_kernel.split_further(replace(config, warpgroups=2), 32, 8000, S=8000).warpgroups == 2


def test_by_default_turns_are_taken_where_they_won():
    for R, Z in ((128, 128), (96, 96), (64, 128), (64, 64), (32, 64)):
        assert prefill_kernel.default_config(R, Z, R, Z).turns == 0
    assert prefill_kernel.default_config(48, 96, 48, 96).turns == 80
    assert prefill_kernel.default_config(64, 96, 256, 256).turns == 0, "its tile does not fit"


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": shape(1, 2, 64, 24)}, "R=24"),
        ({"v": shape(1, 2, 64, 272)}, "Z=272"),
        ({"v": shape(1, 2, 64, 32, dtype=F16)}, "v has dtype float16"),
        ({"q": shape(1, 64, 4, 32, dtype=jnp.float32)}, "q has dtype float32"),
        ({"q": shape(1, 64, 3, 32)}, "3 heads"),
        ({"q": shape(1, 64, 4, 16)}, "q has 16 coordinates"),
        ({"q": shape(64, 4, 32)}, "q has shape"),
        ({"v": shape(1, 2, 65, 32)}, "v has shape"),
        ({"keys": "near"}, "keys='near'"),
        ({"needed_from": shape(2, dtype=jnp.int32)}, "needed_from has shape"),
        ({"k": shape(1, 2, 64, 0)}, "R=0"),
        ({"trailing": NO_SCORES, "window": 64, "q": WIDE, "k": shape(1, 2, 64, 0)}, "R=0"),
        ({"window": -1}, "window=-1"),
        ({"trailing": trailing_shapes(1, 2, 64, 64, 32, 32)}, "window=0"),
        ({"trailing": trailing_shapes(1, 2, 64, 64, 32, 32), "window": 64, "q": shape(1, 64, 4, 40)}, "H=40"),
        ({"trailing": trailing_shapes(1, 2, 64, 96, 32, 32), "window": 64, "q": WIDE}, "trailing.k"),
        ({"trailing": trailing_shapes(1, 2, 64, 64, 32, 32), "window": 64, "sinks": 9, "q": WIDE}, "8 rows"),
        ({"block_table": shape(2, 4, dtype=jnp.int32)}, r"must be \[B, pages\] = \(1, any\)"),
        ({"block_table": shape(1, 4, dtype=jnp.int16)}, "block_table has dtype int16: must be int32"),
        ({"block_table": shape(1, 0, dtype=jnp.int32)}, "block_table has 0 pages per sequence, the pool 1"),
        ({"block_table": TABLE, **pool(9, 96)}, "page size of 96 slots: must be a non-zero multiple of 64"),
        ({"block_table": TABLE, **pool(9, 0)}, "page size of 0 slots: must be a non-zero multiple of 64"),
        ({"block_table": TABLE, **pool(9, 192), "config": PrefillConfig()}, "non-zero multiple of 128"),
        ({"block_table": TABLE, **pool(9, 64), "v": shape(8, 2, 64, 32)}, "v has shape"),
        (pool(9, 64), "k has shape"),
        ({"near": trailing_shapes(1, 2, 64, 32, 0, 0), "window": 64}, "near: needs keys='far'"),
        ({**NEAR, "window": 0}, "near: needs keys='far' and a window of 1 to 512, .* window=0"),
        ({**NEAR, "sinks": 4}, "sinks=4: must be 0 with near"),
        ({**NEAR, "near": trailing_shapes(1, 2, 64, 32, 0, 0)}, "sinks=0: .* without near.sink_k"),
        ({**NEAR, "near": without_sinks(trailing_shapes(1, 2, 64, 48, 0, 0))}, "near.k"),
    ],
)  # fmt: skip
def test_refuses(change, message):
    given = {"q": shape(1, 64, 4, 32), "k": shape(1, 2, 64, 32), "v": shape(1, 2, 64, 32)} | change

    def static(x):
        return isinstance(x, (int, str, PrefillConfig)) or x == given.get("blocks")

    arrays = {name: x for name, x in given.items() if not static(x)}
    options = {name: x for name, x in given.items() if static(x)}
    with pytest.raises(ValueError, match=message):
        lower(lambda arrays: prefill_attention(scale=1.0, **arrays, **options), arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_kv": 96}, "block_kv=96"),
        ({"stages": 0}, "stages=0"),
        ({"warpgroups": 4}, "warpgroups=4"),
        ({"turns": 60}, "turns=60: must be a multiple of 8 up to 128"),
        ({"turns": -8}, "turns=-8: must be a multiple of 8 up to 128"),
        ({"turns": 112, "block_kv": 64}, "turns=112: must be a multiple of 8 up to 64"),
        ({"turns": 112, "warpgroups": 1}, "turns=112: needs at least 2 warpgroups"),
        ({"turns": 112, "overlap": True}, "turns=112: needs at least 2 warpgroups, and no overlap"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        PrefillConfig(**options)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "Z"), ONE_RANK)
@pytest.mark.parametrize(("T", "S", "N", "K", "starts"), [
    (256, 256, 4, 4, (0, 0)), (1, 40, 8, 2, (39, 3)), (203, 1001, 4, 1, (517, 798)), (640, 640, 3, 3, (0, 0)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_one_rank(R, Z, T, S, N, K, starts, dtype):
    q, k, v = (
        draw(0, 2, T, N, R, dtype=dtype),
        draw(1, 2, K, S, R, dtype=dtype),
        draw(2, 2, K, S, Z, dtype=dtype),
    )
    lengths = np.array([starts[0] + T, starts[1] + (T + 1) // 2])
    options = {"scale": R**-0.5, "starts": np.array(starts), "lengths": lengths}
    o, lse = jax.jit(lambda q, k, v: prefill_attention(q, k, v, **options))(q, k, v)
    check(o, lse, *prefill(q, k, v, **options), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "Z"), [(128, 128), (64, 96), (32, 64), (80, 48)])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("config", [
    PrefillConfig(64, 2, 1), PrefillConfig(64, 2, 2, overlap=True), PrefillConfig(64, 2, 2, turns=48),
])  # fmt: skip
def test_scores_that_jump(R, Z, dtype, config):
    # At some blocks, only some warps raise their maximum.
    B, T, S, N, K, scale = 2, 256, 700, 4, 2, R**-0.5
    q, k = jumping(B, T, S, N, K, R, scale, dtype)
    v = draw(2, B, K, S, Z, dtype=dtype)
    options = {"scale": scale, "starts": np.array([S - T, 77])}
    found = prefill_attention(q, k, v, config=config, **options)
    check(*found, *prefill(q, k, v, lengths=options["starts"] + T, **options), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "Z", "H"), TWO_RANKS)
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("T", "starts"), [(700, (0, 0)), (77, (900, 1023)), (300, (512, 70))])
def test_two_ranks(R, Z, H, sinks, T, starts):
    S, window, B, K, N = 1100, 192, 2, 2, 4
    q, k, v = draw(0, B, T, N, H), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    tails = draw(3, B, K, S, H - R), draw(4, B, K, S, H - Z)
    first = np.maximum(np.array(starts) - window + 1, 0) // 256 * 256

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, 700), (0, 0)))

    def rows(x):
        return jnp.stack([padded(x)[b, :, n : n + 1000] for b, n in enumerate(first)])

    heads = [x[:, :, :8] for x in tails] if sinks else []
    trailing = Trailing(*(rows(x) for x in tails), jnp.asarray(first, jnp.int32), *heads)
    options = {"scale": H**-0.5, "starts": np.array(starts), "sinks": sinks, "window": window}

    def f(q, k, v, trailing):
        return prefill_attention(q, k, v, trailing=trailing, **options)

    o, lse = jax.jit(f)(q, k, v, trailing)
    check(o, lse, *prefill(q, k, v, tail=tails, lengths=np.array(starts) + T, **options), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [64, 256, 333, 512])
@pytest.mark.parametrize(("T", "starts"), [(400, (0, 400)), (77, (3, 650)), (700, (0, 1))])
def test_near_keys_alone(H, sinks, window, T, starts):
    # One row lacks a halo. Merged with far keys, the result is attention over all keys.
    B, N, K, starts = 2, 4, 2, np.array(starts)
    q, k, v = draw(0, B, T, N, H), draw(1, B, K, 1300, H), draw(2, B, K, 1300, H)
    halo = starts - window

    def cut(x):
        return jnp.stack([jnp.roll(x[b], -halo[b], axis=1)[:, : window + T] for b in range(B)])

    options = {"scale": H**-0.5, "starts": starts, "sinks": sinks, "window": window}
    of_sinks = (k[:, :, :8], v[:, :, :8]) if sinks else ()
    trailing = Trailing(cut(k), cut(v), jnp.asarray(halo), *of_sinks)
    near = prefill_attention(q, k[..., :0], v[..., :0], trailing=trailing, **options)
    far = prefill_attention(q, k, v, keys="far", **options)
    truth = {**options, "lengths": starts + T}
    check(*near, *prefill(q, k[..., :0], v[..., :0], tail=(k, v), **truth), BF16)
    check(*far, *prefill(q, k, v, keys="far", **truth), BF16)
    whole = prefill(q, k, v, scale=H**-0.5, starts=starts, lengths=starts + T)
    check(*merge_partial([near, far]), *whole, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [192, 203, 256])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 100)])
def test_far_keys_of_queries_past_all_of_them(S, sinks, window):
    # A block of keys goes round a ring; absent rows do not count.
    B, T, N, K, starts = 2, 150, 4, 2, np.array([190, 3000])
    q, k, v = draw(0, B, T, N, 64), draw(1, B, K, S, 64), draw(2, B, K, S, 96)
    options = {"scale": 0.125, "starts": starts, "sinks": sinks, "window": window, "keys": "far"}
    check(*prefill_attention(q, k, v, **options), *prefill(q, k, v, lengths=starts + T, **options), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NEAR_AND_FAR)
@pytest.mark.parametrize(("H", "page"), [(64, 0), (128, 0), (128, 128), (256, 0)])
def test_near_and_far_keys(case, H, page):
    near_and_far(*NEAR_AND_FAR[case], None, page=page, H=H)
    if H == 128:
        near_and_far(*NEAR_AND_FAR[case], prefill_kernel.NEAR_AND_FAR, page=page, H=H)


PAGED = {
    "one rank": (64, 96, 0, {}),
    "overlapped": (32, 64, 0, {}),
    "wide": (256, 256, 0, {}),
    "far": (64, 96, 0, {"sinks": 4, "window": 192, "keys": "far"}),
    "two ranks": (32, 64, 128, {"sinks": 4, "window": 192}),
    "no sinks": (64, 96, 128, {"window": 192}),
}
"""R, Z, H if there are two ranks, and options."""


@pytest.mark.gpu
@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("name", PAGED)
def test_paged_equals_contiguous_bit_by_bit(name, page):
    # Pages are in random order. Entries that no query sees are invalid, and pages of no row hold NaN.
    (R, Z, H, options), B, T, S, N, K = PAGED[name], 3, 300, 1024, 4, 2
    starts, ends = np.array([0, 70, 700]), np.array([300, 250, 1000])
    rng, there = np.random.default_rng(0), np.arange(0, S, page) < ends[:, None]
    count = there.sum()
    places = rng.permutation(count + 3)[:count]
    table = rng.choice([-1, 1 << 20, 2**31 - 1], there.shape)
    table[there] = places

    def paged(x):
        pages = np.asarray(x).reshape(B, K, S // page, page, -1).swapaxes(1, 2)
        found = np.full((count + 3, *pages.shape[2:]), np.nan, pages.dtype)
        found[places] = pages[there]
        return jnp.asarray(found)

    q, k, v = draw(0, B, T, N, H or R), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    trailing = None
    if H:
        first = np.maximum(starts - options["window"] + 1, 0) // 256 * 256
        tails = draw(3, B, K, 1000, H - R), draw(4, B, K, 1000, H - Z)
        heads = [x[:, :, :8] for x in tails] if "sinks" in options else []
        trailing = Trailing(*tails, jnp.asarray(first, jnp.int32), *heads)
    config = prefill_kernel.config_for(R, Z, H or R, H or Z, page=page)
    options = options | {"scale": 0.1, "starts": starts, "lengths": ends, "trailing": trailing}
    f = jax.jit(lambda k, v, table: prefill_attention(q, k, v, block_table=table, config=config, **options))
    whole, found = f(k, v, None), f(paged(k), paged(v), jnp.asarray(table, jnp.int32))
    for one, other in zip(whole, found, strict=True):
        assert np.isfinite(np.asarray(one[0], np.float32)).all() or name == "far"
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["all", "far", "near"])
def test_queries_before_the_needed_ones_are_left_out(keys):
    T, starts, lengths = 1000, np.array([0, 900, 33]), np.array([1000, 1500, 34])
    q, k, v = draw(0, 3, T, 4, 64), draw(1, 3, 2, 2048, 64), draw(2, 3, 2, 2048, 96)
    options = {"scale": 0.1, "starts": starts, "lengths": lengths, "config": PrefillConfig(128, 2, 2)}
    if keys == "far":
        options |= {"keys": "far", "sinks": 4, "window": 100}
    if keys == "near":  # Two ranks: 64 of 128 coordinates are those of near keys alone.
        q, v = draw(0, 3, T, 4, 128), v[..., :64]
        tails = draw(3, 3, 2, 2048, 64), draw(4, 3, 2, 2048, 64)
        trailing = Trailing(*tails, jnp.zeros(3, jnp.int32), *(x[:, :, :8] for x in tails))
        options |= {"trailing": trailing, "sinks": 4, "window": 100}
    check_needed(partial(prefill_attention, q, k, v, **options), starts, lengths, tile=128)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NEAR_AND_FAR)
def test_near_and_far_keys_of_needed_queries(case):
    near_and_far(*NEAR_AND_FAR[case], PrefillConfig(64, 4, 3, overlap=True), H=128, tile=192)


@pytest.mark.gpu
def test_same_inputs_same_bits():
    q, k, v = draw(0, 1, 1000, 4, 64), draw(1, 1, 2, 1000, 64), draw(2, 1, 2, 1000, 96)
    config = PrefillConfig(128, 2, 3, turns=80)
    f = jax.jit(lambda q, k, v: prefill_attention(q, k, v, scale=0.1, config=config))
    first = np.asarray(f(q, k, v)[0]).view(np.uint16)
    for _ in range(5):
        assert np.array_equal(first, np.asarray(f(q, k, v)[0]).view(np.uint16))
