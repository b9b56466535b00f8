"""ptxas reports of the kernels that choose tokens: scores by an index, and the largest of them."""

import jax
import jax.numpy as jnp
import pytest
from compiled import assert_no_spills, compiled

from kernels_pallas import Plane, index_scores, largest

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("optimised")]
B, K, S = 16, 8, 32768


def shape(*dims: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


ROW = shape(B, dtype=jnp.int32)


@pytest.mark.parametrize(("C", "bits"), [(32, 4), (64, 4), (64, 2), (32, 8)])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_scores_by_an_index(C, bits, groups):
    index = (shape(B, K, S, C * bits // 8, dtype=jnp.uint8), shape(B, K, S, dtype=jnp.uint8))

    def scan(q, index, begin, end):
        return index_scores(q, Plane(*index, bits), begin, end, scale=0.1)

    kernels = compiled(scan, shape(B, groups * K, C, dtype=jnp.bfloat16), index, ROW, ROW)
    # Heads that share a choice first need their denominators, from a sample of one token per thread.
    assert len(kernels) == (1 if groups == 1 else 2)
    assert_no_spills(kernels)
    for kernel in kernels:
        (loop,) = kernel.code.loops_with("IDP")
        # The products of four coordinates each show how many tokens a thread has.
        tokens = loop.count("IDP") / (groups * C / 4)
        if (C, bits) == (32, 4) and tokens > 1:
            assert len(loop.instructions) <= tokens * (36 + 17 * groups)
        assert loop.count("BAR", "SYNCS") == 0


@pytest.mark.parametrize(("C", "bits"), [(32, 4), (64, 2)])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("page", [256, 1024])
def test_scores_by_an_index_in_pages(C, bits, groups, page):
    index = (shape(999, K, page, C * bits // 8, dtype=jnp.uint8), shape(999, K, page, dtype=jnp.uint8))

    def scan(q, index, begin, end, table):
        return index_scores(q, Plane(*index, bits), begin, end, scale=0.1, block_table=table)

    table = shape(B, S // page, dtype=jnp.int32)
    kernels = compiled(scan, shape(B, groups * K, C, dtype=jnp.bfloat16), index, ROW, ROW, table)
    assert_no_spills(kernels)
    for kernel in kernels:
        (loop,) = kernel.code.loops_with("IDP")
        assert loop.count("BAR", "SYNCS") == 0


@pytest.mark.parametrize(
    ("rows", "S", "k", "ctas"),
    [
        (64, 32768, 1024, [4]),
        (64, 32768, 4096, [2]),
        (16, 32768, 1024, [1]),
        (1, 131072, 1024, [1, 1]),
        (1, 131072, 4096, [1, 1]),
    ],
)
def test_the_largest_of_a_row(rows, S, k, ctas):
    row = shape(rows, dtype=jnp.int32)
    scores = shape(rows, K, S, dtype=jnp.float32)
    kernels = compiled(lambda x, begin, end: largest(x, begin, end, k=k), scores, row, row)
    assert_no_spills(kernels)
    # Few long rows are split over several CTAs; a second launch then chooses.
    assert len(kernels) == len(ctas)
    assert all(kernel.ctas >= least for kernel, least in zip(kernels, ctas, strict=True))
