"""Compilation of the kernel that quantizes new tokens for an H200, which must write in place."""

import jax
import jax.numpy as jnp
import pytest
from abstract_gpu import on_abstract_h200
from compiled import device

from kernels_pallas import Plane, encode

BITS = (4, 4, 4)


@pytest.mark.aot
@pytest.mark.parametrize(("B", "T"), [(8, 1), (1, 1024)])
@pytest.mark.parametrize("page", [0, 256])
def test_writes_in_place(B, T, page):
    # Outputs alias inputs, except the pointers of a tuple.
    K, S, sharding = 8, 4096, jax.sharding.SingleDeviceSharding(device())

    def shape(*dims, dtype=jnp.uint8):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    tokens = (99, K, page) if page else (B, K, S)
    arrays = [(shape(*tokens, P), shape(*tokens)) for P in (16, 48, 64)]
    table = shape(B, S // page, dtype=jnp.int32) if page else None
    x, row = shape(B, T, K, 128, dtype=jnp.bfloat16), shape(B, dtype=jnp.int32)

    def put(arrays, k, v, starts, ends, table):
        index, rest, values = (Plane(*pair, bits) for pair, bits in zip(arrays, BITS, strict=True))
        found = encode([k, v], [[index, rest], [values]], starts, ends, block_table=table)
        return [(plane.levels, plane.reach) for each in found for plane in each]

    with on_abstract_h200():
        traced = jax.jit(put, donate_argnums=0).trace(arrays, x, x, row, row, table)
        memory = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 8 * len(arrays) * 2
    assert memory.temp_size_in_bytes <= 1024
