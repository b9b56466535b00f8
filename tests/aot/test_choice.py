"""What ptxas makes of the kernels that choose tokens: scores by an index, and the largest of them."""

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
    scan = lambda q, index, begin, end: index_scores(q, Plane(*index, bits), begin, end, scale=0.1)
    kernels = compiled(scan, shape(B, groups * K, C, dtype=jnp.bfloat16), index, ROW, ROW)
    # Heads that share a choice need their denominators first: the index is read twice.
    assert len(kernels) == (1 if groups == 1 else 2)
    assert_no_spills(kernels)
    assert all(kernel.code.count("IDP", "IDP4A") for kernel in kernels)


@pytest.mark.parametrize(("k", "ctas"), [(1024, 4), (4096, 3)])
def test_the_largest_of_a_row(k, ctas):
    (kernel,) = compiled(
        lambda x, begin, end: largest(x, begin, end, k=k), shape(B, K, S, dtype=jnp.float32), ROW, ROW
    )
    assert_no_spills([kernel])
    assert kernel.ctas >= ctas
