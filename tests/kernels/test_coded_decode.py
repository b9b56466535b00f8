"""Kernel that attends to quantized keys and values: lowering for CUDA, refusals, and results.

On a CPU, JAX's interpreter of GPU kernels runs it and looks for races of copies. Plain jax.numpy replaces the
instructions on registers one by one, in all threads at once. On a GPU, all of the kernel runs.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_case import SCALE, Case, coded, interpreted_with_registers, planes_like, shape
from merged_parts import coded_attention

from kernels_pallas import (
    CodedConfig,
    CodedPass,
    Plane,
    arrange_gains,
    coded_parts,
    coded_refusal,
)
from kernels_pallas.common import SHARED_MEMORY
from kernels_pallas.quantized.inputs import config_for, default_config, shared_bytes
from kernels_pallas.quantized.queries import arrange_queries
from kernels_pallas.quantized.short_scales import NAN_CODE

SHAPES = [
    # Coordinates and bits of the planes of keys, of values; query and KV heads.
    (((128, 4),), (128, 4), (4, 4)),
    (((32, 4), (96, 4)), (64, 4), (6, 2)),
    (((64, 2),), (64, 8), (8, 1)),
    (((16, 8), (64, 2)), (64, 2), (16, 1)),
    (((256, 4),), (256, 2), (12, 4)),
    (((32, 6), (96, 3)), (128, 3), (8, 2)),
    (((32, 5), (96, 2)), (128, 3), (8, 2)),
    (((16, 6), (48, 3)), (64, 5), (6, 2)),
    (((16, 2),), (64, 6), (4, 4)),
]


def lower(keys, values, N, K, S, n=0, page=0, **options):
    """Lower for CUDA on any machine.

    n: slots of a list.
    page: slots of a page.
    """
    kinds = (*keys, values)

    def attend(q, arrays, begin, end, more):
        planes = [Plane(*pair, bits) for pair, (_, bits) in zip(arrays, kinds, strict=True)]
        return coded_attention(q, planes[:-1], planes[-1], begin, end, scale=1.0, **more, **options)

    tokens = (9, K, page) if page else (2, K, S)
    arrays = [(plane.levels, plane.reach) for plane in planes_like(kinds, *tokens)]
    q, row = shape(2, N, sum(C for C, _ in keys), dtype=jnp.bfloat16), shape(2, dtype=jnp.int32)
    more = {"slots": shape(2, K, n, dtype=jnp.int32)} if n else {}
    more |= {"block_table": shape(2, S // page, dtype=jnp.int32)} if page else {}
    return jax.jit(attend).trace(q, arrays, row, row, more).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.matrix
def test_lowers(keys, values, heads):
    o, lse = lower(keys, values, *heads, 640).out_info
    assert (o.shape, lse.shape) == ((2, heads[0], values[0]), (2, heads[0]))


@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.parametrize("n", [64, 1000])
@pytest.mark.matrix("64-keys0-values0-heads0", "64-keys7-values7-heads7")
def test_lowers_with_slots(keys, values, heads, n):
    lower(keys, values, *heads, 640, n=n)


@pytest.mark.parametrize(("page", "n"), [(64, 0), (320, 0), (64, 1000), (40, 1000)])
@pytest.mark.full
def test_lowers_with_pages(page, n):
    o, lse = lower(*SHAPES[1][:2], 6, 2, 640, n=n, page=page).out_info
    assert (o.shape, lse.shape) == ((2, 6, 64), (2, 6))


@pytest.mark.parametrize("config", [CodedConfig(stages=1, splits=1), CodedConfig(stages=5, splits=7)])
@pytest.mark.matrix
def test_lowers_with_a_config(config):
    lower(((128, 4),), (128, 4), 8, 2, 640, config=config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float16}, "q has dtype float16: must be bfloat16"),
        ({"keys": ((128, 4),) * 3}, "keys has 3 planes: must be 1 or 2"),
        ({"keys": ((128, 7),)}, r"keys\[0\].bits=7: must be one of"),
        ({"keys": ((40, 2),)}, r"keys\[0\] has 40 coordinates: must be a multiple of 16 up to 256"),
        ({"keys": ((272, 2),)}, r"keys\[0\] has 272 coordinates: must be a multiple of 16 up to 256"),
        ({"values": (96, 4)}, "values has 96 coordinates: must be a multiple of 64"),
        ({"S": 100}, "S=100 slots: must be a multiple of 64"),
        ({"N": 40, "K": 2}, "q has 20 heads per KV head: must be at most 16"),
        ({"N": 3, "K": 2}, "q has 3 heads: must be a multiple of the 2"),
        ({"N": 32768, "K": 32768}, "2 sequences of 32768 KV heads are 65536 caches: must be at most 65535"),
        ({"width": 64}, "q has shape"),
        ({"n": 10000}, "slots has 10000 per KV head: must be from 1 to 8192"),
        ({"table": (3, 4)}, r"block_table has shape \(3, 4\): must be \[B, pages\] = \(2, any\)"),
        ({"table": (2, 4), "integers": jnp.int16}, "block_table has dtype int16: must be int32"),
        ({"table": (2, 0)}, "block_table has 0 pages per sequence, the pool 2: must be at least 1"),
        ({"table": (2, 4), "S": 96}, "page size of 96 slots: must be a non-zero multiple of 64"),
        ({"table": (2, 4), "S": 0, "n": 64}, "page size of 0 slots: must be a non-zero multiple of 1"),
        ({"table": (2, 4), "S": 2**29, "n": 64}, "the pool has 2147483648 slots .* at most 2147483647"),
    ],
)
def test_refusals(change, message):
    it = {"dtype": jnp.bfloat16, "keys": ((128, 4),), "values": (64, 4), "S": 128, "N": 4, "K": 2} | change
    *keys, values = planes_like((*it["keys"], it["values"]), 2, it["K"], it["S"])
    width = it.get("width", sum(C for C, _ in it["keys"]))
    q, row = shape(2, it["N"], width, dtype=it["dtype"]), shape(2, dtype=jnp.int32)
    slots = shape(2, it["K"], it["n"], dtype=jnp.int32) if "n" in it else None
    table = shape(*it["table"], dtype=it.get("integers", jnp.int32)) if "table" in it else None
    reason = coded_refusal(CodedPass(q, keys, values, row, row, slots=slots, block_table=table))
    assert reason is not None
    assert re.search(message, reason), reason


@pytest.mark.parametrize(("page", "n"), [(64, 0), (128, 0), (64, 100), (29, 100)])
def test_pages_are_not_refused(page, n):
    *keys, values = planes_like(((32, 4), (96, 4), (64, 4)), 9, 2, page)
    q, row = shape(3, 4, 128, dtype=jnp.bfloat16), shape(3, dtype=jnp.int32)
    slots = shape(3, 2, n, dtype=jnp.int32) if n else None
    table = shape(3, 5, dtype=jnp.int32)
    assert coded_refusal(CodedPass(q, keys, values, row, row, slots=slots, block_table=table)) is None


def test_configs_that_cannot_be():
    with pytest.raises(ValueError, match="stages=0: must be at least 1"):
        CodedConfig(stages=0)


@pytest.fixture
def interpreted():
    with interpreted_with_registers():
        yield


@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.parametrize("S", [192, 256])
@pytest.mark.matrix
def test_is_attention(interpreted, keys, values, heads, S):
    # With 256 slots, all keys of a step are copied together.
    Case(keys, values, heads, S=S).check(config=CodedConfig(stages=2, splits=2))


@pytest.mark.parametrize("chosen", [0, 100])
def test_scores_have_gains(interpreted, chosen):
    it = Case(*SHAPES[1], S=384)
    if chosen:
        it.choose(chosen)
    it.gain()
    it.check(config=CodedConfig(stages=2, splits=2))


@pytest.mark.parametrize(("page", "chosen"), [(64, 0), (128, 0), (192, 0), (64, 100)])
@pytest.mark.full
def test_gains_are_by_position_in_pages(interpreted, page, chosen):
    it = Case(*SHAPES[1], S=384)
    it.begin, it.end = np.array([3, 70, 9]), np.array([300, 150, 9])
    if chosen:
        it.choose(chosen)
    it.gain()
    it.check_pages(page, config=CodedConfig(stages=2, splits=2))


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [0, 300])
@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
def test_scores_have_gains_on_the_device(keys, values, heads, chosen):
    it = Case(keys, values, heads, S=1024)
    it.end[:] = 1024, 700, 9
    if chosen:
        it.choose(chosen)
    it.gain()
    it.check()


@pytest.mark.full
@pytest.mark.parametrize("least", [1, 2])
def test_more_stages_and_parts_than_blocks(interpreted, least):
    Case(*SHAPES[1], S=448).check(config=CodedConfig(stages=4, splits=5, least=least))


@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.matrix
def test_is_attention_to_chosen_slots(interpreted, keys, values, heads):
    it = Case(keys, values, heads, S=192)
    it.choose(100)
    it.check(config=CodedConfig(splits=2))


def test_a_list_reads_a_store_of_any_size(interpreted):
    it = Case(((64, 8),), (64, 8), (4, 2), S=203)
    it.choose(120)
    it.check()


@pytest.mark.full
def test_slots_that_are_not_there_count_for_nothing(interpreted):
    it, config = Case(*SHAPES[1], S=192), CodedConfig(stages=2, splits=2)
    it.end[0] = 192
    expected = it.run(config=config)
    it.begin[0], it.end[0] = -70, 300
    for found, same in zip(it.run(config=config), expected, strict=True):
        np.testing.assert_array_equal(found, same)


@pytest.mark.full
def test_a_list_that_begins_with_what_does_not_count(interpreted):
    it = Case(*SHAPES[1], S=192)
    it.slots = np.broadcast_to(np.r_[np.full(70, 192), 0:60, 100:190], (3, 2, 220))
    it.check(config=CodedConfig(splits=1))


@pytest.mark.parametrize(("page", "splits"), [(64, 2), (128, 2), (192, 1)])
@pytest.mark.matrix
def test_pages_are_read_as_rows(interpreted, page, splits):
    it = Case(*SHAPES[1], S=384)
    it.begin, it.end = np.array([3, 70, 9]), np.array([300, 150, 9])
    it.check_pages(page, config=CodedConfig(stages=2, splits=splits))


@pytest.mark.parametrize("page", [64, 29])
@pytest.mark.full
def test_a_list_is_of_slots_in_pages(interpreted, page):
    # Slots are in pages of their own row, in other pages, and in none.
    it = Case(*SHAPES[1], S=6 * page)
    it.begin, it.end = np.array([3, page - 5, 9]), np.array([5 * page - 4, 2 * page + 7, 9])
    it.choose(120)
    it.check_pages(page, config=CodedConfig(splits=2))


@pytest.mark.full
def test_a_later_key_far_more_likely_than_the_first_block(interpreted):
    # Relative to earlier keys, the key's weight e^1000 exceeds float32.
    it = Case(((64, 4),), (64, 4), (2, 1), S=192, length=8.0)
    q, towards = np.asarray(it.q, np.float32)[0, 0], np.zeros((3, 1, 192, 64), np.float32)
    towards[0, 0, 170] = 1000 / SCALE * q / (q @ q)
    far = coded(towards, 4)
    at = (jnp.arange(192) == 170)[None, None, :]
    keys = it.keys[0]
    it.keys = [
        Plane(jnp.where(at[..., None], far.levels, keys.levels), jnp.where(at, far.reach, keys.reach), 4)
    ]
    assert it.truth()[1][0, 0] > 500
    it.check(config=CodedConfig(stages=2, splits=1))


@pytest.mark.full
def test_what_is_no_number_counts_where_it_is_seen(interpreted):
    it = Case(*SHAPES[0], S=192)
    config = CodedConfig(stages=2, splits=2)

    def broken(plane, slot):
        return replace(plane, reach=plane.reach.at[1, 2, slot].set(NAN_CODE))

    keys, values = it.keys[0], it.values
    it.keys, it.values = [broken(keys, 69)], broken(values, 150)
    o, lse = it.run(config=config)
    assert np.isfinite(o[:2]).all()
    assert np.isfinite(lse[:2]).all()
    it.keys = [broken(keys, 149)]
    o, lse = it.run(config=config)
    np.testing.assert_array_equal(np.isnan(o).all(-1), np.arange(3)[:, None] * 4 + np.arange(4) == 6)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(o).all(-1))


@pytest.mark.full
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_query_that_is_not_finite_makes_its_head_nan(interpreted, number):
    it = Case(*SHAPES[1], S=192)
    it.q = it.q.at[0, 4, 50].set(number)
    o, lse = it.run(config=CodedConfig(splits=2))
    heads = np.arange(6) == 4
    np.testing.assert_array_equal(np.isnan(o[0]).all(-1), heads)
    np.testing.assert_array_equal(np.isnan(lse[0]), heads)
    assert not np.isnan(o[1:]).any()


@pytest.mark.full
def test_scales_of_zero(interpreted):
    # A value is then zero, and a key nearly so.
    it = Case(*SHAPES[0], S=192)
    (keys,), values = it.keys, it.values
    it.keys = [replace(keys, reach=keys.reach.at[:, :, 60:90].set(0))]
    it.values = replace(values, reach=values.reach.at[:, :, 80:120].set(0))
    it.check(config=CodedConfig(splits=1))


CONFIGS = CodedConfig(stages=2, splits=2), CodedConfig(stages=1, splits=3)


def check_passes(it, chosen, configs=CONFIGS):
    """Assert that a store and a list of its slots in one launch are those of two, bit by bit.

    Queries and gains of the launch are arranged before.
    """
    passes, apart = [], []
    for n, config in zip((0, chosen), configs, strict=True):
        it.slots = None
        if n:
            it.choose(n)
        it.gain()
        K, q, gains = it.values.reach.shape[1], it.q, jnp.asarray(it.gains)
        given = [it.keys, it.values, jnp.asarray(it.begin), jnp.asarray(it.end)]
        slots = None if it.slots is None else jnp.asarray(it.slots)
        plain = CodedPass(q, *given, slots, gains=gains, config=config)
        passes.append(
            replace(plain, q=arrange_queries(q, K), gains=arrange_gains(gains, K)),
        )
        apart += coded_parts([plain], scale=SCALE)
    for one, other in zip(coded_parts(passes, scale=SCALE), apart, strict=True):
        np.testing.assert_array_equal(one.lse, other.lse)
        has_keys = ~np.isneginf(one.lse[..., 0])  # Outputs of other parts have any values.
        np.testing.assert_array_equal(one.o[has_keys], other.o[has_keys])


@pytest.mark.parametrize(("keys", "values", "heads"), [SHAPES[1], SHAPES[3]])
@pytest.mark.full
def test_passes_in_one_launch_are_those_of_several(interpreted, keys, values, heads):
    check_passes(Case(keys, values, heads, S=192), 100)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.parametrize("configs", [CONFIGS, (None, None)])
def test_passes_in_one_launch_are_those_of_several_on_the_device(keys, values, heads, configs):
    check_passes(Case(keys, values, heads, S=4096), 300, configs)


def test_planes_that_fill_shared_memory_have_fewer_steps_in_flight():
    wide = (((256, 8), (256, 8)), (256, 8))
    o, _ = lower(*wide, 16, 2, 640).out_info
    assert o.shape == (2, 16, 256)
    *keys, values = planes_like((*wide[0], wide[1]), 2, 2, 640)
    q, row = shape(2, 16, 512, dtype=jnp.bfloat16), shape(2, dtype=jnp.int32)
    whole = CodedPass(q, keys, values, row, row)
    assert config_for(whole).stages == 1
    assert shared_bytes(whole, 1) < SHARED_MEMORY < shared_bytes(whole, 2)


def test_passes_of_other_batches_are_refused():
    one, other = (Case(*SHAPES[1], S=192) for _ in range(2))
    other.values = jax.tree.map(lambda x: x[:2], other.values)
    passes = [
        CodedPass(it.q, it.keys, it.values, *map(jnp.asarray, (it.begin, it.end))) for it in (one, other)
    ]
    with pytest.raises(ValueError, match=r"passes have .* \[\(2, 2\), \(3, 2\)\]: must be the same"):
        coded_parts(passes, scale=SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "values", "heads"), SHAPES)
@pytest.mark.parametrize("chosen", [0, 1000])
@pytest.mark.parametrize("config", [None, CodedConfig(stages=1, splits=3), CodedConfig(stages=5, splits=1)])
def test_is_attention_on_the_device(keys, values, heads, chosen, config):
    it = Case(keys, values, heads, S=4096)
    if chosen:
        it.choose(chosen)
    it.check(config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [203, 520])
def test_a_list_reads_a_store_of_any_size_on_the_device(S):
    it = Case(((64, 8),), (64, 8), (4, 2), S=S)
    it.choose(S)
    it.check()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("chosen", [0, 1000])
@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("config", [None, CodedConfig(stages=1, splits=3)])
def test_pages_equal_rows_bit_by_bit_on_the_device(bits, groups, chosen, page, config):
    it = Case(((32, bits), (96, bits)), (128, bits), (2 * groups, 2), S=4096)
    it.begin, it.end = np.array([4, 1000, 9]), np.array([4096 - 37, 2500, 9])
    if chosen:
        it.choose(chosen)
    it.check_pages(page, config=config)


@pytest.mark.gpu
def test_a_list_is_of_slots_in_pages_of_any_size_on_the_device():
    it = Case(((64, 8),), (64, 8), (4, 2), S=20 * 29)
    it.end[0] = 500
    it.choose(400)
    it.check_pages(29)


@pytest.mark.gpu
def test_one_head_that_is_off_by_a_hundredth_is_found():
    it = Case(*SHAPES[0], S=4096)
    it.check()
    true_o, true_lse = it.truth()
    true_o[:, 2] *= 1.01
    it.truth = lambda: (true_o, true_lse)
    with pytest.raises(AssertionError):
        it.check()


@pytest.mark.parametrize(
    ("rows", "S", "chosen", "parts", "least"),
    [
        (8, 131072, 0, 66, 1),  # Four CTAs for each of 132 multiprocessors.
        (8, 4096, 0, 16, 1),  # Parts of 256 keys.
        (64, 16384, 0, 8, 1),
        (128, 16384, 0, 8, 2),  # Sequences of unequal length end together.
        (256, 16384, 0, 6, 2),
        (512, 16384, 0, 4, 2),
        (512, 512, 0, 2, 2),
        (512, 128, 0, 1, 1),
        (128, 16384, 512, 4, 1),
        (512, 16384, 512, 1, 1),
    ],
)
def test_default_parts(rows, S, chosen, parts, least):
    config = default_config(rows, S, chosen)
    assert (config.splits, config.least) == (parts, least)
