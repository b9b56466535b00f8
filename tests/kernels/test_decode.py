"""Decode kernel: lowering for CUDA everywhere, refusals, and results on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import check, decode
from merged_parts import decode_attention

from kernels_pallas import DecodeConfig, Ring
from kernels_pallas.decode import attention as decode_kernel

BF16, F16 = jnp.bfloat16, jnp.float16
ONE_RANK = [(128, 128), (64, 96), (32, 64), (48, 80), (16, 16), (256, 256)]
TWO_RANKS = [(32, 64, 128), (16, 16, 64), (48, 80, 128), (128, 128, 256), (32, 64, 64), (64, 32, 64)]
LENGTHS = np.array([1, 3, 64, 65, 200, 261, 0, 1024])
HEADS = [(8, 8), (8, 2), (6, 2), (12, 12), (32, 8), (24, 2), (40, 1)]


def draw(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


def ring_shapes(rows, dtype=BF16):
    return Ring(*(shape(2, 2, rows, 32, dtype=dtype) for _ in range(2)))


TABLE = shape(2, 4, dtype=jnp.int32)


def lower(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("R", "Z"), ONE_RANK)
@pytest.mark.parametrize(("N", "K"), HEADS)
@pytest.mark.matrix
def test_lowers(R, Z, N, K):
    def f(q, k, v, n):
        return decode_attention(q, k, v, n, scale=1.0)

    args = shape(3, N, R), shape(3, K, 300, R), shape(3, K, 300, Z), shape(3, dtype=jnp.int32)
    o, lse = lower(f, *args).out_info
    assert (o.shape, lse.shape) == ((3, N, Z), (3, N))


@pytest.mark.parametrize(("R", "Z", "H"), TWO_RANKS)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.matrix
def test_lowers_with_two_ranks(R, Z, H, block):
    def f(q, k, v, n, ring):
        return decode_attention(
            q, k, v, n, scale=1.0, ring=ring, sinks=4, window=256, config=DecodeConfig(block=block, stages=1)
        )

    ring = Ring(shape(2, 4, 264, H - R), shape(2, 4, 264, H - Z))
    args = shape(2, 8, H), shape(2, 4, 512, R), shape(2, 4, 512, Z), shape(2, dtype=jnp.int32), ring
    assert lower(f, *args).out_info[0].shape == (2, 8, H)


@pytest.mark.parametrize(("H", "sinks"), [(64, 0), (128, 4), (256, 4)])
def test_lowers_near_keys_alone(H, sinks):
    def f(q, k, v, n, ring):
        return decode_attention(q, k, v, n, scale=1.0, ring=ring, sinks=sinks, window=256)

    ring = Ring(shape(2, 4, 264, H), shape(2, 4, 264, H))
    args = shape(2, 8, H), shape(2, 4, 9999, 0), shape(2, 4, 9999, 0), shape(2, dtype=jnp.int32), ring
    assert lower(f, *args).out_info[0].shape == (2, 8, H)


@pytest.mark.parametrize("page", [64, 128, 256])
def test_lowers_paged(page):
    def f(q, k, v, n, table):
        return decode_attention(q, k, v, n, scale=1.0, block_table=table)

    pool = [shape(20, 2, page, rank) for rank in (64, 96)]
    integers = [shape(4, dtype=jnp.int32), shape(4, 5, dtype=jnp.int32)]
    lower(f, shape(4, 8, 64), *pool, *integers)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": shape(2, 2, 64, 24), "q": shape(2, 4, 24)}, "R=24"),
        ({"v": shape(2, 2, 64, 8)}, "Z=8"),
        ({"q": shape(2, 4, 32, dtype=jnp.float32)}, "q has dtype float32"),
        ({"q": shape(2, 5, 32)}, "5 heads"),
        ({"q": shape(2, 128, 32)}, "64 heads per KV head"),
        ({"q": shape(2, 32768, 32), "k": shape(2, 32768, 64, 32), "v": shape(2, 32768, 64, 32)}, "65536"),
        ({"q": shape(2, 4, 64)}, "without a ring"),
        ({"window": 64}, "without a ring"),
        ({"ring": ring_shapes(72, F16), "q": shape(2, 4, 64), "window": 64}, "ring.k has dtype float16"),
        ({"ring": ring_shapes(72), "q": shape(2, 4, 64), "window": 65}, "window=65"),
        ({"ring": ring_shapes(64), "q": shape(2, 4, 64), "window": 64, "sinks": 4}, "ring has 64 rows"),
        ({"block_table": TABLE, "k": shape(9, 2, 80, 32), "v": shape(9, 2, 80, 32)}, "page size of 80"),
        ({"block_table": shape(3, 4, dtype=jnp.int32)}, "block_table has shape"),
        ({"k": shape(2, 2, 64, 0), "q": shape(2, 4, 0)}, "R=0"),
    ],
)  # fmt: skip
def test_refuses(change, message):
    given = {"q": shape(2, 4, 32), "k": shape(2, 2, 64, 32), "v": shape(2, 2, 64, 32),
             "lengths": shape(2, dtype=jnp.int32)} | change  # fmt: skip
    arrays = {name: x for name, x in given.items() if not isinstance(x, int)}
    options = {name: x for name, x in given.items() if isinstance(x, int)}
    with pytest.raises(ValueError, match=message):
        lower(lambda arrays: decode_attention(scale=1.0, **arrays, **options), arrays)


@pytest.mark.parametrize("options", [{"block": 32}, {"stages": 0}, {"splits": 0}, {"near_splits": 0}])
def test_config_refuses(options):
    with pytest.raises(ValueError, match="{}={}".format(*next(iter(options.items())))):
        DecodeConfig(**options)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("R", [64, 0])
@pytest.mark.parametrize("window", [0, 128])
def test_no_step_is_beyond_the_slots_of_a_row(window, R, near):
    # Nor is a step beyond the slots of a shorter row. With near keys alone, the ring supports any length.
    given = {"R": R, "window": window, "near_parts": int(window > 0), "S": 64, "slots": 320}
    g = decode_kernel._Geometry(**dict.fromkeys(decode_kernel._Geometry._fields, 0) | given)

    def steps(length):
        length = jnp.int32(length)
        count, step_at = decode_kernel._steps(g, 64, length, near and window > 0)
        return [[int(x) for x in step_at(jnp.int32(i)) if x is not None] for i in range(count)]

    assert steps(320)[-1][-1] <= 320
    assert (steps(400) == steps(320)) == (R > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("near", [{}, {"sinks": 4, "window": 128}])
def test_rows_of_more_tokens_than_slots_are_full_ones(near, paged):
    B, S, K = 2, 256, 2
    q, k, v = draw(0, B, 4, 64), draw(1, B, K, S, 32 if near else 64), draw(2, B, K, S, 32 if near else 64)
    ring = Ring(draw(3, B, K, 136, 32), draw(4, B, K, 136, 32)) if near else None
    if paged:
        k, v = (
            x.reshape(B, K, -1, 64, x.shape[-1]).swapaxes(1, 2).reshape(-1, K, 64, x.shape[-1])
            for x in (k, v)
        )
    table = {"block_table": jnp.arange(B * S // 64, dtype=jnp.int32).reshape(B, -1)} if paged else {}

    def run(*lengths):
        return decode_attention(q, k, v, jnp.array(lengths), scale=0.1, ring=ring, **near, **table)

    for found, expected in zip(run(S + 70, 99), run(S, 99), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "Z"), ONE_RANK)
@pytest.mark.parametrize(("N", "K"), HEADS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_one_rank(R, Z, N, K, dtype):
    B, S = len(LENGTHS), 1024
    q, k, v = (
        draw(0, B, N, R, dtype=dtype),
        draw(1, B, K, S, R, dtype=dtype),
        draw(2, B, K, S, Z, dtype=dtype),
    )
    options = {"scale": R**-0.5}
    f = jax.jit(lambda q, k, v, n: decode_attention(q, k, v, n, **options))
    check(*f(q, k, v, jnp.asarray(LENGTHS)), *decode(q, k, v, LENGTHS, **options), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "Z", "H"), TWO_RANKS)
@pytest.mark.parametrize(("N", "K"), HEADS)
@pytest.mark.parametrize(("sinks", "config"), [
    (0, None), (4, None), (64, DecodeConfig(splits=1)),
    (4, DecodeConfig(block=128, stages=1, splits=2, near_splits=2)),
])  # fmt: skip
def test_two_ranks(R, Z, H, N, K, sinks, config):
    B, S, window = len(LENGTHS), 1024, 256
    q, k, v = draw(0, B, N, H), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    ring = Ring(*(draw(3 + i, B, K, window + 64, H - rank) for i, rank in enumerate((R, Z))))
    options = {"scale": H**-0.5, "sinks": sinks, "window": window}
    o = decode_attention(q, k, v, jnp.asarray(LENGTHS), ring=ring, config=config, **options)
    check(*o, *decode(q, k, v, LENGTHS, ring=ring, **options), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(("N", "K"), HEADS)
@pytest.mark.parametrize(("sinks", "config"), [
    (0, None), (4, None), (64, DecodeConfig(near_splits=1)),
    (4, DecodeConfig(block=128, stages=1, near_splits=2)),
])  # fmt: skip
def test_near_keys_alone(H, N, K, sinks, config):
    B, S, window = len(LENGTHS), 1024, 256
    q, k, v = draw(0, B, N, H), draw(1, B, K, S, 0), draw(2, B, K, S, 0)
    ring = Ring(draw(3, B, K, window + 64, H), draw(4, B, K, window + 64, H))
    options = {"scale": H**-0.5, "sinks": sinks, "window": window}
    o = decode_attention(q, k, v, jnp.asarray(LENGTHS), ring=ring, config=config, **options)
    check(*o, *decode(q, k, v, LENGTHS, ring=ring, **options), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [64, 128, 256])
def test_paged_equals_contiguous_bit_by_bit(page):
    B, S, N, K, H, window = len(LENGTHS), 1024, 8, 2, 128, 256
    q, k, v = draw(0, B, N, H), draw(1, B, K, S, 32), draw(2, B, K, S, 64)
    ring = Ring(draw(3, B, K, window + 8, 96), draw(4, B, K, window + 8, 64))
    order = np.random.default_rng(0).permutation(B * S // page)
    table = jnp.asarray(np.argsort(order).reshape(B, -1), jnp.int32)

    def cut(x):
        return x.reshape(B, K, S // page, page, -1).swapaxes(1, 2).reshape(B * S // page, K, page, -1)[order]

    def f(k, v, **paged):
        return decode_attention(
            q, k, v, jnp.asarray(LENGTHS), scale=0.1, ring=ring, sinks=4, window=window, **paged
        )

    whole, paged = f(k, v)[0], f(cut(k), cut(v), block_table=table)[0]
    assert np.array_equal(np.asarray(whole).view(np.uint16), np.asarray(paged).view(np.uint16))
