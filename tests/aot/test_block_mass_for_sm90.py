"""Compilation of the block-mass kernel for an H200, which must not write its scores."""

import jax
import jax.numpy as jnp
import pytest
from abstract_gpu import on_abstract_h200
from compiled import device

from kernels_pallas import block_mass
from kernels_pallas.select.block_mass import PROGRAMS, ROWS

B, K, S = 1, 8, 32_768


@pytest.mark.aot
@pytest.mark.parametrize(("m", "R"), [(8, 32), (32, 32), (64, 64)])
def test_keeps_its_scores_to_itself(m, R):
    sharding = jax.sharding.SingleDeviceSharding(device())

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    nq = S // 128
    given = shape(B, K, nq, m, R), shape(B, nq, m, dtype=jnp.int32), shape(B, K, S, R)
    with on_abstract_h200():
        traced = jax.jit(lambda *given: block_mass(*given, scale=0.1)).trace(*given)
        memory = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    mass, logs = B * K * nq * (S // 128) * 4, PROGRAMS * ROWS * (S // 128) * 4
    assert memory.output_size_in_bytes <= mass + 64
    assert memory.temp_size_in_bytes <= logs + 1.1 * mass
    assert memory.temp_size_in_bytes < 0.02 * B * K * nq * m * S * 4
