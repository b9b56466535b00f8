"""Compression plans: possible plans, refusals, files, and sizes."""

import json
from dataclasses import replace

import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk": 24}, "qk=24"),
        ({"v": 48}, "v=48"),
        ({"window": -1}, "window=-1"),
        ({"sinks": -4}, "sinks=-4"),
        ({"qk": 0, "window": 8}, "qk=0, v=16 must both be 0"),
        ({"qk": 0, "v": 0}, "window=0"),
    ],
)
def test_impossible_plans_are_refused_by_name(change, named):
    with pytest.raises(PlanError, match=named):
        CompressionPlan.uniform(LLAMA, **{"qk": 16, "v": 16, **change})


@pytest.mark.parametrize("sizes", [(-1,), (1.5,), (8, 0)])
def test_bytes_are_those_of_sizes_from_one(sizes):
    with pytest.raises(PlanError, match=r"(capacity|batch)="):
        CompressionPlan.full(LLAMA).bytes(*sizes)


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
        (LayerRanks(16, 32), LayerRanks(32, 32)), 2, 32, sinks=4, window=128, fingerprint="abc", basis="def"
    )
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan


def test_plans_of_another_basis_are_refused():
    plan = CompressionPlan.full(LLAMA)
    plan.check_basis("any")
    bound = plan.for_model("mine", "old")
    bound.check_basis("old")
    with pytest.raises(PlanError, match="for basis 'old', this basis is 'new'; run `zdc plan` again"):
        bound.check_basis("new")
    assert bound.for_model("") == plan


def test_plans_of_version_1_come_with_a_warning(tmp_path):
    # Only plans of calibrated models get one, since others have no basis to name. A plan saved again has
    # the current version.
    path, plan = tmp_path / "old.json", CompressionPlan.uniform(LLAMA, qk=16, v=16)
    value = plan.to_json() | {"format_version": 1}
    del value["basis"]
    path.write_text(json.dumps(value))
    assert CompressionPlan.load(path) == plan
    path.write_text(json.dumps(value | {"fingerprint": "abc"}))
    with pytest.warns(UserWarning, match=r"old\.json: format_version=1 .* run `zdc plan` again"):
        found = CompressionPlan.load(path)
    assert found == plan.for_model("abc")
    found.save(path)
    assert CompressionPlan.load(path) == found


def test_settings_of_single_layers_are_kept(tmp_path):
    # They are in the layer's line, and a layer without settings has the plan's.
    path, own = tmp_path / "plan.json", methods.settings_from_json("coded", {"bits_k": 3, "index": 8})
    layers = LayerRanks(16, 32, settings=own), LayerRanks(0, 0), LayerRanks(32, 32)
    plan = CompressionPlan(layers, 2, 32, window=8, method="coded")
    plan.save(path)
    (line,) = [line for line in path.read_text().splitlines() if '"bits_k": 3' in line]
    assert '"qk": 16' in line
    assert CompressionPlan.load(path) == plan
    assert [plan.settings_of(index).bits_k for index in range(3)] == [3, 8, 8]
    assert [plan.rotations(index) for index in range(3)] == [((8, 8), (32,)), ((), ()), ((32,), (32,))]


def test_no_more_is_read_than_a_model_has_positions():
    settings = methods.settings_from_json("loki", {"read": LLAMA.max_positions + 1})
    plan = replace(CompressionPlan.full(LLAMA), method="loki", settings=settings)
    with pytest.raises(PlanError, match="layer 0: read=257 far tokens must be at most 256"):
        plan.check_model(LLAMA, "")


def test_plans_of_version_2_load(tmp_path):
    path, plan = tmp_path / "old.json", CompressionPlan.uniform(LLAMA, qk=16, v=16, window=8)
    path.write_text(json.dumps(plan.to_json() | {"format_version": 2}))
    assert CompressionPlan.load(path) == plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits_k": 7}, r"bits_k=7 must be one of \(2, 3, 4, 5, 6, 8\)"),
        ({"bits_index": 16}, "bits_index=16 must be one of"),
        ({"index": 12}, "index=12 must be a multiple of 8"),
        ({"index": 32}, "index=32 must be from 1 to 31"),
        ({"read": -1}, "read=-1 must be an integer from 0"),
        ({"index": 32, "read": 256}, "index=32 must be from 0 to 31"),
        (
            {"index": 0, "read": 256},
            "layer 0: index=0 with read=256 and page=1 must follow a layer with an index",
        ),
    ],
)
def test_impossible_codes_are_refused(settings, message):
    value = CompressionPlan.full(LLAMA).to_json() | {"method": "coded", "settings": settings}
    with pytest.raises(PlanError, match=message):
        CompressionPlan.from_json(value, "plan.json")


def test_settings_of_another_method_are_refused():
    layer = LayerRanks(32, 32, settings=methods.settings_from_json("kivi", {}))
    with pytest.raises(PlanError, match=r"layer 0: settings=.* are not those of method 'coded'"):
        CompressionPlan((layer,), 2, 32, method="coded")
    value = CompressionPlan.full(LLAMA).to_json() | {
        "method": "coded",
        "rotated": False,
        "settings": {"index": 8},
    }
    with pytest.raises(PlanError, match=r"index=8: .* run `zdc calibrate MODEL TEXT`, or set index=0"):
        CompressionPlan.from_json(value, "plan.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 10**5, '{"format_version": 3}', '{"format_version": 1}'),
        '{"format_version": 2, "layers": [3]}',
        # Ranks up to this head dim must not be enumerated.
        '{"format_version": 2, "layers": [{"qk": 8, "v": 8}], "num_kv_heads": 1, "head_dim": 2147483647}',
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
        ("layers", [{"qk": 16.0, "v": 16}] * 3, "layer 0: qk=16.0 must be an int"),
        ("fingerprint", 7, "fingerprint=7 must be a string"),
        ("basis", None, "basis=None must be a string"),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": None}, "the plan: missing 'layers'"),
        ({"head_dim": None}, "the plan: missing 'head_dim'"),
        ({"colour": "red"}, "the plan: unknown 'colour'; known are layers, num_kv_heads, head_dim, sinks"),
        ({"layers": 3}, "layers=3 must be a list"),
        ({"layers": [3]}, r"layers\[0\]: 3 must be a JSON object"),
        ({"layers": [{"qk": 16, "v": 16}, {"qk": 16}]}, r"layers\[1\]: missing 'v'"),
        ({"layers": [{"qk": 16, "v": 16, "w": 1}]}, r"layers\[0\]: unknown 'w'; known are qk, v, window"),
        ({"settings": {"bit": 4}}, "settings of method 'kivi': unknown 'bit'; known are bits"),
        ({"settings": [4]}, r"settings of method 'kivi': \[4\] must be a JSON object"),
    ],
)
def test_broken_files_are_told_what_is_wrong(tmp_path, change, message):
    # A change to None removes the field.
    path = tmp_path / "plan.json"
    value = CompressionPlan.full(LLAMA).to_json() | {"method": "kivi", "window": 32} | change
    path.write_text(json.dumps({name: item for name, item in value.items() if item is not None}))
    with pytest.raises(PlanError, match=rf"plan\.json: is not a plan of `zdc plan`: {message}"):
        CompressionPlan.load(path)


def test_token_classes_of_earlier_releases_are_refused(tmp_path):
    path, plan = tmp_path / "plan.json", CompressionPlan.full(LLAMA)
    path.write_text(json.dumps(plan.to_json() | {"classes": None}))
    assert CompressionPlan.load(path) == plan
    path.write_text(json.dumps(plan.to_json() | {"classes": {"leaders": [0]}}))
    with pytest.raises(PlanError, match=r"plan\.json: classes: .* `zdc plan --mode classes`"):
        CompressionPlan.load(path)


def test_bytes_of_the_published_example():
    # R=16, Z=32 of 64, window 128, 4 sinks (8 slots), 4096 tokens: 39.6 % of dense.
    plan = CompressionPlan((LayerRanks(16, 32),) * 12, 3, 64, sinks=4, window=128)
    dense = CompressionPlan((LayerRanks(64, 64),) * 12, 3, 64)
    by_hand = 12 * 3 * 2 * (4096 * (16 + 32) + 136 * (48 + 32)) + 4
    assert plan.bytes(4096) == by_hand
    assert by_hand / dense.bytes(4096) == pytest.approx(0.396, abs=5e-4)
