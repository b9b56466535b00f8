"""Kernel that quantizes new tokens, compared with the quantizer; on a CPU, Pallas' interpreter runs it."""

import re
from itertools import chain

import compiled_codes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import NOWHERE, Pool

from kernels_pallas import Plane, encode, encode_refusal
from kernels_pallas.quantized.encode import TOKENS, lengthen
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

B, K, S = 3, 2, 160
KINDS = {
    # Coordinates and bits of planes, array by array.
    "chosen": [[(32, 4), (96, 4)], [(128, 4)]],
    "whole": [[(128, 4)], [(64, 2)]],
    "index of eight bits": [[(16, 8), (64, 2)]],
    "bit planes": [[(32, 6), (96, 3)], [(64, 3)]],
    "shares of half a byte": [[(16, 5), (48, 3)], [(64, 5)]],
    "widest": [[(256, 4)], [(256, 8)]],
}


def planes_like(kinds, *tokens):
    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.uint8)

    return [
        [Plane(shape(*tokens, C * bits // 8), shape(*tokens), bits) for C, bits in each] for each in kinds
    ]


class Case:
    """Tokens of all sizes at ragged places, and planes with arbitrary earlier contents."""

    def __init__(self, kinds, T, dtype=jnp.bfloat16):
        rng = np.random.default_rng(T)
        widths = [sum(C for C, _ in each) for each in kinds]

        def size():
            return np.exp(2 * rng.normal(size=(B, T, K, 1)))

        self.x = [jnp.asarray(rng.normal(size=(B, T, K, C)) * size(), dtype) for C in widths]

        def random(x):
            return jnp.asarray(rng.integers(0, 256, x.shape), jnp.uint8)

        self.planes = [
            [Plane(random(plane.levels), random(plane.reach), plane.bits) for plane in each]
            for each in planes_like(kinds, B, K, S)
        ]
        # The last row begins in its padding, so nothing of it is stored.
        self.starts, self.ends = np.array([5, S - T, 40]), np.array([5 + T // 2 + 1, S, 40])

    def run(self, page=0, **options):
        """Run the kernel on rows, or on pages of a pool whose unowned pages must stay unchanged."""
        starts, ends = (jnp.asarray(x, jnp.int32) for x in (self.starts, self.ends))
        if not page:
            return encode(self.x, self.planes, starts, ends, **options)
        pool = Pool([*chain(*self.planes)], np.zeros(B, int), self.ends, page)
        planes = self.array_by_array(pool.planes)
        found = [*chain(*encode(self.x, planes, starts, ends, block_table=pool.table, **options))]
        for before, after in zip(pool.planes, found, strict=True):
            same(before, after, pool.nobodys)
        return self.array_by_array(pool.rows(found))

    def array_by_array(self, planes):
        rest = iter(planes)
        return [[next(rest) for _ in each] for each in self.planes]

    def check(self, **options):
        found = self.run(**options)
        for x, before, after in zip(self.x, self.planes, found, strict=True):
            begin = 0
            for old, new in zip(before, after, strict=True):
                self.check_plane(np.asarray(x[..., begin : begin + old.width], np.float64), old, new)
                begin += old.width

    def check_plane(self, x, old, new):
        """Assert that errors equal the quantizer's; another scale may be chosen where errors are equal.

        Errors are those of the lengthened vectors, as the quantizer takes them.
        """
        code, lengthened = FittedIntegers(old.bits), lengthen(x, old.bits)
        best = read(code, compiled_codes.encode(code, jnp.asarray(x, jnp.float32)[..., None, :]), old.width)
        now = read(code, (new.levels[..., None, :], new.reach[..., None, None]), old.width).swapaxes(1, 2)
        for b in range(B):
            count = max(0, min(self.ends[b] - self.starts[b], x.shape[1]))
            slots = slice(self.starts[b], self.starts[b] + count)
            errors = [((y - lengthened[b, :count]) ** 2).sum(-1) for y in (now[b, slots], best[b, :count, :])]
            np.testing.assert_allclose(*errors, rtol=1e-4)
            others = np.delete(np.arange(S), slots)
            for one, other in ((new.levels, old.levels), (new.reach, old.reach)):
                np.testing.assert_array_equal(np.asarray(one)[b][:, others], np.asarray(other)[b][:, others])


def same(one, other, at=...):
    """Assert that planes are equal at these places."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[at], np.asarray(y)[at])


def read(code, coded, C):
    return np.asarray(compiled_codes.decode(code, coded, C), np.float64)[..., 0, :]


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("T", [1, 21])
@pytest.mark.matrix
def test_codes_as_the_code_does(kinds, T):
    Case(kinds, T).check(interpret=True)


@pytest.mark.full
def test_more_tokens_than_a_program_has():
    Case(KINDS["chosen"], TOKENS + 9, jnp.float32).check(interpret=True)


def check_one_token(kinds, page, **options):
    """Assert that pages give the same bits as rows."""
    it = Case(kinds, 1)
    for planes in zip(chain(*it.run(page, **options)), chain(*it.run(**options)), strict=True):
        same(*planes)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.matrix
def test_a_token_a_row_in_pages(kinds):
    check_one_token(kinds, 32, interpret=True)


@pytest.mark.parametrize("page", [16, 40])
@pytest.mark.full
def test_tokens_of_a_row_in_several_pages(page):
    Case(KINDS["chosen"], 50).check(page=page, interpret=True)


def check_tokens_without_a_page(**options):
    """Assert that tokens without a page are not written."""
    it = Case([[(32, 4)]], 5)
    ((plane,),) = it.planes
    table = jnp.asarray(np.resize(NOWHERE, (B, 2)), jnp.int32)
    row = jnp.full(B, S - 3, jnp.int32)
    ((found,),) = encode(it.x, it.planes, row, row + 5, block_table=table, **options)
    same(found, plane)


def test_tokens_without_a_page():
    check_tokens_without_a_page(interpret=True)


@pytest.mark.gpu
def test_tokens_without_a_page_on_the_device():
    check_tokens_without_a_page()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [32, 80])
def test_a_token_a_row_in_pages_on_the_device(kinds, page):
    check_one_token(kinds, page)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("T", [8, 121])
@pytest.mark.parametrize("page", [16, 40])
def test_tokens_of_a_row_in_several_pages_on_the_device(kinds, T, page):
    Case(kinds, T).check(page=page)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("T", [1, 8, TOKENS, 121])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_codes_as_the_code_does_on_the_device(kinds, T, dtype):
    Case(kinds, T, dtype).check()


SPECIAL = [0.0, -0.0, np.nan, np.inf, 1e-40, 3e38]


def check_special(**options):
    """Assert that zeros stay zeros and NaN stays NaN, without effect on neighbours."""
    it = Case([[(16, 8)]], 8, jnp.float32)
    x = np.array(it.x[0])
    for t, value in enumerate(SPECIAL):
        x[:, t, 1, 3] = value
    x[:, 0:2, 1] = [[0.0], [-0.0]]
    row = jnp.zeros(B, jnp.int32)
    ((plane,),) = encode([jnp.asarray(x)], it.planes, row, row + 8, **options)
    arrays = plane.levels[..., None, :], plane.reach[..., None, None]
    now = read(FittedIntegers(8), arrays, 16)[:, :, :8].swapaxes(1, 2)
    true = read(FittedIntegers(8), FittedIntegers(8).encode(jnp.asarray(x)[..., None, :]), 16)
    np.testing.assert_array_equal(np.isnan(now), np.isnan(true))
    np.testing.assert_array_equal(np.isnan(now).all(-1), ~np.isfinite(x).all(-1))
    assert (now[:, :2, 1] == 0).all()
    finite = np.isfinite(x).all(-1) & ~np.isnan(true).any(-1)

    def wrong(y):
        return ((y - x)[finite] ** 2).sum(-1)

    np.testing.assert_allclose(wrong(now), wrong(true), rtol=1e-4)


def test_special_numbers():
    check_special(interpret=True)


@pytest.mark.gpu
def test_special_numbers_on_the_device():
    check_special()


@pytest.mark.parametrize("page", [0, 40])
@pytest.mark.matrix
def test_what_is_past_the_end_of_the_store_is_not_written(page):
    it = Case([[(32, 4)]], 8)
    it.starts, it.ends = np.full(B, S - 3), np.full(B, S + 5)
    ((found,),), ((before,),) = it.run(page, interpret=True), it.planes
    same(found, before, np.s_[:, :, : S - 3])


def test_planes_whose_offsets_triton_gets_wrong_are_refused():
    def like(S):
        return Plane(*(jax.ShapeDtypeStruct((16, 32, S, *w), jnp.uint8) for w in ((64,), ())), 4)

    row, x = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
    reasons = [encode_refusal([x], [[like(S)]], row, row) for S in (65536, 131072, 131136)]
    assert reasons[::2] == [None, None]
    assert "has 4294967296 bytes: must be at most 2^31, or above 2^32" in reasons[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": [[(32, 7)]]}, r"planes\[0\]\[0\].bits=7: must be one of"),
        ({"width": 64}, r"x\[0\] has shape"),
        ({"rows": 2}, "starts has shape"),
        ({"table": (2, 4)}, r"block_table has shape \(2, 4\): must be \[B, pages\] = \(3, any\)"),
        ({"table": (B, 4), "integers": jnp.int16}, "block_table has dtype int16: must be int32"),
        ({"table": (B, 0)}, "block_table has 0 pages per sequence, the pool 3: must be at least 1"),
        ({"table": (B, 4), "S": 0}, "page size of 0 slots: must be a non-zero multiple of 1"),
    ],
)
def test_refusals(change, message):
    it = {"kinds": [[(32, 4)]], "width": 32, "rows": B, "S": S} | change
    row = jax.ShapeDtypeStruct((it["rows"],), jnp.int32)
    x = jax.ShapeDtypeStruct((B, 4, K, it["width"]), jnp.bfloat16)
    table = None
    if "table" in it:
        table = jax.ShapeDtypeStruct(it["table"], it.get("integers", jnp.int32))
    reason = encode_refusal([x], planes_like(it["kinds"], B, K, it["S"]), row, row, block_table=table)
    assert reason is not None
    assert re.search(message, reason), reason
