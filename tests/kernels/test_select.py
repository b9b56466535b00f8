"""The k largest scores of a row: lowering for CUDA, refusals, and results of the kernel.

On a CPU, JAX's interpreter of GPU kernels runs it and looks for races. Plain jax.numpy replaces counts,
running sums and access to computed addresses. Only the tests marked `gpu` cover these, and how the threads of
a CTA affect each other.
"""

import re
from dataclasses import dataclass

import interpreting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import largest_reference

from kernels_pallas import largest, select_refusal
from kernels_pallas.mgpu_ext import RUN
from kernels_pallas.select import largest as select
from kernels_pallas.select.largest import BLOCK, _parts

B, K = 2, 2
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, 3e38], np.float32)
KINDS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    # All scores agree in the first digit, then in the first two.
    "one digit": lambda rng, shape: 100 + rng.normal(size=shape),
    "two digits": lambda rng, shape: 1 + rng.integers(0, 1000, shape) * 2.0**-23,
    "ties": lambda rng, shape: rng.integers(-2, 3, shape),
    "equal": lambda rng, shape: np.full(shape, rng.normal()),
    "special": lambda rng, shape: rng.choice(SPECIAL, shape),
    "any bits": lambda rng, shape: rng.integers(0, 2**32, shape, np.uint32).view(np.float32),
}
SLOTS = [64, BLOCK, BLOCK + 64, 3 * BLOCK, 4 * BLOCK + 7 * 64]


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclass(frozen=True)
class Case:
    """Random scores of one kind, of which those in a span count.

    spans: one per sequence for all of its K rows, in shares of S.
    """

    seed: int
    kind: str
    S: int
    spans: tuple[tuple[float, float], ...]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng, S = np.random.default_rng(self.seed), self.S
        begin, end = np.sort(np.round(np.array(self.spans) * S).astype(np.int32), axis=1).T
        scores = KINDS[self.kind](rng, (B, K, S)).astype(np.float32)
        j = np.arange(S)
        counts = (j >= begin[:, None]) & (j < end[:, None])
        # Other scores must not be read.
        return np.where(counts[:, None], scores, rng.choice(SPECIAL, scores.shape)), begin, end

    def truth(self, k: int) -> np.ndarray:
        """Select by numpy's stable sort, row by row, in float64, where no score is subnormal."""
        scores, begin, end = self.arrays()
        found = np.full((B, K, k), self.S)
        for b, kv in np.ndindex(B, K):
            seen = scores[b, kv, begin[b] : end[b]]
            number = ~np.isnan(seen)
            best = np.lexsort((-np.where(number, seen, 0).astype(np.float64), number))[:k]
            found[b, kv, : best.size] = begin[b] + np.sort(best)
        return found

    def check(self, function, k: int) -> None:
        found = np.asarray(function(*map(jnp.asarray, self.arrays()), k=k))
        np.testing.assert_array_equal(found, self.truth(k))


def cases(*slots: int):
    share = st.floats(0, 1)
    span = st.one_of(st.just((0.0, 1.0)), st.tuples(share, share))
    return st.builds(
        Case,
        st.integers(0, 2**32),
        st.sampled_from(sorted(KINDS)),
        st.sampled_from(slots),
        st.tuples(*[span] * B),
    )


@pytest.mark.parametrize(("S", "k"), [(64, 128), (BLOCK + 64, 1024), (2**20, 4096)])
@pytest.mark.full
def test_lowers(S, k):
    row = shape(B, dtype=jnp.int32)
    traced = jax.jit(largest, static_argnames="k").trace(shape(B, K, S), row, row, k=k)
    assert traced.lower(lowering_platforms=("cuda",)).out_info.shape == (B, K, k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": shape(B, 128)}, r"scores has shape \(2, 128\): must be \[B, K, S\]"),
        ({"scores": shape(B, K, 128, dtype=jnp.bfloat16)}, "scores has dtype bfloat16: must be float32"),
        ({"scores": shape(B, K, 100)}, "S=100 slots: must be a multiple of 64"),
        ({"scores": shape(B, K, 0)}, "S=0 slots"),
        ({"k": 64}, "k=64: must be a multiple of 128 from 128 to 4096"),
        ({"k": 0}, "k=0: must be"),
        ({"k": 8192}, "k=8192: must be"),
        ({"begin": shape(B + 1, dtype=jnp.int32)}, r"begin has shape \(3,\): must be \[B\] = \(2\)"),
        ({"end": shape(B)}, "end has dtype float32: must be an integer dtype"),
    ],
)
def test_refusals(change, message):
    row = shape(B, dtype=jnp.int32)
    it = {"scores": shape(B, K, 128), "begin": row, "end": row, "k": 128}
    assert select_refusal(**it) is None
    reason = select_refusal(**it | change)
    assert reason is not None
    assert re.search(message, reason), reason


@settings(max_examples=100, deadline=None)
@given(cases(1, 64, 250), st.sampled_from([1, 50, 300]))
@pytest.mark.full
def test_plain_version(case, k):
    case.check(largest_reference, k)


def _plain_add_ones(counts, bins):
    counts[...] = counts[...].at[bins].add(1, mode="drop")


def _plain_gather(ref, index):
    return ref[...].reshape(-1)[index]


def _plain_append(refs, wanted, values, count, _):
    places = jnp.where(wanted, count + jnp.cumsum(wanted) - 1, refs[0].shape[0])
    for ref, x in zip(refs, values, strict=True):
        ref[...] = ref[...].at[places].set(x, mode="drop")
    return count + wanted.sum()


def _plain_sums_before(x, *_):
    upto = jnp.cumsum(x)
    return upto - x, upto[-1]


def _plain_the_one(here, values, *_):
    return tuple(jnp.where(here, x, 0).sum() for x in values)


PLAIN = {
    "add_ones": _plain_add_ones,
    "gather": _plain_gather,
    "append": _plain_append,
    "sums_before": _plain_sums_before,
    "the_one": _plain_the_one,
}


@pytest.fixture(scope="module", params=[1, 3], ids=["whole rows", "parts"])
def interpreted(request):
    with interpreting.interpreted(select, "largest", **PLAIN, _parts=lambda *_: request.param):
        yield


@settings(max_examples=12, deadline=None)
@given(cases(*SLOTS), st.sampled_from([128, 1024]))
@pytest.mark.full
def test_is_right(interpreted, case, k):
    case.check(largest, k)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.full
def test_is_right_where_many_scores_agree(interpreted, kind):
    # As many scores as are selected, more, or all agree in the first one or two digits.
    Case(0, kind, 3 * BLOCK + 64, ((0.0, 1.0), (0.3, 0.95))).check(largest, 1024)


@pytest.mark.parametrize("better", [True, False])
@pytest.mark.parametrize("thin", [16, 64])
@pytest.mark.full
def test_is_right_where_the_sample_is_wrong(interpreted, thin, better):
    # The sample has only the best scores or none of them, so candidates are too few or too many.
    S = 5 * BLOCK
    group, place = np.divmod(np.arange(S) // RUN, thin)
    scores = np.random.default_rng(0).normal(size=(B, K, S))
    scores += np.where((place == group * 5 % thin) == better, 100, 0)
    args = jnp.asarray(scores, jnp.float32), jnp.zeros(B, jnp.int32), jnp.full(B, S)
    np.testing.assert_array_equal(*(f(*args, k=1024) for f in (largest, largest_reference)))


@pytest.mark.parametrize("spans", [((0.5, 0.5), (0.4, 0.45)), ((0.99, 1.0), (0.01, 0.97))])
@pytest.mark.parametrize("kind", ["ties", "equal"])
@pytest.mark.full
def test_is_right_of_parts_of_nothing(interpreted, kind, spans):
    # Rows have no slots, slots of one part only, or more slots than all parts hold.
    Case(0, kind, 9 * BLOCK, spans).check(largest, 128)


@pytest.mark.parametrize(
    ("rows", "S", "k", "parts"),
    [
        (8, 131072, 1024, 16),
        (32, 131072, 1024, 16),
        (8, 131072, 4096, 4),
        (1, 2**20, 128, 16),
        (8, 32768, 1024, 1),
        (128, 131072, 1024, 4),
        (512, 2**20, 128, 1),
    ],
)
def test_few_long_rows_have_parts(rows, S, k, parts):
    assert _parts(rows, S, k) == parts


@pytest.mark.gpu
@settings(max_examples=300, deadline=None)
@given(cases(*SLOTS, 2**15, 2**17 + 64, 2**20), st.sampled_from([128, 384, 1024, 4096]))
def test_is_right_on_the_device(case, k):
    case.check(largest, k)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_is_right_of_many_rows_at_once(kind):
    # The CTAs exceed the device's capacity.
    rng = np.random.default_rng(0)
    scores = jnp.asarray(KINDS[kind](rng, (600, 2, 2**14)), jnp.float32)
    begin, end = (
        jnp.asarray(rng.integers(*ends, 600), jnp.int32) for ends in ((0, 1000), (2**14 - 1000, 2**14 + 1))
    )
    found, expected = (f(scores, begin, end, k=1024) for f in (largest, largest_reference))
    np.testing.assert_array_equal(found, expected)
