"""Cases of the benchmark of token attention lower for CUDA."""

import jax
import pytest
from abstract_gpu import on_abstract_h200

from benchmarks.kernels import bench_token_attention as bench


@pytest.mark.parametrize("form", bench.FORMS)
def test_cases_lower(form):
    attend, args = bench.build_case(bench.Case(form, bench.QWEN, 2, 700))
    with on_abstract_h200():
        lowered = jax.jit(attend).trace(*args).lower(lowering_platforms=("cuda",))
    o, lse = lowered.out_info
    assert (o.shape, lse.shape) == ((2, 12, 128), (2, 12))
    text = lowered.as_text()
    assert all(name in text for name in bench.KERNELS.values())
