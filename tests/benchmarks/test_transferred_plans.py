"""Transfer of a searched plan from a small model to a large shape, and refusals of unsupported plans."""

import json
from dataclasses import replace

import jax
import pytest
from conftest import LLAMA

from benchmarks.model.transferred_plans import check_on_kernels, is_judged, judged_quality, transferred
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.ops import attention, cache_attention, new_tokens
from zdc_jax.plan import CompressionPlan, LayerRanks

SMALL = replace(LLAMA, head_dim=64, num_kv_heads=3, num_heads=9, max_positions=8192)
LARGE = replace(LLAMA, layers=LLAMA.layers[:1] * 5, head_dim=128, num_heads=8, dtype="bfloat16")
WHOLE = Settings(bits_k=4, bits_v=4, bits_near=8)
CHOOSES = Settings(bits_k=2, bits_v=4, bits_index=8, index=32, read=192, bits_near=8)


def searched(*layers: LayerRanks) -> CompressionPlan:
    """Return a plan of the small model; settings of all layers are those of `WHOLE`."""
    config = replace(SMALL, layers=SMALL.layers[:1] * len(layers))
    near = {"window": 64, "sinks": 4}
    plan = CompressionPlan.of_layers(config, layers, **near, method="coded", settings=WHOLE)
    return plan.for_model("a model", "a basis")


PLAN = searched(LayerRanks(64, 64), LayerRanks(64, 64, settings=CHOOSES), LayerRanks(48, 64, settings=WHOLE))


def test_layers_take_what_is_kept_at_their_depth():
    plan = transferred(PLAN, LARGE, growth=2)
    assert (plan.head_dim, plan.num_kv_heads, plan.window, plan.sinks) == (128, 2, 64, 4)
    assert (plan.fingerprint, plan.basis) == ("", "")
    chooses = replace(CHOOSES, index=64, read=384)
    assert plan.layers == (
        *[LayerRanks(128, 128, settings=WHOLE)] * 2,
        *[LayerRanks(128, 128, settings=chooses)] * 2,
        LayerRanks(96, 128, settings=WHOLE),
    )


def test_ranks_of_a_plan_without_codes_go_by_the_head_dim():
    config = replace(SMALL, layers=SMALL.layers[:1] * 3)
    layers = (LayerRanks(48, 16), LayerRanks(0, 0), LayerRanks(64, 48))
    plan = transferred(CompressionPlan.of_layers(config, layers, window=64, sinks=4), LARGE, growth=2)
    first, far, last = LayerRanks(96, 32), LayerRanks(0, 0), LayerRanks(128, 96)
    assert plan.layers == (first, first, far, far, last)
    assert (plan.method, plan.window, plan.sinks) == ("zdc", 64, 4)


@pytest.mark.parametrize(
    ("index", "bits", "read", "growth", "expected"),
    [
        (32, 8, 1024, 16, (64, 4096)),
        (32, 8, 128, 0.1, (64, 128)),
        (32, 8, 200, 1, (64, 256)),
        (24, 8, 256, 1, (48, 256)),
        # An index that chooses needs a multiple of 16 bytes; any other index may have any size.
        (24, 4, 256, 1, (32, 256)),
        (24, 4, 0, 1, (48, 0)),
    ],
)
def test_sizes_are_those_that_kernels_read(index, bits, read, growth, expected):
    settings = replace(CHOOSES, index=index, bits_index=bits, read=read)
    plan = transferred(searched(LayerRanks(64, 64, settings=settings)), LARGE, growth)
    found = plan.layers[0].settings
    assert (found.index, found.read) == expected


def test_an_index_is_of_at_most_128_coordinates():
    wide = replace(LARGE, head_dim=256)
    plan = searched(LayerRanks(64, 64, settings=replace(CHOOSES, index=48)))
    assert transferred(plan, wide, 1).layers[0].settings.index == 128


def test_near_layers_and_those_that_follow_a_choice_stay_so():
    follows = replace(CHOOSES, index=0)
    plan = searched(
        LayerRanks(64, 64, settings=CHOOSES), LayerRanks(64, 64, settings=follows), LayerRanks(0, 0)
    )
    _, _, third, _, last = transferred(plan, LARGE, growth=1).layers
    assert third.settings == replace(follows, read=256)
    assert (last.qk, last.v) == (0, 0)


@pytest.fixture
def on_kernels(monkeypatch):
    for module in (attention, cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda x: None)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what can be checked without a GPU")
def test_kernels_decode_what_was_transferred(on_kernels):
    check_on_kernels(transferred(PLAN, LARGE, growth=2), LARGE, 2, 1024)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what can be checked without a GPU")
def test_the_layer_that_kernels_do_not_decode_is_named(on_kernels):
    layers = LayerRanks(64, 64), LayerRanks(64, 64, settings=replace(CHOOSES, page=16))
    plan = transferred(searched(*layers), LARGE, growth=1)
    with pytest.raises(PlanError, match=r"layer 3 of 5: .*kernels read single tokens, not pages of 16"):
        check_on_kernels(plan, LARGE, 2, 1024)


def test_an_index_that_kernels_read_at_no_size_is_refused():
    plan = searched(LayerRanks(64, 64), LayerRanks(64, 64, settings=replace(CHOOSES, bits_index=5)))
    with pytest.raises(PlanError, match="layer 1 of the plan: kernels read no index of 5 bits"):
        transferred(plan, LARGE, growth=1)


def test_quality_is_that_of_the_judged_plan(tmp_path):
    judged = tmp_path / "judged.json"
    row = {"protocol": "cached", "context": 8192, "method": "coded, found", "plan": PLAN.to_json()}
    row |= {"bytes_share": 0.25, "read_share": 0.125, "increase": 0.01, "interval": [0, 0.02]}
    row |= {"tasks": {"lookup": {"retention": 0.97}}}
    others = row | {"protocol": "exact"}, row | {"context": 4096}
    other = row | {"plan": replace(PLAN, window=128).to_json(), "method": "coded, other"}
    fits = is_judged(PLAN, judged, 8192)
    assert judged_quality(judged, fits) is None
    judged.write_text(json.dumps({"rows": [*others, other, row]}))
    quality = judged_quality(judged, fits)
    assert quality["method"] == "coded, found"
    assert quality["retention"] == {"lookup": 0.97}
    judged.write_text(json.dumps({"rows": [other]}))
    assert judged_quality(judged, fits) is None
