"""New tokens rotated, quantized and stored by one kernel, compared with formulas and separate quantizers."""

import re
from itertools import chain

import compiled_codes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_gpu import on_abstract_h200
from pages import Pool

from kernels_pallas import (
    Plane,
    Stored,
    Turning,
    arrange_gains,
    join_heads,
    turn_and_store,
    turn_and_store_refusal,
)
from kernels_pallas.quantized.queries import columns_of
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.ops.shift import BLOCK, ShiftedQueries

K, S, SINKS, WINDOW = 2, 192, 4, 64
SCALE = 0.1
M = WINDOW + 8
KINDS = {
    # Coordinates and bits of planes of keys and of values, bits of the ring.
    "chosen": ([(32, 4), (96, 4)], [(128, 4)], 16),
    "whole": ([(128, 4)], [(64, 2)], 16),
    "bit planes, near tokens in 8 bits": ([(32, 6), (48, 3)], [(64, 5)], 8),
    "half of the keys": ([(64, 8)], [(128, 3)], 16),
}
H = 128


class Case:
    """New tokens at ragged places, and stores and rings with arbitrary earlier contents."""

    def __init__(self, kinds, B=3, G=2, dtype=jnp.bfloat16, rotation=jnp.float16, seed=0, H=H, Hv=H):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.normal(size=shape)

        def size():
            return np.exp(normal(B, 1, 1))

        self.q = jnp.asarray(normal(B, K * G, H), dtype)
        self.k, self.v = (jnp.asarray(normal(B, K, C) * size(), dtype) for C in (H, Hv))
        angles = rng.integers(0, 9999, (B, 1)) * 1e4 ** -(np.arange(H // 2) / (H // 2))
        basis = [jnp.asarray(normal(K, H, H) / H**0.5, rotation) for _ in range(2)]
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        self.turning = Turning(cos, sin, *basis)
        self.keys, self.values, self.ring_bits = kinds

        def byte(*shape):
            return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)

        def plane(slots, C, bits):
            return Plane(byte(B, K, slots, C * bits // 8), byte(B, K, slots), bits)

        self.planes = [[plane(S, *each) for each in kind] for kind in (self.keys, self.values)]

        def ring(C):
            return plane(M, C, 8) if self.ring_bits == 8 else jnp.asarray(normal(B, K, M, C), dtype)

        self.rings = [ring(H), ring(Hv)]
        # The second row is idle, and the third one's token is a sink.
        self.starts = np.resize([5 + WINDOW, 100, 2], B)
        self.ends = self.starts + np.resize([1, 0, 1], B)

        self.slots = S
        self.frequencies = 1e6 ** -(np.arange(H // 2) / (H // 2))
        self.mean = jnp.asarray(20 * normal(K, H), jnp.float32)

    def shift(self):
        """Return the queries as block scores need them."""
        rows = self.q[:, None], jnp.asarray(self.starts[:, None], jnp.int32)
        return ShiftedQueries(*rows, self.mean, self.frequencies)

    def run(self, page=0, **options):
        planes, rings, (starts, ends) = self.planes, self.rings, self.span
        if page:
            pool = Pool([*chain(*planes)], np.zeros(len(self.ends), int), self.ends, page)
            rest = iter(pool.planes)
            planes = [[next(rest) for _ in each] for each in planes]
            rings = on_arrays(lambda x: jnp.concatenate([x, x]), rings)  # Those of another layer first.
            options |= {"block_table": pool.table, "first_ring": jnp.int32(len(self.ends))}
        stored = [Stored(*pair) for pair in zip(planes, rings, strict=True)]
        given = join_heads(self.q, self.k, self.v), self.turning, *stored, starts, ends
        options |= {"means": self.shift().mean_turns(self.slots), "scale": SCALE}
        q, *found = turn_and_store(*given, sinks=SINKS, window=WINDOW, **options)
        if page:
            rest = iter(pool.rows([*chain(*(each.planes for each in found))]))
            found = [each._replace(planes=[next(rest) for _ in each.planes]) for each in found]
            rings = [each.ring for each in found]
            others, own = (on_arrays(lambda x, i=i: jnp.split(x, 2)[i], rings) for i in range(2))
            on_arrays(np.testing.assert_array_equal, others, self.rings)
            found = [each._replace(ring=ring) for each, ring in zip(found, own, strict=True)]
        return q, found

    @property
    def span(self):
        return [jnp.asarray(x, jnp.int32) for x in (self.starts, self.ends)]

    def exact(self):
        """Compute q' [B, N, H] and k' [B, K, H] in float64, except that the basis' input is rounded."""
        turning = self.turning
        basis = [np.asarray(x, np.float64) for x in (turning.q, turning.k)]

        def turned(x, a):
            low, high = np.split(np.asarray(x, np.float64), 2, axis=-1)
            cos, sin = (np.asarray(each, np.float64)[:, None] for each in turning[:2])
            y = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
            y = np.asarray(jnp.asarray(y, jnp.float32).astype(turning.q.dtype), np.float64)
            return np.einsum("BKGH,KHC->BKGC", y.reshape(len(y), K, -1, len(a[0])), a).reshape(x.shape)

        k = turned(self.k, basis[1])
        return turned(self.q, basis[0]), k

    def check(self, page=0, **options):
        q, (keys, values) = self.run(page, **options)
        exact_q, exact_k = self.exact()
        q = jax.tree.map(lambda x: x[self.ends > self.starts], q)
        near(q.plain, exact_q[self.ends > self.starts], self.q.dtype)
        self.check_arranged(q)
        self.check_gains(q.gains)
        v = np.asarray(self.v, np.float64)
        for found, x, planes, ring in zip((keys, values), (exact_k, v), self.planes, self.rings, strict=True):
            begin = 0
            for old, new in zip(planes, found.planes, strict=True):
                self.check_plane(x[..., begin : begin + old.width], old, new, self.starts, self.ends)
                begin += old.width
            self.check_ring(x, ring, found.ring)

    def check_ring(self, x, old, new):
        slots = np.where(self.starts < SINKS, WINDOW + self.starts, self.starts % WINDOW)
        ends = slots + (self.ends > self.starts)
        if isinstance(old, Plane):
            self.check_plane(x, old, new, slots, ends)
        elif old is not None:
            for b, (slot, end) in enumerate(zip(slots, ends, strict=True)):
                near(new[b, :, slot:end], x[b, :, None][:, : end - slot], new.dtype)
                others = np.delete(np.arange(M), np.arange(slot, end))
                np.testing.assert_array_equal(
                    np.asarray(new, np.float32)[b, :, others], np.asarray(old, np.float32)[b, :, others]
                )

    def check_arranged(self, q):
        """Assert that queries have the coordinates of the keys, and zeros for missing heads."""
        (B, _, H), G = q.plain.shape, q.plain.shape[1] // K
        forms = [self.keys, [(H, 8)]] if self.ring_bits == 8 else [self.keys]
        assert (q.near is None) == (self.ring_bits == 16)
        for planes, found in zip(forms, (q.far, q.near), strict=False):
            R = sum(C for C, _ in planes)
            heads, missing = np.split(np.asarray(found, np.float32), [G], axis=2)
            plain = np.asarray(q.plain, np.float32).reshape(B, K, G, H)
            np.testing.assert_array_equal(heads, plain[..., :R])
            np.testing.assert_array_equal(missing, np.zeros((B, K, columns_of(G) - G, R)))

    def check_gains(self, found):
        """Assert that gains are those of whole blocks, relative to a token's own, and zeros for no heads."""
        is_new = self.ends > self.starts
        exact = arrange_gains(self.shift().block_scores(self.slots, SCALE)[:, 0], K)[is_new]
        own = self.starts[is_new] // BLOCK
        seen = np.broadcast_to((np.arange(exact.shape[2]) <= own[:, None])[:, None, :, None], exact.shape)
        assert found.shape == exact.shape
        size = np.abs(exact).max()
        np.testing.assert_allclose(found[seen], exact[seen], atol=1e-5 * size)
        assert size > 5 or not own.any()

    def check_plane(self, x, old, new, starts, ends):
        """Assert that new tokens are as exact as the quantizer, and that others are unchanged."""
        code = FittedIntegers(old.bits)
        best = read(code, compiled_codes.encode(code, jnp.asarray(x, jnp.float32)[..., None, :]), old.width)
        now = read(code, (new.levels[..., None, :], new.reach[..., None, None]), old.width)
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            written, true = now[b, :, start:end], x[b, :, None][:, : end - start]
            wrong = np.linalg.norm(written - true, axis=-1)
            least = np.linalg.norm(best[b, :, None] - x[b, :, None], axis=-1)
            # The quantizer's input was rounded to 16 bits before.
            rounded = float(jnp.finfo(self.q.dtype).eps) / 2 * np.linalg.norm(true, axis=-1)
            np.testing.assert_array_less(wrong, 1.01 * least + rounded + 1e-6)
            others = np.delete(np.arange(old.reach.shape[2]), np.arange(start, end))
            for one, other in ((new.levels, old.levels), (new.reach, old.reach)):
                np.testing.assert_array_equal(np.asarray(one)[b][:, others], np.asarray(other)[b][:, others])


def read(code, coded, C):
    return np.asarray(compiled_codes.decode(code, coded, C), np.float64)[..., 0, :]


def on_arrays(change, *trees):
    """Change the arrays of trees; numbers of bits stay."""
    return jax.tree.map(lambda *x: x[0] if isinstance(x[0], int) else change(*x), *trees)


def near(found, exact, dtype):
    """Assert equality within 16-bit rounding, by token and head."""
    found = np.asarray(found, np.float64)
    wrong = np.linalg.norm(found - exact, axis=-1)
    np.testing.assert_array_less(wrong, float(jnp.finfo(dtype).eps) * np.linalg.norm(exact, axis=-1) + 1e-9)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.matrix("32-whole")
def test_in_rows_and_in_pages(kinds, page):
    Case(kinds).check(page, interpret=True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("H", "Hv", "kinds"),
    [
        (64, 128, ([(16, 4), (48, 3)], [(128, 4)], 16)),
        (256, 64, ([(128, 4), (128, 2)], [(64, 5)], 8)),
        (32, 32, ([(32, 8)], [(16, 4)], 16)),
    ],
)
@pytest.mark.full
def test_other_head_dims(H, Hv, kinds):
    # If values have another head dim than keys, then q, k and v are three arrays.
    Case(kinds, H=H, Hv=Hv).check(interpret=True)


@pytest.mark.full
def test_one_row():
    # With one row, q, k and v of several heads are three arrays.
    Case(KINDS["chosen"], B=1, G=2).check(interpret=True)


def far_away():
    """Return a case of gains in more than one tile of blocks. Its store is full, so only the ring changes."""
    it = Case(KINDS["whole"], B=2, G=3)
    it.slots = 140 * BLOCK
    it.starts = np.array([4095, 139 * BLOCK])
    it.ends = it.starts + 1
    return it


def test_gains_of_many_blocks():
    it = far_away()
    it.check_gains(it.run(interpret=True)[0].gains)


@pytest.mark.gpu
def test_gains_of_many_blocks_on_the_device():
    it = far_away()
    it.check_gains(it.run()[0].gains)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize(("B", "G"), [(1, 1), (3, 4), (40, 2), (8, 16)])
def test_on_the_device(kinds, page, B, G):
    dtype, rotation = (jnp.float16 if G == 1 else jnp.bfloat16), (jnp.bfloat16 if G == 4 else jnp.float16)
    Case(kinds, B=B, G=G, dtype=dtype, rotation=rotation).check(page)


def change(a, i, f):
    """Return arguments with the queries, keys or values changed."""
    return a | {"heads": [f(x) if j == i else x for j, x in enumerate(a["heads"])]}


BAD = {
    "turning.k has 48 coordinates: must be one of": lambda a: (
        a | {"turning": a["turning"]._replace(k=a["turning"].k[:, :48])}
    ),
    "heads[0] has shape": lambda a: change(a, 0, lambda q: q[..., :64]),
    "heads[1] has shape": lambda a: change(a, 1, lambda k: k[:, :1]),
    "q has 3 heads: must be a multiple of the 2": lambda a: change(a, 0, lambda q: q[:, :3]),
    "q has 1 heads: must be a multiple of the 2": lambda a: (
        a | {"heads": [jnp.concatenate(a["heads"], 1)[:, :5]]}
    ),
    "N=0: must be at least 1": lambda a: a | {"heads": [jnp.concatenate(a["heads"], 1)[:, :3]]},
    "heads[1] has dtype bfloat16": lambda a: change(a, 0, lambda q: q.astype(jnp.float16)),
    "heads[0] has dtype float32": lambda a: (
        a | {"heads": [jnp.concatenate(a["heads"], 1).astype(jnp.float32)]}
    ),
    "heads[2] has shape": lambda a: change(a, 2, lambda v: v[:, :1]),
    "heads has 2 arrays: must be 1, or 3": lambda a: a | {"heads": a["heads"][:2]},
    "turning.cos has shape": lambda a: a | {"turning": a["turning"]._replace(cos=a["turning"].cos[..., :3])},
    "turning.q has shape": lambda a: a | {"turning": a["turning"]._replace(q=a["turning"].q[..., :64])},
    "turning.k has dtype float32: must be float16 or bfloat16": lambda a: (
        a | {"turning": a["turning"]._replace(k=a["turning"].k.astype(jnp.float32))}
    ),
    "k_stored.planes=[]: must be at least one": lambda a: a | {"k_stored": a["k_stored"]._replace(planes=[])},
    "ends has dtype float32: must be an integer dtype": lambda a: a | {"ends": a["ends"].astype(jnp.float32)},
    "k_stored.planes take 160 coordinates: must be at most 128": lambda a: (
        a | {"k_stored": a["k_stored"]._replace(planes=[a["k_stored"].planes[0], *a["k_stored"].planes])}
    ),
    "k_stored.ring has shape": lambda a: (
        a | {"k_stored": a["k_stored"]._replace(ring=a["k_stored"].ring[..., :64])}
    ),
    "v_stored.ring has dtype float16": lambda a: (
        a | {"v_stored": a["v_stored"]._replace(ring=a["v_stored"].ring.astype(jnp.float16))}
    ),
    "sinks=4, window=90": lambda a: a | {"window": 90},
    "starts has shape": lambda a: a | {"starts": a["starts"][:1]},
    "first_ring has shape": lambda a: a | {"first_ring": a["starts"]},
    "turns has shape": lambda a: a | {"means": a["means"]._replace(turns=a["means"].turns[:, :64])},
    "means.mean has shape": lambda a: a | {"means": a["means"]._replace(mean=a["means"].mean[:1])},
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    it = Case(KINDS["chosen"])
    stored = [Stored(*pair) for pair in zip(it.planes, it.rings, strict=True)]
    names = ("heads", "turning", "k_stored", "v_stored", "starts", "ends")
    given = dict(zip(names, ([it.q, it.k, it.v], it.turning, *stored, *it.span), strict=True))
    given |= {"sinks": SINKS, "window": WINDOW, "means": it.shift().mean_turns(S)}
    assert turn_and_store_refusal(**given) is None
    reason = turn_and_store_refusal(**BAD[message](given))
    assert reason is not None
    assert re.search(re.escape(message), reason), reason


def test_lowers_for_cuda():
    it = Case(KINDS["chosen"], G=4)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (it.q, it.k, it.v, it.turning))
    arrays = it.planes, it.rings, it.span, it.shift().mean_turns(S)

    def run(q, k, v, turning, planes, rings, span, means):
        stored = [Stored(*pair) for pair in zip(planes, rings, strict=True)]
        heads, options = join_heads(q, k, v), {"sinks": SINKS, "window": WINDOW}
        return turn_and_store(heads, turning, *stored, *span, means=means, **options)[0]

    with on_abstract_h200():
        lowered = jax.jit(run).trace(*shapes, *arrays).lower(lowering_platforms=("cuda",))
    assert "zdc_turn_and_store" in lowered.as_text()
