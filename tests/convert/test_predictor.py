"""Profiles compared with plain attention, the regression on plans of known cost, and `choose_plan`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel, calibrated_folder

from benchmarks.studies.fit_predictor import Observations, fit, predict_nats
from convert.calibration.calibrate import CalibrationOptions, calibrate
from convert.calibration.collect_profile import collect_profile, whole_plan
from convert.conversion import convert
from convert.search.trials import TrialBook
from zdc_jax import Checkpoint, CompressionPlan, choose_plan, load
from zdc_jax.errors import CalibrationError, CheckpointError, MeshError, PlanError, TextError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import stored_basis
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.choose import CHECK_SEED, CHECK_WINDOWS
from zdc_jax.planning.layer_costs import rank_levels
from zdc_jax.planning.predictor import Predictor, Weights
from zdc_jax.planning.profile import SINKS, Profile, stored_profile, windows_for

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with model/, converted and calibrated, and text/."""
    return calibrated_folder(tmp_path_factory.mktemp("predictor"), CONTEXT)


def profile_of(tiny: TinyModel, tokens: np.ndarray) -> Profile:
    network = tiny.model(whole_plan(tiny.dense.config)).network
    return collect_profile(network, tokens, fingerprint="x")


@pytest.mark.full
def test_the_profile_is_what_far_keys_write(tiny):
    # The reference is the first layer in float64 with plain softmax, in the rotated basis.
    tokens = tiny.tokens(2, 96)
    found = profile_of(tiny, tokens)
    network = tiny.model(whole_plan(tiny.dense.config)).network
    block, window, rank = network.layers[0], windows_for(96)[0], int(found.ranks[0])
    changes, whole = np.zeros(3), 0.0
    for row in tokens:
        positions = jnp.arange(96)[None]
        x = network.embeddings.embed(jnp.asarray(row[None]), positions)
        q, k, v = block.attention.project(block.attention_norm(x), positions)
        q, k, v = (np.asarray(y[0], np.float64) for y in (q, k.keys, v))
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
        H, t, j = q.shape[-1], np.arange(96)[:, None], np.arange(96)
        near = (j < SINKS) | (j > t - window)

        def attended(R, Z, q=q, k=k, v=v, near=near, t=t, j=j, H=H):
            def score(width):
                return np.einsum("tnh,snh->nts", q[..., :width], k[..., :width]) * H**-0.5

            visible = (j <= t) & (near | (R > 0))
            weights = np.where(visible, np.exp(np.where(near, score(H), score(R))), 0)
            weights /= weights.sum(-1, keepdims=True)
            far = np.einsum("nts,snh->tnh", np.where(near, 0, weights), v) * (np.arange(H) < Z)
            o = np.einsum("nts,snh->tnh", np.where(near, weights, 0), v) + far
            return np.asarray(block.attention.output(jnp.asarray(o[None], jnp.float32)), np.float64)

        all_of_it = attended(H, H)
        for index, (R, Z) in enumerate(((0, 0), (rank, H), (H, rank))):
            changes[index] += np.square(attended(R, Z) - all_of_it).sum()
        whole += np.square(np.asarray(x, np.float64)).sum()
    assert found.far_write[0, 0] == pytest.approx(np.sqrt(changes[0] / whole), rel=1e-3)
    assert found.score_error[0, 0] == pytest.approx(np.sqrt(changes[1] / changes[0]), rel=1e-3)
    assert found.value_error[0, 0] == pytest.approx(np.sqrt(changes[2] / changes[0]), rel=1e-3)


@pytest.mark.full
def test_the_profile_is_what_cutting_off_a_layer_costs(tiny):
    # The reference models keep everything except one layer's far tokens.
    tokens = tiny.tokens(2, 96)
    found = profile_of(tiny, tokens)
    dense = window_nll(tiny.dense, tokens).mean()
    full = CompressionPlan.full(tiny.dense.config)
    for layer in range(len(full.layers)):
        ranks = [LayerRanks(0, 0) if i == layer else kept for i, kept in enumerate(full.layers)]
        plan = replace(full, layers=tuple(ranks), window=windows_for(96)[0], sinks=SINKS)
        want = window_nll(tiny.model(plan).network, tokens).mean() - dense
        assert found.far_nats[layer] == pytest.approx(want, abs=2e-5)


def test_a_profile_comes_back_as_it_was_saved(tmp_path):
    draw = np.random.default_rng(0).random
    windows, ranks = np.array([64, 128], np.int32), np.array([16], np.int32)
    profile = Profile(draw(3), draw((3, 2)), draw((3, 1)), draw((3, 1)), windows, ranks, "x")
    profile.save(tmp_path / "profile")
    again = Profile.load(tmp_path / "profile")
    np.testing.assert_array_equal(again.far_write, profile.far_write)
    assert again.fingerprint == "x"
    replace(profile, windows=np.array([64])).save(tmp_path / "profile")
    with pytest.raises(CheckpointError, match="far_write"):
        Profile.load(tmp_path / "profile")


@pytest.mark.full
def test_a_basis_without_text_takes_the_profile_away(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    options = CalibrationOptions(qk="stacked", vo="stacked")
    calibrate(tmp_path / "model", [], options, overwrite=True, progress=False)
    assert not (tmp_path / "model" / "calibration" / "profile").exists()


TRUE = Weights(
    cut=jnp.array([0.5, -0.3]),
    nats=jnp.array(0.8),
    window=jnp.array(2.0),
    qk=jnp.array([-1.5, -0.5]),
    qk_power=jnp.array(0.2),
    v=jnp.array([-2.0, 0.8]),
    v_power=jnp.array(0.4),
    floor=jnp.array([-7.0, -2.0]),
)


def observations(seed: int, layers: int, *, rotary: bool) -> Observations:
    """Return plans of an invented model whose costs follow `TRUE`, with noise."""
    rng, head_dim = np.random.default_rng(seed), 64
    levels = rank_levels(head_dim)

    def error():
        return np.sort(rng.random((layers, len(levels) - 1)), axis=1)[:, ::-1]

    choices = [(0, 0), *((r, z) for r in levels for z in levels)]
    plans = tuple(
        (128, tuple(choices[i] for i in rng.integers(len(choices), size=layers))) for _ in range(60)
    )
    ranks, cost = np.array(levels[:-1]), np.exp(rng.normal(-5, 1, layers))
    write = np.ones((layers, 1))
    features = np.array([128]), ranks, write, cost, error(), error()
    empty = Observations(f"m{seed}", rotary, head_dim, *features, plans, np.zeros(60))
    nats = np.asarray(predict_nats(TRUE, empty.features())) * np.exp(rng.normal(0, 0.1, 60))
    return replace(empty, nats=nats)


@pytest.mark.full
def test_the_fit_foretells_plans_of_an_unseen_model(tmp_path):
    models = [observations(seed, 5 + seed, rotary=seed % 2 == 0) for seed in range(4)]
    predictor = fit(models)
    unseen = observations(9, 8, rotary=True)
    ratio = np.log(np.asarray(predict_nats(predictor.weights, unseen.features())) / unseen.nats)
    assert np.abs(ratio).mean() < 0.25
    assert 1 <= predictor.margin < 2
    again = Predictor.from_json(predictor.to_json())
    np.testing.assert_allclose(again.weights.cut, predictor.weights.cut, atol=1e-4)
    unseen.save(tmp_path / "x.json")
    np.testing.assert_allclose(Observations.load(tmp_path / "x.json").nats, unseen.nats, atol=1e-6)


def test_observations_are_written_whole_or_not_at_all(tmp_path, full_disk):
    (tmp_path / "x.json").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        observations(0, 3, rotary=True).save(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_bytes() == b"old"


def test_one_model_is_too_few():
    with pytest.raises(PlanError, match="two models"):
        fit([observations(0, 3, rotary=True)])


def test_foreign_json_is_refused(tmp_path):
    with pytest.raises(PlanError, match="not a predictor"):
        Predictor.from_json('{"weights": {"cut": [1, 2]}}')
    (tmp_path / "x.json").write_text('{"name": "x"}')
    with pytest.raises(PlanError, match="not a file of observations"):
        Observations.load(tmp_path / "x.json")


@pytest.mark.full
def test_higher_limits_keep_less(folder):
    book = TrialBook(folder / "model", np.zeros((1, CONTEXT), np.int32))
    profile = Profile.load(folder / "model" / "calibration" / "profile")

    def plan(limit):
        return Predictor.stored().plan(book.config, profile, max_degradation=limit, context=CONTEXT)

    sizes = [plan(limit).bytes(CONTEXT) for limit in (1e-6, 0.001, 0.01, 0.1, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert plan(1e-6).layers == CompressionPlan.full(book.config).layers
    assert sizes[-1] < sizes[0]
    with pytest.raises(PlanError, match="max_degradation=0 must lie strictly between 0 and 1"):
        plan(0)


@pytest.mark.full
def test_an_unchecked_plan_has_a_margin_and_a_warning(folder):
    checkpoint = Checkpoint.open(folder / "model")
    with pytest.warns(UserWarning, match=r"is a prediction .*, not a measurement"):
        plan = choose_plan(folder / "model", max_degradation=0.5)
    assert plan.bytes(CONTEXT) <= CompressionPlan.full(checkpoint.config).bytes(CONTEXT)
    assert plan.fingerprint == checkpoint.fingerprint
    assert plan.basis == stored_basis(checkpoint).coordinates_hash


@pytest.mark.parametrize("method", ["zdc", "coded"])
@pytest.mark.full
def test_a_checked_plan_holds_the_limit_on_all_of_the_text(folder, method):
    checkpoint = Checkpoint.open(folder / "model")
    asked = {"max_degradation": 0.5, "check_text": folder / "text", "method": method}
    plan = choose_plan(folder / "model", **asked)
    assert plan.method == method
    assert plan.bytes(CONTEXT) < CompressionPlan.full(checkpoint.config).bytes(CONTEXT)
    assert plan.fingerprint == checkpoint.fingerprint
    assert plan.basis == stored_basis(checkpoint).coordinates_hash
    checked = load(folder / "model", plan)
    options = {"length": CONTEXT, "num_windows": CHECK_WINDOWS, "seed": CHECK_SEED}
    windows, _ = token_windows(
        read_documents([folder / "text"]), checked.tokenizer, **options, eos_id=checked.config.eos_ids[0]
    )
    dense = window_nll(load(folder / "model").network, windows)
    assert np.expm1((window_nll(checked.network, windows) - dense).mean()) <= 0.5


@pytest.mark.full
def test_plans_within_a_limit_on_calibrated_error(folder):
    basis = stored_basis(Checkpoint.open(folder / "model"))
    plan = choose_plan(folder / "model", max_score_error=0.3)
    assert plan == plan_from_error(basis, max_score_error=0.3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, PlanError, "pass one of them"),
        ({"max_score_error": 1.0}, PlanError, "max_score_error=1.0 must lie"),
        ({"max_degradation": 0.1, "dtype": "float99"}, CheckpointError, "float99"),
        ({"max_degradation": 0.1, "payload": "float8"}, MeshError, "pass mesh="),
        ({"max_degradation": 0.0}, PlanError, "max_degradation=0.0 must lie"),
        ({"max_degradation": -0.5}, PlanError, "max_degradation=-0.5 must lie"),
        ({"max_degradation": -1.0, "check_text": "missing"}, PlanError, "max_degradation=-1.0"),
        ({"max_degradation": 0.1, "check_text": []}, TextError, "no text"),
        ({"max_degradation": 0.1, "max_score_error": 0.1}, PlanError, "pass one of them"),
        ({"check_text": "x"}, PlanError, "pass max_degradation="),
        (
            {"max_degradation": 0.1, "check_text": "missing"},
            TextError,
            "text='missing': no such file or folder",
        ),
        ({"max_degradation": 0.1, "method": "coded"}, PlanError, "pass max_degradation= and check_text="),
        (
            {"max_degradation": 0.1, "check_text": "x", "method": "coded", "mesh": "sequence=2"},
            PlanError,
            "method='coded' does not support a mesh",
        ),
        ({"max_degradation": 0.1, "method": "int8"}, PlanError, "method='int8' must be one of"),
        ({"max_degradation": 0.1, "dtype": "float32"}, PlanError, "dtype='float32' .*; pass check_text="),
        ({"max_score_error": 0.3, "mesh": "sequence=2"}, PlanError, "mesh=MeshConfig.*; pass check_text="),
    ],
)
def test_impossible_limits(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        choose_plan(folder / "model", **arguments)


def test_what_is_no_plan_is_not_loaded(folder):
    with pytest.raises(PlanError, match="must be a CompressionPlan or the path"):
        load(folder / "model", {"window": 1})


def test_text_shorter_than_a_window(folder, tmp_path):
    (tmp_path / "short.txt").write_text("w3 w4 w5")
    with pytest.raises(TextError):
        choose_plan(folder / "model", max_degradation=0.1, check_text=tmp_path / "short.txt")


def test_a_folder_without_profile(folder, tmp_path):
    convert(folder / "hf", tmp_path / "bare", progress=False)
    source = Checkpoint.open(folder / "model").calibration_path / "basis"
    target = Checkpoint.open(tmp_path / "bare").calibration_path
    target.mkdir(exist_ok=True)
    (target / "basis").symlink_to(source)
    with pytest.raises(CalibrationError, match="no profile"):
        choose_plan(tmp_path / "bare", max_degradation=0.1)
    stolen = Profile.load(source.parent / "profile")
    replace(stolen, fingerprint="other").save(target / "profile")
    with pytest.raises(CalibrationError, match="the profile was made for model 'other'"):
        choose_plan(tmp_path / "bare", max_degradation=0.1)


def test_a_profile_is_of_its_basis(folder, tmp_path):
    # An old profile without a recorded basis fits any basis.
    checkpoint = Checkpoint.open(folder / "model")
    basis, profile = stored_basis(checkpoint), stored_profile(checkpoint, stored_basis(checkpoint))
    assert profile.basis == basis.coordinates_hash
    other = replace(basis, k_map=2 * basis.k_map)
    message = f"the profile was made for basis '{profile.basis}', this basis is '{other.coordinates_hash}'"
    with pytest.raises(CalibrationError, match=message):
        choose_plan(folder / "model", max_degradation=0.1, basis=other)
    shutil.copytree(folder / "model", tmp_path / "model")
    path = tmp_path / "model" / "calibration" / "profile" / "profile.json"
    values = json.loads(path.read_text())
    del values["basis"]
    path.write_text(json.dumps(values))
    assert stored_profile(Checkpoint.open(tmp_path / "model"), other).basis == ""


def test_the_stored_predictor_names_its_models():
    predictor = Predictor.stored()
    assert len(predictor.models) >= 8
    assert predictor.margin >= 1
    assert json.loads(predictor.to_json())["models"] == list(predictor.models)
