"""Kernel that scores tokens by the index of a quantized cache: lowering for CUDA, refusals, and results.

On a CPU, JAX's interpreter of GPU kernels runs it and looks for races. Plain jax.numpy replaces products of
bytes and reads of the index. On a GPU, all of the kernel runs.
"""

import re
from dataclasses import replace
from functools import partial

import compiled_codes
import interpreting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import Pool

from kernels_pallas import Plane, ScanConfig, index_scores, scan_refusal
from kernels_pallas.common import LOG2_E
from kernels_pallas.quantized.short_scales import NAN_CODE
from kernels_pallas.select import scan as coded_scan
from kernels_pallas.select.scan import LARGEST, _rounded
from kernels_pallas.select.scan_inputs import BLOCKS, default_scan_config
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

HEADS = [(3, 3), (8, 2), (14, 2), (16, 1)]
KINDS = [(32, 4), (64, 4), (96, 4), (64, 2), (64, 8), (128, 8)]
SCALE = 0.2


def shape(*dims, dtype=jnp.uint8):
    return jax.ShapeDtypeStruct(dims, dtype)


def like(kind, *tokens) -> Plane:
    C, bits = kind
    return Plane(shape(*tokens, C * bits // 8), shape(*tokens), bits)


def lower(kind, N, K, S, page=0, **options):
    """Lower for CUDA on any machine; page: slots of a page."""
    C, bits = kind

    def score(q, levels, reach, begin, end, table):
        plane = Plane(levels, reach, bits)
        return index_scores(q, plane, begin, end, scale=1.0, block_table=table, **options)

    plane, row = like(kind, *((9, K, page) if page else (2, K, S))), shape(2, dtype=jnp.int32)
    table = shape(2, S // page, dtype=jnp.int32) if page else None
    arrays = shape(2, N, C, dtype=jnp.bfloat16), plane.levels, plane.reach, row, row, table
    return jax.jit(score).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", [(32, 4), (64, 4)])
@pytest.mark.matrix
def test_lowers(kind, heads):
    scores, lse = lower(kind, *heads, 640).out_info
    assert (scores.shape, lse.shape) == ((2, heads[1], 640), (2, heads[0]))
    assert scores.dtype == lse.dtype == jnp.float32


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize("page", [128, 640])
def test_lowers_with_pages(heads, page):
    scores, lse = lower((32, 4), *heads, 1280, page=page).out_info
    assert (scores.shape, lse.shape) == ((2, heads[1], 1280), (2, heads[0]))


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.matrix
def test_lowers_other_widths(kind):
    lower(kind, 8, 2, 640)


@pytest.mark.parametrize("config", [ScanConfig(128, splits=1), ScanConfig(256, splits=7), ScanConfig(512)])
@pytest.mark.matrix
def test_lowers_with_a_config(config):
    lower((32, 4), 8, 2, 1024, config=config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float16}, "q has dtype float16: must be bfloat16"),
        ({"kind": (32, 7)}, r"index.bits=7: must be one of"),
        ({"kind": (64, 6)}, r"index has 64 coordinates of 6 bits: .* of one of \(2, 4, 8\) bits"),
        ({"kind": (48, 2)}, r"index has 48 coordinates of 2 bits: .* with a multiple of 16 bytes per token"),
        ({"kind": (160, 4)}, "index has 160 coordinates of 4 bits: must be at most 128"),
        ({"S": 192}, "S=192 slots: must be a multiple of 128"),
        ({"S": 384, "config": ScanConfig(256)}, "S=384 slots: must be a multiple of 256"),
        (
            {"kind": (64, 8), "S": 512, "config": ScanConfig(512)},
            "block=512 tokens of 64 bytes: 256 bytes per thread, must be at most 128",
        ),
        ({"N": 40}, "q has 20 heads per KV head: must be at most 16"),
        ({"N": 3}, "q has 3 heads: must be a multiple of the 2"),
        ({"N": 32768, "K": 32768}, "2 sequences of 32768 KV heads are 65536 caches: must be at most 65535"),
        ({"width": 64}, "q has shape"),
        ({"rows": 3}, "begin has shape"),
        ({"table": (3, 4)}, r"block_table has shape \(3, 4\): must be \[B, pages\] = \(2, any\)"),
        ({"table": (2, 4), "integers": jnp.uint32}, "block_table has dtype uint32: must be int32"),
        ({"table": (2, 0)}, "block_table has 0 pages per sequence, the pool 2: must be at least 1"),
        ({"table": (2, 4), "S": 192}, "page size of 192 slots: must be a non-zero multiple of 128"),
        ({"table": (2, 4), "S": 384, "config": ScanConfig(256)}, "page size of 384 .* multiple of 256"),
    ],
)
def test_refusals(change, message):
    defaults = {"dtype": jnp.bfloat16, "kind": (32, 4), "S": 256, "N": 4, "K": 2, "rows": 2}
    it = defaults | {"config": None} | change
    q = shape(2, it["N"], it.get("width", it["kind"][0]), dtype=it["dtype"])
    row = shape(it["rows"], dtype=jnp.int32)
    table = shape(*it["table"], dtype=it.get("integers", jnp.int32)) if "table" in it else None
    index = like(it["kind"], 2, it["K"], it["S"])
    reason = scan_refusal(q, index, row, row, block_table=table, config=it["config"])
    assert reason is not None
    assert re.search(message, reason), reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": 0}, "splits=0: must be at least 1"),
        ({"block": 64}, "block=64: must be one of"),
    ],
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ScanConfig(**options)


@pytest.mark.parametrize("kind", [(16, 8), *KINDS])
@pytest.mark.parametrize("S", [128, 384, 32768])
def test_the_default_config_is_not_refused(kind, S):
    plane, row = like(kind, 1, 2, S), shape(1, dtype=jnp.int32)
    config = default_scan_config(2, S, plane.levels.shape[-1])
    q = shape(1, 2, kind[0], dtype=jnp.bfloat16)
    assert scan_refusal(q, plane, row, row, config=config) is None


@pytest.mark.parametrize("page", [128, 384, 1024])
def test_the_default_config_divides_pages(page):
    plane, row = like((32, 4), 9, 2, page), shape(3, dtype=jnp.int32)
    config = default_scan_config(3 * 2, 4 * page, plane.levels.shape[-1], page)
    q, table = shape(3, 2, 32, dtype=jnp.bfloat16), shape(3, 4, dtype=jnp.int32)
    assert config.block == min(page & -page, 512)
    assert scan_refusal(q, plane, row, row, block_table=table, config=config) is None


class Case:
    """Random queries and an index of one shape, and the float64 scores of its tokens.

    The first row is full, the second ragged, the third has one slot, and the last none.
    """

    def __init__(self, kind, heads, S: int, seed: int = 0, length: float = 1.0):
        rng, (N, K), (C, bits), B = np.random.default_rng(seed), heads, kind, 4
        keys = rng.normal(size=(B, K, S, 1, C)) * np.exp(rng.normal(size=(B, K, S, 1, 1)) / 3)
        levels, reach = compiled_codes.encode(FittedIntegers(bits), jnp.asarray(keys, jnp.float32))
        self.q = jnp.asarray(length * rng.normal(size=(B, N, C)), jnp.bfloat16)
        self.index = Plane(levels[..., 0, :], reach[..., 0, 0], bits)
        self.begin, self.end = np.array([0, S // 3 + 5, 9, 70]), np.array([S, S // 2 + 43, 10, 70])

    def run(self, page: int = 0, **options):
        """Run the kernel on rows, or on pages of a pool."""
        spans, index = map(jnp.asarray, (self.begin, self.end)), self.index
        if page:
            pool = Pool([index], self.begin, self.end, page)
            (index,), options["block_table"] = pool.planes, pool.table
        scores, lse = index_scores(self.q, index, *spans, scale=SCALE, **options)
        return np.asarray(scores, np.float64), np.asarray(lse, np.float64)

    def truth(self, *, as_integers: bool = True, every: int = 8) -> tuple[np.ndarray, np.ndarray]:
        """Compute scores and log-sum-exp in float64.

        as_integers: use the kernel's rounded queries instead of exact ones.
        every: one block of 128 slots in every `every` is in the sample.
        """
        q = np.asarray(self.q, np.float64)
        if as_integers:
            # Halves may round either way, so the reference uses the kernel's own integers.
            rounded = jax.jit(partial(_rounded, factor=SCALE * LOG2_E))(self.q)
            whole, unit = (np.asarray(x, np.float64) for x in rounded)
            q = whole * unit[..., None] / (SCALE * LOG2_E)
        arrays = self.index.levels[..., None, :], self.index.reach[..., None, None]
        k = compiled_codes.decode(FittedIntegers(self.index.bits), arrays, self.index.width)
        k = np.asarray(k, np.float64)[..., 0, :]
        (B, N, C), (_, K, S, _) = q.shape, k.shape
        dots = SCALE * np.einsum("bkgc,bksc->bkgs", q.reshape(B, K, N // K, C), k)
        j = np.arange(S)
        seen = ((j >= self.begin[:, None]) & (j < self.end[:, None]))[:, None, None]
        dots = np.where(seen, dots, -np.inf)
        if N == K:
            return dots[:, :, 0], np.logaddexp.reduce(dots, axis=-1).reshape(B, N)
        first_block = np.maximum(self.begin[:, None], 0) // 128
        sampled = (j // 128 - first_block) % every == 0
        lse = np.logaddexp.reduce(np.where(sampled[:, None, None], dots, -np.inf), axis=-1)
        with np.errstate(invalid="ignore"):
            worth = np.logaddexp.reduce(dots - lse[..., None], axis=2)
        return np.where(seen[:, :, 0], worth, -np.inf), lse.reshape(B, N)

    def check(self, **options) -> None:
        for found, true in zip(self.run(**options), self.truth(), strict=True):
            np.testing.assert_allclose(found, true, atol=3e-5, rtol=3e-6)

    def check_pages(self, page: int, config: ScanConfig) -> None:
        """Assert that pages give the same bits as rows."""
        for paged, whole in zip(self.run(page, config=config), self.run(config=config), strict=True):
            np.testing.assert_array_equal(paged, whole)


def _plain_dots(fields, queries, starts):
    W, G = fields[0].shape[1], starts.shape[1]

    def bytes_of(x):
        return (x[..., None] >> (8 * jnp.arange(4))) & 255

    # Axes of a head: vectors of four words, fields, words, bytes.
    q = bytes_of(queries[...].reshape(-1)[: G * W * len(fields)]).reshape(G, W // 4, len(fields), 4, 4)
    q = jnp.moveaxis(jnp.where(q > 127, q - 256, q), 2, 1).reshape(G, len(fields), W, 4)
    dots = sum(
        jnp.einsum("mwb,gwb->mg", bytes_of(x.astype(jnp.int32)), q[:, i]) for i, x in enumerate(fields)
    )
    return dots + starts[0]


PLAIN = {
    "dots": _plain_dots,
    "read_levels": lambda rows: rows[...],
    "read_codes": lambda codes: codes[...].astype(jnp.int32),
}


@pytest.fixture
def interpreted():
    with interpreting.interpreted(coded_scan, "index_scores", **PLAIN):
        yield


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.matrix
def test_scores_all_tokens(interpreted, heads):
    Case((32, 4), heads, S=512).check(config=ScanConfig(128, splits=2))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.full
def test_other_widths(interpreted, kind):
    Case(kind, (4, 2), S=384).check(config=ScanConfig(128, splits=1))


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.full
def test_more_parts_than_blocks(interpreted, heads):
    Case((64, 4), heads, S=512).check(config=ScanConfig(256, splits=5))


@pytest.mark.full
def test_tokens_beyond_what_a_float_holds_beside_the_likeliest(interpreted):
    # Their probability underflows float32, but its logarithm does not.
    it = Case((32, 4), (4, 2), S=256, length=60.0)
    assert it.truth()[0][0].min() < -150
    it.check(config=ScanConfig(128, splits=2))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.full
def test_what_is_no_number_counts_where_it_is_seen(interpreted, heads):
    it, config = Case((32, 4), heads, S=256), ScanConfig(128, splits=2)
    sound = it.index

    def broken(*slots):
        return replace(sound, reach=sound.reach.at[1, 1, jnp.array(slots)].set(NAN_CODE))

    begin, end = it.begin[1], it.end[1]
    it.index = broken(begin - 1, end)
    assert not any(np.isnan(found).any() for found in it.run(config=config))
    slots, is_alone = np.arange(256), heads == (2, 2)
    # With several heads, the last slot is outside of the sample, which ends with slot 127; the first is in
    # it.
    for slot, in_sample in ((end - 1, is_alone), (begin, True)):
        it.index = broken(slot)
        scores, lse = it.run(config=config)
        wrong = np.zeros(scores.shape, bool)
        wrong[1, 1] = slots == slot if is_alone or not in_sample else (slots >= begin) & (slots < end)
        np.testing.assert_array_equal(np.isnan(scores), wrong)
        wrong = np.zeros((4, 2, heads[0] // 2), bool)
        wrong[1, 1] = in_sample
        np.testing.assert_array_equal(np.isnan(lse), wrong.reshape(lse.shape))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.matrix
def test_slots_that_are_none_count_for_nothing(interpreted, heads):
    it = Case((32, 4), heads, S=256)
    it.begin, it.end = np.array([-300, -5, 200, 256]), np.array([140, -1, 900, 300])
    it.check(config=ScanConfig(128, splits=2))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.full
def test_blocks_of_several_tokens_a_thread(interpreted, heads):
    # Some blocks are whole, and spans begin or end within others.
    it = Case((32, 4), heads, S=2048)
    it.begin, it.end = np.array([0, 700, 511, 1024]), np.array([2048, 1900, 513, 1536])
    it.check(config=ScanConfig(512, splits=2))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(("page", "block"), [(128, 128), (512, 256)])
@pytest.mark.matrix
def test_pages_are_read_as_rows(interpreted, heads, page, block):
    Case((32, 4), heads, S=1024).check_pages(page, ScanConfig(block, splits=2))


@pytest.mark.full
def test_a_negative_scale(interpreted, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", -SCALE)
    Case((32, 4), (4, 2), S=256).check(config=ScanConfig(128, splits=2))


def test_queries_of_zeros_find_all_tokens_alike(interpreted):
    it = Case((32, 4), (2, 2), S=256)
    it.q = jnp.zeros_like(it.q)
    scores, lse = it.run(config=ScanConfig(128, splits=2))
    assert (scores[0] == 0).all()
    np.testing.assert_allclose(lse[0], np.log(256), rtol=1e-6)


def test_queries_are_rounded_to_the_nearest_integers():
    q = np.array(jnp.asarray(np.random.default_rng(0).normal(size=(50, 64)), jnp.bfloat16), np.float32)
    q[1] = 0
    whole, unit = (np.asarray(x, np.float64) for x in _rounded(jnp.asarray(q, jnp.bfloat16), -0.5))
    assert (np.abs(whole).max(-1) == np.where(np.arange(50) == 1, 0, LARGEST)).all()
    assert (np.abs(whole * unit[:, None] + q / 2) <= 0.50001 * unit[:, None]).all()


@pytest.mark.parametrize("kind", [(32, 4), (64, 4)])
@pytest.mark.matrix
def test_rounding_queries_costs_a_hundredth_of_the_scores(kind):
    # A coordinate's error is a scale/√12, and the scale is a 127th of the largest coordinate. In a Gaussian
    # head of 32 to 64 coordinates, the largest is 2.1 to 2.4 deviations. The error of scores is then 0.005
    # to 0.006 of their deviation.
    it = Case(kind, (16, 16), S=2048)
    (rounded, _), (exact, _) = it.truth(), it.truth(as_integers=False)
    error = (rounded[0] - exact[0]).std(-1) / exact[0].std(-1)
    assert 0.003 < error.mean() < 0.007
    assert error.max() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_all_tokens_on_the_device(kind, heads):
    Case(kind, heads, S=4096).check()


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("splits", [1, 3, 40])
def test_configs_on_the_device(block, splits):
    for heads in HEADS[:2]:
        Case((32, 4), heads, S=4096).check(config=ScanConfig(block, splits))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(32, 4), (64, 2), (64, 8)])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("page", [256, 1024])
@pytest.mark.parametrize("config", [ScanConfig(128, splits=3), ScanConfig(256)])
def test_pages_equal_rows_bit_by_bit_on_the_device(kind, groups, page, config):
    Case(kind, (2 * groups, 2), S=4096).check_pages(page, config)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [128, 512])
@pytest.mark.parametrize("heads", HEADS)
def test_scores_all_tokens_in_pages_on_the_device(page, heads):
    Case((32, 4), heads, S=4096).check(page=page)


def test_a_sample_chooses_what_all_slots_do():
    # At least 120 of 128 tokens agree, where no token has more than a tenth of the probability.
    it = Case((32, 4), (8, 2), S=8192)
    (sampled, _), (exact, _) = it.truth(), it.truth(every=1)
    assert 0.01 < np.exp(exact[0, 0].max()) < 0.1

    def best(x):
        return set(np.argsort(x[0, 0])[-128:])

    assert len(best(sampled) & best(exact)) >= 120


@pytest.mark.gpu
def test_sums_do_not_drift_over_many_steps_on_the_device():
    # All tokens are alike, so all steps have the same rounding error.
    it = Case((32, 4), (8, 8), S=65536, length=3.0)

    def first(x):
        return jnp.broadcast_to(x[:, :, :1], x.shape)

    it.index = replace(it.index, levels=first(it.index.levels), reach=first(it.index.reach))
    it.check(config=ScanConfig(128, splits=1))


@pytest.mark.gpu
def test_one_coordinate_of_one_word_is_found_on_the_device():
    # Each coordinate alone has a value of its own, which shows the order of coordinates.
    for C, bits in KINDS:
        it = Case((C, bits), (C, C), S=4096)
        it.q = jnp.broadcast_to(jnp.eye(C) * jnp.arange(1, C + 1), it.q.shape).astype(jnp.bfloat16)
        it.check()


@pytest.mark.gpu
def test_a_score_that_is_off_by_a_thousandth_is_found():
    it = Case((32, 4), (8, 2), S=4096)
    it.check()
    true_scores, true_lse = it.truth()
    true_scores[0, 1, 77] *= 1.001
    it.truth = lambda: (true_scores, true_lse)
    with pytest.raises(AssertionError):
        it.check()
