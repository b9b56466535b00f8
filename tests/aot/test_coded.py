"""ptxas reports of the kernel that reads quantized keys and values. Needs the extra `aot`, but no GPU."""

import jax
import jax.numpy as jnp
import pytest
from compiled import Kernel, assert_no_spills, compiled
from merged_parts import coded_attention

from kernels_pallas import CodedConfig, CodedPass, Plane, coded_parts
from kernels_pallas.quantized.warp_layout import EACH, Form

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("optimised")]
B, K, S, CHOSEN = 4, 8, 4096, 1024
WIDE = ((256, 4),), (256, 2)
PLANES = [
    # Coordinates and bits of keys, then of values; least number of CTAs on a multiprocessor.
    pytest.param(((128, 4),), (128, 4), 4, id="whole"),
    pytest.param(((32, 4), (96, 4)), (128, 4), 4, id="index and rest"),
    pytest.param(((64, 4), (64, 2)), (128, 2), 4, id="fewer bits"),
    pytest.param(((128, 8),), (128, 8), 2, id="8 bits"),
    pytest.param(((32, 6), (96, 3)), (128, 3), 4, id="bit planes"),
    pytest.param(((16, 6), (48, 3)), (64, 5), 4, id="shares of half a byte"),
]
"""Planes of keys and values. With fewer CTAs, fewer bytes are in flight."""


def shape(*dims: int, dtype=jnp.uint8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def coded(keys, values, groups: int = 4, chosen: int = 0, page: int = 0) -> Kernel:
    """Compile decoding with `groups` query heads per KV head.

    The kernel reads `chosen` slots, or all if that is 0, from rows, or from pages if `page` is not 0.
    """
    kinds = (*keys, values)

    def attend(q, arrays, begin, end, slots, table):
        planes = [Plane(*pair, bits) for pair, (_, bits) in zip(arrays, kinds, strict=True)]
        options = {"slots": slots, "block_table": table, "config": CodedConfig(splits=4)}
        return coded_attention(q, planes[:-1], planes[-1], begin, end, scale=0.1, **options)

    tokens = (99, K, page) if page else (B, K, S)
    arrays = [(shape(*tokens, C * bits // 8), shape(*tokens)) for C, bits in kinds]
    q = shape(B, groups * K, sum(C for C, _ in keys), dtype=jnp.bfloat16)
    row = shape(B, dtype=jnp.int32)
    slots = shape(B, K, chosen, dtype=jnp.int32) if chosen else None
    table = shape(B, S // page, dtype=jnp.int32) if page else None
    (kernel,) = compiled(attend, q, arrays, row, row, slots, table)
    return kernel


@pytest.mark.parametrize(("keys", "values", "ctas"), PLANES)
def test_whole_store(keys, values, ctas):
    kernel = coded(keys, values)
    assert_no_spills([kernel])
    assert kernel.ctas >= ctas
    (loop,) = kernel.code.loops_with("IMMA")
    form = Form(4, tuple(C for C, _ in (*keys, values)), tuple(bits for _, bits in (*keys, values)), 0.1)
    assert loop.count("IMMA") == form.steps * EACH // 2 + values[0] // 16
    assert loop.in_order("SYNCS.PHASECHK", "IMMA")
    assert loop.count("UTMALDG") > 0, "the next keys are asked for"
    assert loop.count("LDG", "LD") == 0


@pytest.mark.parametrize(("keys", "values", "ctas"), PLANES)
def test_chosen_slots(keys, values, ctas):
    kernel = coded(keys, values, chosen=CHOSEN)
    assert_no_spills([kernel])
    assert kernel.ctas >= min(ctas, 3)
    (loop,) = kernel.code.loops_with("IMMA")
    assert loop.in_order("LDG", "IMMA"), "rows are loaded into registers"
    assert loop.count("UTMALDG") == 0


@pytest.mark.parametrize(("keys", "values", "ctas"), PLANES)
def test_pages(keys, values, ctas):
    kernel = coded(keys, values, page=256)
    assert_no_spills([kernel])
    assert kernel.ctas >= ctas
    (loop,) = kernel.code.loops_with("IMMA")
    assert loop.count("UTMALDG") == 2 * len((*keys, values)), "levels and scales are asked for once"
    assert loop.count("LDG", "LD") == 1, "the page of each step is looked up once"


def test_pages_without_whole_steps():
    kernel = coded(((32, 5), (96, 3)), (128, 3), page=64)
    assert_no_spills([kernel])
    (loop,) = kernel.code.loops_with("IMMA")
    assert loop.count("UTMALDG") == 4 * 3
    assert loop.count("LDG", "LD") == 2, "the page of each block is looked up once"


@pytest.mark.parametrize(("keys", "values", "ctas"), PLANES[1:3])
def test_chosen_slots_in_pages(keys, values, ctas):
    kernel, of_rows = coded(keys, values, chosen=CHOSEN, page=256), coded(keys, values, chosen=CHOSEN)
    assert_no_spills([kernel])
    assert kernel.ctas >= min(ctas, 3)
    (paged,), (whole,) = (it.code.loops_with("IMMA") for it in (kernel, of_rows))
    assert paged.count("LDG", "LD") == whole.count("LDG", "LD"), "pages were looked up before"


NEAR, RING = 136, (4, 128)
"""Slots of a ring, and its sinks and window."""


@pytest.mark.parametrize(("keys", "values", "ctas"), PLANES)
def test_near_and_far_tokens_in_one_launch(keys, values, ctas):
    assert_fits(keys, values, ctas)


@pytest.mark.parametrize(
    ("keys", "values"), [(((32, 4), (96, 4)), (128, 4)), (((32, 5), (96, 3)), (128, 3))], ids=["4", "3bit"]
)
def test_near_tokens_and_far_ones_in_pages_in_one_launch(keys, values):
    assert_fits(keys, values, ctas=4, page=256)


def assert_fits(keys, values, ctas, page=0, columns=4):
    """Assert that a launch over near and far tokens has as many CTAs as one over far tokens."""
    # The ring has 8 bits; scores of both gain something.
    H = sum(C for C, _ in keys)
    kinds = [((H, 8), (values[0], 8)), (*keys, values)]
    tokens = [(B, K, NEAR), (99, K, page) if page else (B, K, S)]
    arrays = [
        [(shape(*each, C * bits // 8), shape(*each)) for C, bits in kind]
        for each, kind in zip(tokens, kinds, strict=True)
    ]
    table = shape(B, S // page, dtype=jnp.int32) if page else None
    row = shape(B, dtype=jnp.int32)

    def attend(q, gains, arrays, row, table):
        near, far = (
            [Plane(*pair, bits) for pair, (_, bits) in zip(each, kind, strict=True)]
            for each, kind in zip(arrays, kinds, strict=True)
        )
        passes = [
            CodedPass(q, far[:-1], far[-1], row, row, None, table, gains),
            CodedPass(q, near[:1], near[1], row, row, None, None, gains, ring=RING),
        ]
        return [(parts.o, parts.lse) for parts in coded_parts(passes, scale=0.1)]

    q = shape(B, K, columns, H, dtype=jnp.bfloat16)
    gains = shape(B, K, S // 64, columns, dtype=jnp.float32)
    (kernel,) = compiled(attend, q, gains, arrays, row, table)
    assert_no_spills([kernel])
    # The buffers of one pass lie where those of the other do.
    assert kernel.ctas >= ctas


@pytest.mark.parametrize(("columns", "ctas"), [(8, 3), (16, 2)])
def test_near_and_far_tokens_of_more_query_heads(columns, ctas):
    assert_fits(((32, 5), (96, 3)), (128, 3), ctas, page=256, columns=columns)


@pytest.mark.parametrize("groups", [1, 16])
def test_groups(groups):
    assert_no_spills([coded(((128, 4),), (128, 4), groups=groups)])


@pytest.mark.parametrize("chosen", [0, CHOSEN])
def test_wide_heads(chosen):
    assert_no_spills([coded(*WIDE, chosen=chosen)])
