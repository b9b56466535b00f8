"""Perplexity compared with a plain float64 computation, and the bootstrap with closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax import CompressionPlan
from zdc_jax.errors import NonFiniteError
from zdc_jax.evaluation import perplexity
from zdc_jax.evaluation.perplexity import bootstrap_interval, compare, is_far, predict, window_nll
from zdc_jax.model.transformer import Transformer


@pytest.fixture
def positions_per_block(monkeypatch):
    """Return a function that sets the positions whose logits are computed at once, for one test."""

    def set_to(block: int) -> None:
        monkeypatch.setattr(perplexity, "_POSITIONS_PER_BLOCK", block)
        perplexity.next_token_nll.clear_cache()

    yield set_to
    perplexity.next_token_nll.clear_cache()


def plain_nll(network, windows: np.ndarray) -> np.ndarray:
    """Return the mean over positions, float64 [W]."""
    return plain_token_nll(network, windows).mean(1)


def plain_token_nll(network, windows: np.ndarray) -> np.ndarray:
    """Return -log softmax at the next token, float64 [W, T-1]."""
    logits = np.asarray(network(jnp.asarray(windows)), np.float64)[:, :-1]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return -np.take_along_axis(log_p, windows[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize(
    ("length", "block", "batch"), [(33, 512, 1), (33, 8, 2), (17, 16, 4), (30, 8, 3), (2, 8, 3)]
)
@pytest.mark.matrix
def test_equals_plain_log_softmax(tiny: TinyModel, positions_per_block, length, block, batch):
    positions_per_block(block)
    windows = tiny.tokens(3, length)
    nll = window_nll(tiny.dense, windows, batch=batch)
    assert nll.dtype == np.float64
    np.testing.assert_allclose(nll, plain_nll(tiny.dense, windows), rtol=1e-5)


@pytest.mark.matrix
def test_predictions_that_are_not_finite_are_refused(tiny_opt: TinyModel):
    broken = tiny_opt.embeddings | {"tokens": tiny_opt.embeddings["tokens"].at[5].set(jnp.inf)}
    network = Transformer(tiny_opt.config, CompressionPlan.full(tiny_opt.config), broken, tiny_opt.layers)
    with pytest.raises(NonFiniteError, match="in dtype float32: check the weights"):
        predict(network, np.full((1, 8), 5, np.int32))


@pytest.mark.matrix
def test_a_model_does_not_differ_from_itself(tiny: TinyModel):
    windows = tiny.tokens(3, 20)
    nll = window_nll(tiny.dense, windows)
    report = compare(tiny.dense, predict(tiny.dense, windows), windows)
    assert report.increase == 0
    assert (report.kl, report.top1) == (0, 1)
    assert report.interval == (0, 0)
    assert report.window_increases == (0, 0, 0)
    assert report.perplexity == report.dense_perplexity == pytest.approx(np.exp(nll.mean()))
    assert report.kv_bytes == report.dense_kv_bytes == tiny.dense.plan.bytes(20, 1, "float32")


@pytest.mark.full
def test_a_plan_is_compared_window_by_window(tiny_opt: TinyModel):
    windows = tiny_opt.tokens(3, 24)
    plan = CompressionPlan.uniform(tiny_opt.config, qk=16, v=16)
    model = tiny_opt.model(plan)
    report = compare(model.network, predict(tiny_opt.dense, windows), windows, batch=2)
    ours, dense = (plain_nll(network, windows) for network in (model.network, tiny_opt.dense))
    assert report.perplexity == pytest.approx(np.exp(ours.mean()), rel=1e-5)
    assert report.increase == pytest.approx(np.exp(ours.mean() - dense.mean()) - 1, abs=1e-4)
    assert report.window_increases == pytest.approx(np.exp(ours - dense) - 1, abs=1e-4)
    assert (report.windows, report.window_length) == (3, 24)
    assert report.kv_bytes == plan.bytes(24, 1, "float32") < report.dense_kv_bytes


def test_divergence_is_that_of_every_sixteenth_token_in_float64(tiny_opt: TinyModel):
    windows = tiny_opt.tokens(3, 40)
    network = tiny_opt.model(CompressionPlan.uniform(tiny_opt.config, qk=16, v=16)).network
    report = compare(network, predict(tiny_opt.dense, windows), windows, batch=2)
    logits = (np.asarray(each(jnp.asarray(windows)), np.float64) for each in (tiny_opt.dense, network))
    dense, own = (each[:, [6, 22, 38]] for each in logits)
    dense, own = (each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in (dense, own))
    assert report.kl == pytest.approx((np.exp(dense) * (dense - own)).sum(-1).mean(), rel=1e-3)
    assert report.top1 == (dense.argmax(-1) == own.argmax(-1)).mean() < 1


@given(seed=st.integers(0, 999), window=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_far_tokens_stand_earlier_but_not_nearby(seed, window):
    windows = np.random.default_rng(seed).integers(0, 12, (2, 40))
    far = [
        [token in row[: max(t - window, 0)] and token not in row[max(t - window, 0) : t] for t, token in row_]
        for row, row_ in ((row.tolist(), list(enumerate(row.tolist()))) for row in windows)
    ]
    np.testing.assert_array_equal(is_far(windows, window), far)


@pytest.mark.full
def test_what_far_tokens_lose(tiny_llama: TinyModel):
    windows = tiny_llama.tokens(4, 96)
    plan = CompressionPlan.uniform(tiny_llama.config, qk=16, v=16, window=32)
    model = tiny_llama.model(plan)
    report = compare(model.network, predict(tiny_llama.dense, windows), windows)
    far = is_far(windows, 32)[:, 1:]
    lost = [plain_token_nll(network, windows) for network in (tiny_llama.dense, model.network)]
    means = [(dense - own)[at].mean() for dense, own, at in zip(*lost, far, strict=True)]
    assert (report.far.tokens, report.far.window) == (far.sum(), 32)
    assert report.far.retention == pytest.approx(np.exp(np.mean(means)), rel=1e-4)
    assert report.far.interval[0] < report.far.retention < report.far.interval[1]
    assert compare(tiny_llama.dense, predict(tiny_llama.dense, windows), windows).far is None


@given(ratio=st.floats(0.5, 3), windows=st.integers(1, 20))
@settings(max_examples=10, deadline=None)
def test_constant_differences_have_no_interval(ratio, windows):
    assert bootstrap_interval(np.full(windows, np.log(ratio))) == pytest.approx([ratio - 1] * 2, abs=1e-12)


@given(differences=st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=40))
@settings(max_examples=20, deadline=None)
def test_the_interval_lies_among_the_windows(differences):
    low, high = bootstrap_interval(np.array(differences))
    assert np.expm1(min(differences)) - 1e-9 <= low <= high <= np.expm1(max(differences)) + 1e-9


def test_the_interval_is_that_of_the_mean():
    # The reference is the normal approximation of a mean of many small differences.
    differences = np.random.default_rng(0).normal(0.01, 0.02, 400)
    low, high = bootstrap_interval(differences)
    mean, error = differences.mean(), differences.std() / 20
    assert low == pytest.approx(np.expm1(mean - 1.96 * error), abs=2e-4)
    assert high == pytest.approx(np.expm1(mean + 1.96 * error), abs=2e-4)


def test_more_windows_narrow_the_interval():
    differences = np.random.default_rng(0).normal(0.01, 0.02, 400)

    def width(count):
        low, high = bootstrap_interval(differences[:count])
        assert low < np.expm1(differences[:count].mean()) < high
        return high - low

    assert width(10) > width(100) > width(400)
    assert width(10) == width(10)
