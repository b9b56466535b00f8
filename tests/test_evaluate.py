"""Perplexity against a plain float64 computation; the bootstrap against closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel

from zdc_jax import LanguageModel, evaluate
from zdc_jax.evaluate import bootstrap_interval, compare, window_nll


@pytest.mark.parametrize(("length", "block", "batch"), [(33, 512, 1), (33, 8, 2), (17, 16, 4)])
def test_equals_plain_log_softmax(tiny: TinyModel, monkeypatch, length, block, batch):
    monkeypatch.setattr(evaluate, "_POSITIONS_PER_BLOCK", block)
    evaluate._window_nll.clear_cache()
    windows = tiny.tokens(3, length)
    logits = np.asarray(tiny.dense(jnp.asarray(windows)), np.float64)[:, :-1]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = -np.take_along_axis(log_p, windows[:, 1:, None], -1)[..., 0].mean(1)
    np.testing.assert_allclose(window_nll(tiny.dense, windows, batch=batch), expected, rtol=1e-5)


def test_a_model_does_not_differ_from_itself(tiny: TinyModel):
    windows = tiny.tokens(3, 20)
    nll = window_nll(tiny.dense, windows)
    report = compare(LanguageModel(tiny.dense), nll, windows)
    assert report.increase == 0
    assert report.interval == (0, 0)
    assert report.perplexity == pytest.approx(np.exp(nll.mean()))
    assert report.kv_bytes == report.dense_kv_bytes == tiny.dense.plan.bytes(20, 1, 4)


def test_constant_differences_have_no_interval():
    low, high = bootstrap_interval(np.full(10, np.log(1.25)))
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.25)


def test_the_interval_is_that_of_the_mean():
    """Against the normal approximation of a mean of many small differences."""
    differences = np.random.default_rng(0).normal(0.01, 0.02, 400)
    low, high = bootstrap_interval(differences)
    mean, error = differences.mean(), differences.std() / 20
    assert low == pytest.approx(np.expm1(mean - 1.96 * error), abs=2e-4)
    assert high == pytest.approx(np.expm1(mean + 1.96 * error), abs=2e-4)
