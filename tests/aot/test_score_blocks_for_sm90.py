"""Compilation of the kernel that scores blocks for an H200 without any other computation."""

import jax
import jax.numpy as jnp
import pytest
from abstract_gpu import on_abstract_h200
from compiled import device

from kernels_pallas import score_blocks

N, K, H, BLOCKS = 12, 2, 128, 130


@pytest.mark.aot
@pytest.mark.parametrize("T", [1, 2048])
def test_writes_scores_alone(T):
    sharding = jax.sharding.SingleDeviceSharding(device())

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def score(*given):
        return score_blocks(*given, scale=0.1)

    queries = shape(1, T, N, H, dtype=jnp.bfloat16)
    given = queries, shape(K, H), shape(64, H), shape(BLOCKS, H), shape(1, dtype=jnp.int32)
    with on_abstract_h200():
        compiled = jax.jit(score).trace(*given).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes <= 4 * N * BLOCKS * T + 64
    halves = 2 * 2 * BLOCKS * H if T > 1 else 0  # Factors in two parts, which layers share.
    assert memory.temp_size_in_bytes <= halves + 2048
