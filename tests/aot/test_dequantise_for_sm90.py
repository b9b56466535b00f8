"""Compilation of the dequantization kernel for an H200 without any other computation."""

import jax
import jax.numpy as jnp
import pytest
from abstract_gpu import on_abstract_h200
from compiled import device

from kernels_pallas import BlockMeans, Plane, dequantise

B, K, S = 2, 8, 5120


@pytest.mark.aot
@pytest.mark.parametrize("bits", [(4, 4, 4), (6, 3, 5), (8, 2, 8)])
@pytest.mark.parametrize("page", [0, 40, 256])
@pytest.mark.parametrize("shifted", [False, True])
def test_writes_numbers_alone(bits, page, shifted):
    # The output also holds the pointers of a tuple.
    sharding = jax.sharding.SingleDeviceSharding(device())

    def shape(*dims, dtype=jnp.uint8):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    tokens = (999, K, page) if page else (B, K, S)
    arrays = [(shape(*tokens, C * b // 8), shape(*tokens)) for C, b in zip((32, 96, 128), bits, strict=True)]
    table = shape(B, S // page, dtype=jnp.int32) if page else None

    row = shape(B, dtype=jnp.int32)
    means = BlockMeans(shape(K, S // 64, 128, dtype=jnp.float32), row) if shifted else None

    def read(arrays, ends, table, means):
        index, rest, values = (Plane(*pair, b) for pair, b in zip(arrays, bits, strict=True))
        return dequantise([[index, rest], [values]], ends, block_table=table, means=means)

    with on_abstract_h200():
        traced = jax.jit(read).trace(arrays, row, table, means)
        memory = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory.output_size_in_bytes <= 2 * 2 * B * K * S * 128 + 64
    assert memory.temp_size_in_bytes <= 1024
