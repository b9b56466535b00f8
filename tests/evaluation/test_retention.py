"""Retention compared with closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.evaluation.answers import Answer
from zdc_jax.evaluation.retention import retention


def answered(log_probability, right, depth=None) -> Answer:
    return Answer(np.array(log_probability, np.float32), np.array(right), depth)


@given(kept=st.floats(0.2, 1.2), documents=st.integers(2, 12), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_constant_share_is_retained(kept, documents, seed):
    # The interval has no width where every document loses the same share.
    rng = np.random.default_rng(seed)
    dense = [
        [answered(rng.uniform(-3, -0.1, rng.integers(1, 9)), [True]) for _ in range(2)]
        for _ in range(documents)
    ]
    plan = [[answered(a.log_probability + np.log(kept), [True]) for a in document] for document in dense]
    found = retention(dense, plan)
    assert found.retention == pytest.approx(kept, rel=1e-6)
    assert found.interval == pytest.approx((kept, kept), rel=1e-6)
    assert found.is_precise
    assert found.documents == documents
    assert found.by_depth is None


def test_means_are_over_tokens_of_a_document_then_over_documents():
    dense = [[answered([-1, -1, -1], [1, 1, 0]), answered([-2], [1])], [answered([-4], [1])]]
    plan = [[answered([-2, -1, -1], [1, 0, 0]), answered([-3], [1])], [answered([-5], [1])]]
    found = retention(dense, plan)
    assert found.retention == pytest.approx(np.exp((-2 / 4 - 1) / 2))
    assert found.interval == pytest.approx((np.exp(-1), np.exp(-0.5)))
    assert not found.is_precise
    assert (found.score, found.dense, found.whole) == (3 / 5, 4 / 5, 1 / 2)
    assert found.counts
    assert retention(dense[:1], plan[:1]).interval is None
    assert not retention(dense[:1], plan[:1]).is_precise


def test_what_the_model_cannot_do_does_not_count():
    half, less = ([[answered([-1, -1], [1, right])], [answered([-1, -1], [0, 0])]] for right in (1, 0))
    assert retention(half, less).counts
    assert not retention(less, half).counts


def test_quarters_of_the_context():
    depths = (0.0, 0.24, 0.25, 0.999)
    dense = [[answered([-1], [1], depth)] for depth in depths]
    plan = [
        [answered([-1 - loss], [loss == 0], depth)] for loss, depth in zip((0, 1, 3, 0), depths, strict=True)
    ]
    first, second, third, last = retention(dense, plan).by_depth
    assert first.retention == pytest.approx(np.exp(-0.5))
    assert (first.score, first.dense, first.questions) == (0.5, 1, 2)
    assert second.retention == pytest.approx(np.exp(-3))
    assert third is None
    assert (last.retention, last.score, last.questions) == (1, 1, 1)


def test_only_quarters_that_the_model_masters_count():
    # In the first quarter, the unmodified model gives one right answer of three.
    depths = (0.0, 0.1, 0.2, 0.6, 0.9)
    dense = [[answered([-1], [depth >= 0.2], depth) for depth in depths]] * 2
    plan = [[answered([-1 + gain], [1], depth) for depth in depths] for gain in (-0.1, -0.3)]
    plan = [[answered([5], [1], a.depth) if a.depth < 0.25 else a for a in document] for document in plan]
    found = retention(dense, plan)
    assert found.retention == pytest.approx(np.exp(-0.2))
    assert (found.dense, found.score, found.whole, found.documents) == (1, 1, 1, 2)
    assert found.by_depth[0].dense == pytest.approx(1 / 3)
    dropped = retention([dense[0][:3], dense[1]], [plan[0][:3], plan[1]])
    assert dropped.documents == 1
    assert dropped.retention == pytest.approx(np.exp(-0.3))
