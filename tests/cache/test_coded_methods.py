"""Plans of coded methods: the bytes of a token in closed form, and settings that are refused."""

from dataclasses import replace

import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan

K, L, WINDOW = LLAMA.num_kv_heads, LLAMA.num_layers, 64


def plan_of(name: str, settings: dict, qk: int, v: int) -> CompressionPlan:
    plan = CompressionPlan.uniform(LLAMA, qk=qk, v=v, window=WINDOW)
    return replace(plan, method=name, settings=methods.settings_from_json(name, settings))


@pytest.mark.parametrize(
    ("name", "settings", "qk", "v", "bits"),
    [
        ("fp8", {}, 32, 32, 64 * 8),
        ("int8", {}, 32, 16, 48 * 8 + 2 * 16),
        ("kivi", {}, 32, 32, 64 * 4 + 32 * 32 / 32 + 32),
        ("kivi", {"bits": 3, "group": 16}, 16, 32, 48 * 3 + 16 * 32 / 16 + 2 * 32),
        ("turboquant", {}, 32, 32, 64 * 4 + 2 * 16),
        ("turboquant", {"bits_k": 3, "bits_v": 2}, 16, 32, 16 * 3 + 32 * 2 + 2 * 16),
    ],
    ids=str,
)
def test_a_far_token_takes_its_bits_and_no_more(name, settings, qk, v, bits):
    plan = plan_of(name, settings, qk, v)
    more = plan.bytes(1024 + 512) - plan.bytes(1024)
    assert 8 * more == 512 * K * L * bits


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("kivi", {"bits": 5}, r"bits=5 must be one of \(2, 3, 4, 8\)"),
        ("kivi", {"bits": True}, r"bits=True must be one of \(2, 3, 4, 8\)"),
        ("kivi", {"group": 1}, "group=1 must be a whole number from 2 to 1024"),
        ("kivi", {"group": 32.0}, "group=32.0 must be a whole number from 2 to 1024"),
        ("kivi", {"group": 128}, "window=64 must be at least 128"),
        ("turboquant", {"bits_k": 1}, r"bits_k=1 must be one of \(2, 3, 4, 8\)"),
        ("turboquant", {"bits_v": "4"}, r"bits_v='4' must be one of \(2, 3, 4, 8\)"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(name, settings, message):
    with pytest.raises(PlanError, match=message):
        plan_of(name, settings, 32, 32)


def test_plans_of_coded_methods_are_saved(tmp_path):
    plan = plan_of("kivi", {"bits": 2, "group": 64}, 32, 16)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
