"""Plans: what is possible, what is refused, what is written, what it weighs."""

import json

import numpy as np
import pytest
from conftest import LLAMA
from hypothesis import given
from hypothesis import strategies as st

from zdc_jax.errors import PlanError
from zdc_jax.plan import MAX_DISTINCT_RANKS, CompressionPlan, LayerRanks, allowed_ranks


def spectra(layers: int = 12, heads: int = 3, dim: int = 64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.2, 3, (layers, heads, 1))
    return -np.sort(-np.abs(rng.normal(size=(layers, heads, dim))) * scale, axis=-1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk": 24}, "qk=24"),
        ({"v": 48}, "v=48"),
        ({"window": -1}, "window=-1"),
        ({"sinks": -4}, "sinks=-4"),
        ({"qk": 0, "window": 8}, "qk=0, v=16"),
        ({"qk": 0, "v": 0}, "window=0"),
    ],
)
def test_impossible_plans_are_refused_by_name(change, named):
    with pytest.raises(PlanError, match=named):
        CompressionPlan.uniform(LLAMA, **{"qk": 16, "v": 16, **change})


def test_head_dims_that_are_no_multiple_of_the_step_keep_their_own_size():
    assert allowed_ranks(80) == (0, 16, 32, 48, 64, 80)
    assert allowed_ranks(8) == (0, 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": (LayerRanks(16, 16),) * 2}, "layers=2"),
        ({"num_kv_heads": 7}, "num_kv_heads=7"),
        ({"fingerprint": "other"}, "'other'"),
    ],
)
def test_plans_of_another_model_are_refused(change, named):
    fields = {"layers": (LayerRanks(16, 16),) * 3, "num_kv_heads": 2, "head_dim": 32} | change
    with pytest.raises(PlanError, match=named):
        CompressionPlan(**fields).check_model(LLAMA, "mine")


def test_json_round_trip(tmp_path):
    plan = CompressionPlan(
        (LayerRanks(16, 32), LayerRanks(32, 32)), 2, 32, sinks=4, window=128, fingerprint="abc"
    )
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 10**5, '{"format_version": 2}', '{"format_version": 1}'),
        '{"format_version": 1, "layers": [3]}',
        # Ranks up to such a head dim must not be listed.
        '{"format_version": 1, "layers": [{"qk": 8, "v": 8}], "num_kv_heads": 1, "head_dim": 2147483647}',
    ],
)
def test_corrupt_files_are_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        CompressionPlan.load(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", 12.5, "window=12.5 must be an int"),
        ("window", True, "window=True must be an int"),
        ("window", "a", "window='a' must be an int"),
        ("sinks", 2**31, "must be 0 to 2147483647 tokens"),
        ("layers", [{"qk": 16.0, "v": 16}] * 3, "layer 0: rank qk=16.0 must be an int"),
        ("fingerprint", 7, "fingerprint=7 must be a string"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, field, value, message):
    path = tmp_path / "plan.json"
    CompressionPlan.full(LLAMA).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(PlanError, match=rf"plan\.json: .*{message}"):
        CompressionPlan.load(path)


def test_missing_file_and_unknown_field_are_refused(tmp_path):
    with pytest.raises(PlanError, match="nowhere"):
        CompressionPlan.load(tmp_path / "nowhere.json")
    path = tmp_path / "plan.json"
    CompressionPlan.full(LLAMA).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    with pytest.raises(PlanError, match="colour"):
        CompressionPlan.load(path)


def test_bytes_of_the_published_example():
    """R=16, Z=32 of 64, window 128, 4 sinks (8 rows), 4096 tokens: 39.6 % of dense."""
    plan = CompressionPlan((LayerRanks(16, 32),) * 12, 3, 64, sinks=4, window=128)
    dense = CompressionPlan((LayerRanks(64, 64),) * 12, 3, 64)
    by_hand = 12 * 3 * 2 * (4096 * (16 + 32) + 136 * (48 + 32)) + 4
    assert plan.bytes(4096) == by_hand
    assert by_hand / dense.bytes(4096) == pytest.approx(0.396, abs=5e-4)


@given(
    budget=st.floats(0.1, 1.0),
    qk_share=st.floats(0.25, 0.75),
    window=st.sampled_from([0, 128]),
    seed=st.integers(0, 100),
)
def test_from_spectrum_keeps_the_budget_with_few_kernels(budget, qk_share, window, seed):
    qk, vo = spectra(seed=seed), spectra(seed=seed + 1000)
    least = 16 / 128 / min(qk_share, 1 - qk_share) + 0.01
    budget = max(budget, least)
    plan = CompressionPlan.from_spectrum(qk, vo, budget=budget, qk_share=qk_share, window=window)
    assert len(set(plan.layers)) <= MAX_DISTINCT_RANKS
    mean = np.mean([(r.qk + r.v) / 128 for r in plan.layers])
    # Merging rare pairs may move a few layers by a step.
    assert mean <= budget + 0.06


def test_from_spectrum_gives_ranks_where_the_energy_is():
    qk = np.full((2, 1, 64), 0.01)
    qk[1] = 1.0
    plan = CompressionPlan.from_spectrum(qk, qk, budget=0.5, qk_share=0.5)
    assert plan.layers[0].qk < plan.layers[1].qk
    assert sum(r.qk for r in plan.layers) == 64


def test_layers_cut_off_keep_nothing_beyond_the_window():
    far = [True] * 6 + [False] * 6
    plan = CompressionPlan.from_spectrum(spectra(), spectra(), budget=0.15, qk_share=0.5, window=64, far=far)
    assert all((r.qk > 0) == is_far == (r.v > 0) for r, is_far in zip(plan.layers, far, strict=True))
    with pytest.raises(PlanError, match="far must name 12 layers, got 2"):
        CompressionPlan.from_spectrum(spectra(), spectra(), budget=0.5, far=[True, False])


@pytest.mark.parametrize(("field", "value"), [("budget", 0), ("budget", 1.5), ("qk_share", 1.0)])
def test_from_spectrum_names_bad_shares(field, value):
    with pytest.raises(PlanError, match=field):
        CompressionPlan.from_spectrum(spectra(), spectra(), **{"budget": 0.5, field: value})


def test_from_spectrum_says_the_least_possible_budget():
    with pytest.raises(PlanError, match="the least possible is 192"):
        CompressionPlan.from_spectrum(spectra(), spectra(), budget=0.05)
