"""Tokens in pages, read by kernels where supported: equal to tokens in rows."""

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dequantise, triton
from kernels_pallas.prefill.inputs import LARGEST_BLOCK
from zdc_jax import methods
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.paging.pages import Pages
from zdc_jax.cache.specs import coded_store, near_far, prefix_ring
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import Call, LayerCacheSpec, NewTokens, put_rows
from zdc_jax.errors import PlanError
from zdc_jax.ops import attention, cache_attention, new_tokens
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.xla import xla_attention
from zdc_jax.plan import CompressionPlan

B, K, G, H, PAGE, CAPACITY, PIECE = 3, 2, 4, 128, 128, 512, 64
POOL = 2 * B * CAPACITY // PAGE
HEADS = {"num_kv_heads": K, "head_dim": H, "dtype": "bfloat16"}
FAR = HEADS | {"R": H, "Z": H, "sinks": 4, "window": 128}
SPECS = {
    "dense": PrefixRing(R=H, Z=H, **HEADS),
    "ranks": PrefixRing(R=64, Z=96, **HEADS),
    "ring": PrefixRing(R=64, Z=96, sinks=4, window=128, **HEADS),
    "coded": CodedStore(**FAR, key_code=FittedIntegers(4), value_code=FittedIntegers(4)),
    "chosen": CodedChoosing(
        **FAR,
        index=32,
        read=128,
        index_code=FittedIntegers(4),
        key_code=FittedIntegers(6),
        value_code=FittedIntegers(4),
    ),
}
KINDS = {
    "coded": {"coded decode", "far prompt", "dequantising", "coding"},
    "chosen": {"prefill", "choice", "attention to chosen tokens", "coding"},
}
"""Calls that kernels must serve, besides `decode` of near tokens; by default `prefill`.

A kernel that reads near and far tokens of a prompt counts as `far prompt`.
"""


def run(
    spec: LayerCacheSpec, widths: tuple[int, int], table: np.ndarray | None, singles: int
) -> list[np.ndarray]:
    """Return outputs [rows, T, N, ·] of prompts of 3, 2 and 1 chunks, and of tokens decoded after them."""
    rng, (qk, vo) = np.random.default_rng(0), widths
    wide = {"q": (K * G, qk), "k": (K, qk), "v": (K, vo)}
    steps = [PIECE] * 4 + [1] * singles
    step = jax.jit(partial(_step, spec))
    state, held, found = spec.create(B, CAPACITY), np.zeros(B, np.int32), []
    for index, count in enumerate(steps):
        x = {name: rng.normal(size=(B, count, *shape)) for name, shape in wide.items()}
        new = count * (np.arange(B) < 3 - index if count > 1 else np.ones(B, bool))
        given = (jnp.asarray(x[name], jnp.bfloat16) for name in "qkv")
        state, o = step(state, *given, held[:, None] + np.arange(count), held + new, table)
        held = held + new
        found.append(np.asarray(o, np.float32)[new > 0])
    return found


def _step(spec, state, q, k, v, positions, end, table):
    done = spec.attend(state, q, NewTokens(NewKeys(k), v, positions, end), None, Call(H**-0.5, table=table))
    return done.state, done.o


def check(spec: LayerCacheSpec, singles: int = 12, *, before: int = 0) -> None:
    """Assert that pages equal rows.

    before: pages of the pool that precede those of the rows.
    """
    pages = CAPACITY // PAGE
    table = before + np.random.default_rng(1).permutation(POOL)[: B * pages].reshape(B, pages)
    paged, widths = Paged.of(spec, page=PAGE, pages=before + POOL), (spec.R, spec.Z)
    widths = (H, H) if spec.sinks else widths
    found, wanted = run(paged, widths, table.astype(np.int32), singles), run(spec, widths, None, singles)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"{step=}")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.full
def test_pages_give_what_rows_give(name):
    check(SPECS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_kernels_read_pages(name, caplog):
    attention._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        check(SPECS[name])
    found = {record.getMessage().split(" (")[0] for record in caplog.records}
    for kind in {"decode"} | KINDS.get(name, {"prefill"}):
        assert f"{kind} runs on pallas" in found
        assert f"{kind} runs on xla" not in found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["coded", "chosen"])
def test_kernels_read_no_further_than_codes_were_read(name):
    jnp.full(2**28, jnp.nan).delete()  # Contents that an unwritten array may have.
    check(SPECS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "coded", "chosen"])
def test_kernels_read_pages_behind_four_gigabytes(name):
    # Between two and four gigabytes, XLA quantizes instead (`kernels_pallas.quantized.encode`) and may round
    # differently.
    bytes_of_a_page = K * PAGE * (2 * H if name == "dense" else H // 2)
    check(SPECS[name], before=2**32 // bytes_of_a_page)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.matrix
def test_a_piece_in_pages_is_where_it_is_in_rows(seed):
    # Chunks begin and end anywhere, with padding past the end. Nothing else in the pool changes.
    rng = np.random.default_rng(seed)
    slots, n, T = 8, 5, int(rng.choice([2, 8, 13, 40]))
    start = rng.integers(0, slots * n, B)
    end = np.minimum(start + rng.integers(0, T + 1, B), slots * n)
    places, nobodys = np.split(rng.permutation(B * n + 3), [B * n])
    table = jnp.asarray(places.reshape(B, n), jnp.int32)
    pages = Pages(jnp.asarray(rng.normal(size=(B * n + 3, K, slots, 4)), jnp.float32), table)
    x = jnp.asarray(rng.normal(size=(B, T, K, 4)), jnp.float32)
    found = pages.put_chunk(x, jnp.asarray(start), jnp.asarray(end))
    kept = start[:, None] + np.arange(T) < end[:, None]
    wanted = put_rows(pages.rows(), x, jnp.asarray(start), jnp.asarray(kept))
    np.testing.assert_array_equal(found.rows(), wanted)
    np.testing.assert_array_equal(found.pool[nobodys], pages.pool[nobodys])


@pytest.mark.parametrize("name", ["dense", "ranks", "ring"])
@pytest.mark.matrix
def test_pieces_are_read_in_pages_where_kernels_run(name, monkeypatch):
    # A stand-in replaces the kernel. It sees the contents of pages and treats all tokens alike.
    spec, leading = SPECS[name], []

    def prefill(q, k, v, *, scale, starts, block_table, **_):
        leading.append(len(k))
        k, v = (x if block_table is None else Pages(x, block_table).rows() for x in (k, v))
        positions = starts[:, None] + jnp.arange(q.shape[1])
        all_alike = {"near": None, "sinks": 0, "window": 0}
        return xla_attention(q[..., : k.shape[-1]], k, v, positions, scale=scale, **all_alike)

    monkeypatch.setattr(attention, "device_refusal", lambda q: None)
    monkeypatch.setattr(prefix_ring, "prefill_attention", prefill)
    check(spec, singles=0)
    assert leading == [POOL, B]


def far_prefill(q, k, v, *, scale, starts, lengths, needed_from, keys, sinks, window, block_scores):
    """Attend like the kernel: read whole blocks as far as the last query sees, and nothing after them."""
    assert keys == "far"
    assert lengths is None
    assert (block_scores, needed_from) == (None, None)
    seen = starts + q.shape[1] - window
    read = jnp.arange(k.shape[2]) < -(-seen // LARGEST_BLOCK)[:, None] * LARGEST_BLOCK
    k, v = (jnp.where(read[:, None, :, None], x, 0) for x in (k, v))
    positions, options = starts[:, None] + jnp.arange(q.shape[1]), {"sinks": sinks, "window": window}
    return xla_attention(q, k, v, positions, scale=scale, near=None, **options)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seen", [0, 1, 129, 384, 385, 512])
@pytest.mark.matrix("129-False")
@pytest.mark.full
def test_codes_are_read_as_far_as_queries_see(seen, paged, monkeypatch):
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda q: None)
    monkeypatch.setattr(coded_store, "dequantise", partial(dequantise, interpret=True))
    monkeypatch.setattr(cache_attention, "prefill_attention", far_prefill)
    spec, rng = SPECS["coded"], np.random.default_rng(seen)
    places = rng.permutation(POOL)[: B * CAPACITY // PAGE].reshape(B, -1)

    def random(x):
        return jnp.asarray(rng.integers(0, 100, x.shape), x.dtype)

    state = jax.tree.map(random, Paged.of(spec, page=PAGE, pages=POOL).create(B, CAPACITY))
    pages = jax.tree.map(lambda pool: Pages(pool, jnp.asarray(places, jnp.int32)), state.far)
    rows = jax.tree.map(lambda x: x.rows(), pages, is_leaf=lambda x: isinstance(x, Pages))
    last = jnp.array([seen + spec.window - 1, 1, CAPACITY - 1])
    positions, far = last[:, None] + jnp.arange(-1, 1), pages if paged else rows
    q, call = jnp.asarray(rng.normal(size=(B, 2, K * G, H)), jnp.bfloat16), Call(H**-0.5)
    assert spec.reads_pages(replace(state, far=far), q, None, call)
    found = spec.attend_far(far, q, positions, call)
    wanted = spec.attend_far(rows, q, positions, replace(call, implementation="xla"))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_far_attention_is_told_where_padding_begins(monkeypatch):
    attend, told = near_far.stored_attention, []

    def noted(*given, end, **options):
        return told.append(end) or attend(*given, **options)

    monkeypatch.setattr(near_far, "stored_attention", noted)
    spec, end = SPECS["coded"], jnp.array([PIECE, 9, 0])
    q, k, v = (jnp.ones((B, PIECE, heads, H), jnp.bfloat16) for heads in (K * G, K, K))
    positions = jnp.broadcast_to(jnp.arange(PIECE), (B, PIECE))
    spec.attend(spec.create(B, CAPACITY), q, NewTokens(NewKeys(k), v, positions, end), None, Call(H**-0.5))
    assert len(told) == 1
    np.testing.assert_array_equal(told[0], end)


def test_codes_are_not_read_in_pages_without_a_kernel(monkeypatch):
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda q: None)
    spec, table = SPECS["coded"], jnp.zeros((B, CAPACITY // PAGE), jnp.int32)
    state = Paged.of(spec, page=PAGE, pages=POOL).create(B, CAPACITY)
    state = replace(state, far=jax.tree.map(lambda pool: Pages(pool, table), state.far))
    q, call = jnp.zeros((B, 2, K * G, H), jnp.bfloat16), Call(H**-0.5)
    assert spec.reads_pages(state, q, None, call)
    monkeypatch.setattr(triton, "plt", None)
    assert not spec.reads_pages(state, q, None, call)


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("name", ["coded", "chosen"])
@pytest.mark.full
def test_codes_are_put_into_pages_without_a_kernel(name, T):
    # XLA also does this where a pool is too large for the kernel.
    spec, rng = SPECS[name], np.random.default_rng(T)
    places = rng.permutation(POOL)[: B * CAPACITY // PAGE].reshape(B, -1)
    table, start = jnp.asarray(places, jnp.int32), np.array([0, 120, CAPACITY - 30])
    end, positions = jnp.asarray(start + np.array([T, T // 2, T])), jnp.asarray(start[:, None] + np.arange(T))
    k, v = (jnp.asarray(rng.normal(size=(B, T, K, H)), jnp.bfloat16) for _ in range(2))
    state = Paged.of(spec, page=PAGE, pages=POOL).create(B, CAPACITY)
    held = replace(state, far=jax.tree.map(lambda pool: Pages(pool, table), state.far))
    found = spec.write_far(held, NewTokens(NewKeys(k), v, positions, end))

    def rows(far):
        return jax.tree.map(lambda x: x.rows(), far, is_leaf=lambda x: isinstance(x, Pages))

    wanted = spec.write_far(replace(state, far=rows(held.far)), NewTokens(NewKeys(k), v, positions, end))
    for one, other in zip(jax.tree.leaves(rows(found)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.any(np.asarray(jax.tree.leaves(found)[0])[np.setdiff1d(np.arange(POOL), places)])


def test_a_page_that_is_shared_is_not_written_by_rows_that_hold_still():
    pool = jnp.zeros((3, 1, 4, 2))
    pages = Pages(pool, jnp.array([[0, 1], [0, 2]]))
    rows = jnp.ones((2, 1, 8, 2))
    found = pages.put_rows(rows, jnp.array([2, 5]), jnp.array([2, 6]), tokens=1, page=4)
    np.testing.assert_array_equal(found[:, 0, 0, 0], [0, 0, 1])


def test_methods_that_cannot_are_refused_by_name(tiny_llama):
    config = tiny_llama.config
    evicting, blocks = (
        methods.named(name).Settings(**settings)
        for name, settings in (("h2o", {}), ("kivi", {"bits": 4, "group": 16}))
    )
    plan = CompressionPlan.uniform(config, qk=32, v=32, sinks=2, window=16)
    for name, settings, message in [
        ("h2o", evicting, "spec=Evicting: pages need tokens stored by position"),
        ("kivi", blocks, "page=8: must be a multiple of the block size of CodedStore"),
    ]:
        spec = replace(plan, method=name, settings=settings).layer_caches("float32")[0]
        with pytest.raises(PlanError, match=message):
            Paged.of(spec, page=8, pages=4)
