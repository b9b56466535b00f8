"""Kernel that dequantizes, compared with the quantizer; on a CPU, Pallas' interpreter runs it."""

import re

import compiled_codes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import Pool

from kernels_pallas import BlockMeans, Plane, dequantise, dequantise_refusal
from kernels_pallas.common import GAIN_BLOCK
from kernels_pallas.prefill.inputs import LARGEST_BLOCK
from kernels_pallas.quantized.dequantise import TOKENS
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

B, K, S = 5, 2, 640
KINDS = {
    # Coordinates and bits of planes, array by array.
    "4 bits": [[(128, 4)], [(128, 4)]],
    "index": [[(32, 6), (96, 3)], [(128, 4)]],
    "2 and 8 bits": [[(16, 8), (64, 2)], [(64, 2)]],
    "shares of half a byte": [[(16, 5), (48, 3)], [(240, 5)]],
    "widest": [[(256, 4)], [(256, 8)]],
}
FEW = 320
"""Slots for Pallas' interpreter, which copies all arrays at each step; some follow blocks of zeros."""
MEANS = 4
"""Blocks with a mean."""
ENDS = (0, 1, LARGEST_BLOCK, 300, S + 9)


def planes_of(kinds, S):
    """Return planes of random bytes, including scales of 0 and NaN."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)

    return [[Plane(random(B, K, S, C * b // 8), random(B, K, S), b) for C, b in each] for each in kinds]


def read(planes, dtype):
    """Dequantize the planes of one array."""

    def coded(plane):
        return (plane.levels[..., None, :], plane.reach[..., None, None])

    parts = [compiled_codes.decode(FittedIntegers(plane.bits), coded(plane), plane.width) for plane in planes]
    return jnp.concatenate(parts, axis=-1)[..., 0, :].astype(dtype)


def same_bits(one, other):
    """Assert that arrays have the same bits; NaN matches any NaN."""
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype
    no_number = np.isnan(one.astype(np.float32))
    np.testing.assert_array_equal(no_number, np.isnan(other.astype(np.float32)))
    integers = np.dtype(f"u{one.itemsize}")
    np.testing.assert_array_equal(*(x.view(integers)[~no_number] for x in (one, other)))


def check(kinds, page=0, *, S=S, ends=ENDS, dtype=jnp.bfloat16, sinks=0, shifted=False, **options):
    """Assert that results are exact in rows, or in pages of a pool without the tokens after the ends."""
    planes, ends, table = planes_of(kinds, S), np.array(ends), None
    expected = [read(each, jnp.float32 if shifted else dtype) for each in planes]
    if sinks:
        rng = np.random.default_rng(1)
        values = [jnp.asarray(rng.normal(size=(B, K, sinks + 3, x.shape[3])), dtype) for x in expected]
        expected = [x.at[:, :, :sinks].set(y[:, :, :sinks]) for x, y in zip(expected, values, strict=True)]
        options |= {"sinks": sinks, "sink_values": values}
    if shifted:
        means = draw_means(expected[0].shape[3])
        blocks = jnp.minimum(jnp.arange(S) // GAIN_BLOCK, MEANS - 1)
        subtracted = means.values[:, means.references, None].swapaxes(0, 1)
        expected[0] += means.values[:, blocks] - subtracted
        expected = [x.astype(dtype) for x in expected]
        options |= {"means": means}
    if page:
        pool = Pool([plane for each in planes for plane in each], np.zeros(B, int), ends, page)
        rest, table = iter(pool.planes), pool.table
        planes = [[next(rest) for _ in each] for each in planes]
    found = dequantise(planes, jnp.asarray(ends, jnp.int32), dtype=dtype, block_table=table, **options)
    for x, wanted in zip(found, expected, strict=True):
        for b, end in enumerate(np.minimum(ends, S)):
            zeros = min(-(-max(end, 0) // LARGEST_BLOCK) * LARGEST_BLOCK, S)
            same_bits(x[b, :, :end], wanted[b, :, :end])
            assert not np.any(x[b, :, end:zeros])
            # The interpreter fills outputs with NaN.
            assert "interpret" not in options or np.isnan(np.asarray(x[b, :, zeros:], np.float32)).all()


def draw_means(width):
    """Return means of fewer blocks than keys have."""
    values = 30 * np.random.default_rng(2).normal(size=(K, MEANS, width))
    return BlockMeans(jnp.asarray(values, jnp.float32), jnp.arange(B, dtype=jnp.int32) % MEANS)


@pytest.mark.parametrize("page", [0, 40])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.matrix("40")
def test_keys_regain_the_means_of_their_blocks(page, sinks):
    size = -(-FEW // page) * page if page else FEW
    check(KINDS["index"], page, S=size, sinks=sinks, shifted=True, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 16, 128])
@pytest.mark.parametrize("sinks", [0, 4])
def test_keys_regain_the_means_of_their_blocks_on_the_device(page, sinks):
    check(KINDS["index"], page, sinks=sinks, shifted=True)


def test_means_have_the_shape_of_keys():
    planes, ends = planes_of(KINDS["index"], FEW), jnp.asarray(ENDS, jnp.int32)
    means = draw_means(128)
    assert dequantise_refusal(planes, ends, means=means) is None
    halves = means._replace(values=means.values.astype(jnp.bfloat16))
    wanted = "means.values has dtype bfloat16: must be float32"
    assert dequantise_refusal(planes, ends, means=halves) == wanted
    assert "means.values" in dequantise_refusal(planes, ends, means=draw_means(64))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.matrix
def test_reads_what_the_code_does(kinds):
    check(kinds, S=FEW, interpret=True)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [16, 40, 128])
@pytest.mark.matrix
@pytest.mark.usefixtures("optimised")
def test_reads_pages(kinds, page):
    check(kinds, page, S=-(-FEW // page) * page, interpret=True)


@pytest.mark.parametrize("sinks", [4, TOKENS + 6])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.matrix("0-4")
@pytest.mark.usefixtures("optimised")
def test_sinks_have_values_of_their_own(sinks, page):
    check(KINDS["index"], page, S=FEW, sinks=sinks, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [4, TOKENS + 6])
@pytest.mark.parametrize("page", [0, 16, 128])
def test_sinks_have_values_of_their_own_on_the_device(sinks, page):
    check(KINDS["index"], page, sinks=sinks)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.full
def test_other_floats(dtype):
    check(KINDS["index"], S=FEW, dtype=dtype, interpret=True)


@pytest.mark.parametrize("S", [1, 48, 333])
@pytest.mark.matrix
def test_rows_of_any_length(S):
    check([[(32, 4)]], S=S, ends=(0, 1, S // 2, S - 1, S), interpret=True)


def check_pages_that_are_not_there(**options):
    """Assert that tokens of absent pages are zeros and that nothing outside of the pool is read."""
    ((plane,),) = planes_of([[(32, 4)]], 64)
    table = jnp.asarray([[0, -1], [1 << 20, 1], [2**31 - 1, -(2**31)], [5, 2], [3, 4]], jnp.int32)
    (found,) = dequantise([[plane]], jnp.full(B, 128), block_table=table, **options)
    wanted = read([plane], jnp.bfloat16)
    for b, half in np.ndindex(B, 2):
        page, x = int(table[b, half]), found[b, :, 64 * half :][:, :64]
        if 0 <= page < B:
            same_bits(x, wanted[page])
        else:
            assert not np.any(x)


def test_pages_that_are_not_there():
    check_pages_that_are_not_there(interpret=True)


@pytest.mark.gpu
def test_pages_that_are_not_there_on_the_device():
    check_pages_that_are_not_there()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [0, 16, 40, TOKENS, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reads_what_the_code_does_on_the_device(kinds, page, dtype):
    check(kinds, page, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 48, 333])
def test_rows_of_any_length_on_the_device(S):
    check([[(32, 4)]], S=S, ends=(0, 1, S // 2, S - 1, S))


def like(S, *, bits=4, width=32, dtype=jnp.uint8):
    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    return Plane(shape(16, 32, S, width * bits // 8), shape(16, 32, S), bits)


ROW = jax.ShapeDtypeStruct((16,), jnp.int32)


def test_planes_whose_offsets_triton_gets_wrong_are_refused():
    reasons = [dequantise_refusal([[like(S, width=128)]], ROW) for S in (65536, 131072, 131136)]
    assert reasons[::2] == [None, None]
    assert "levels has 4294967296 bytes: must be at most 2^31, or above 2^32" in reasons[1]


def test_reaches_whose_offsets_triton_gets_wrong_are_refused():
    reason = dequantise_refusal([[like(5 * 2**20, width=16)]], ROW)
    assert "reach has 2684354560 bytes: must be at most 2^31, or above 2^32" in reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, r"planes\[1\]\[0\].bits=7: must be one of"),
        ({"width": 24}, r"planes\[1\]\[0\] has 24 coordinates: must be a multiple of 16"),
        ({"S": 96}, r"planes\[1\]\[0\].levels has shape"),
        ({"integers": jnp.int8}, r"planes\[1\]\[0\].levels has dtype int8: must be uint8"),
        ({"rows": 2}, "ends has shape"),
        ({"dtype": jnp.int8}, "dtype=int8: must be bfloat16, float16 or float32"),
        ({"table": (2, 4)}, r"block_table has shape \(2, 4\): must be \[B, pages\] = \(16, any\)"),
        ({"table": (16, 0)}, "block_table has 0 pages per sequence, the pool 16: must be at least 1"),
        ({"sinks": 4}, "sinks=4: must be 0, or above with sink_values for 2 arrays, not 0"),
        ({"sinks": 4, "P": 3}, r"sink_values\[0\] has 3 tokens of bfloat16: must have 4 of bfloat16"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_refusals(change, message):
    it = {"bits": 4, "width": 32, "S": 64, "integers": jnp.uint8, "rows": 16, "dtype": jnp.bfloat16} | change
    planes = [[like(64)], [like(it["S"], bits=it["bits"], width=it["width"], dtype=it["integers"])]]
    ends = jax.ShapeDtypeStruct((it["rows"],), jnp.int32)
    table = jax.ShapeDtypeStruct(it["table"], jnp.int32) if "table" in it else None
    of_sinks = [jax.ShapeDtypeStruct((16, 32, it["P"], 32), jnp.bfloat16)] * 2 if "P" in it else []
    options = {
        "dtype": it["dtype"],
        "block_table": table,
        "sinks": it.get("sinks", 0),
        "sink_values": of_sinks,
    }
    reason = dequantise_refusal(planes, ends, **options)
    assert reason is not None
    assert re.search(message, reason), reason
    with pytest.raises(ValueError, match=message):
        dequantise(planes, ends, **options)
