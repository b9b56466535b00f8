"""Plans of quantizing methods: bytes per token in closed form, and refused settings."""

from dataclasses import replace

import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.integers import ChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.late_store import LateStore
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks

K, L, WINDOW = LLAMA.num_kv_heads, LLAMA.num_layers, 64


def plan_of(name: str, settings: dict, qk: int, v: int) -> CompressionPlan:
    plan = CompressionPlan.uniform(LLAMA, qk=qk, v=v, window=WINDOW)
    return replace(plan, method=name, settings=methods.settings_from_json(name, settings))


def gear(qk: int, v: int, *, bits: int, group: int, rank: int, outliers: tuple[int, int]) -> float:
    """Return the bits per token of GEAR.

    outliers: on each side, per channel of keys and per token of values.
    """
    integers = (qk + v) * bits + 32 * qk / group + 32
    low_rank = 16 * rank * (2 * group + qk + v) / group
    return integers + low_rank + (16 + 8) * 2 * (outliers[0] * qk / group + outliers[1])


@pytest.mark.parametrize(
    ("name", "settings", "qk", "v", "bits"),
    [
        ("fp8", {}, 32, 32, 64 * 8),
        ("int8", {}, 32, 16, 48 * 8 + 2 * 16),
        ("kivi", {}, 32, 32, 64 * 4 + 32 * 32 / 32 + 32),
        ("kivi", {"bits": 3, "group": 16}, 16, 32, 48 * 3 + 16 * 32 / 16 + 2 * 32),
        ("turboquant", {}, 32, 32, 64 * 4 + 2 * 16),
        ("turboquant", {"bits_k": 3, "bits_v": 2}, 16, 32, 16 * 3 + 32 * 2 + 2 * 16),
        ("coded", {}, 32, 16, 48 * 8 + 2 * 8),
        ("coded", {"bits_k": 5, "bits_v": 4}, 32, 16, 32 * 5 + 16 * 4 + 2 * 8),
        ("oscar", {}, 32, 32, 64 * 2 + 2 * 32),
        ("oscar", {"bits": 3, "group": 8}, 16, 32, 48 * 3 + (2 + 4) * 32),
        ("oscar_free", {}, 32, 32, 64 * 2 + 32 * 32 / 32 + 32 + 16),
        (
            "coded",
            {"read": 0, "index": 8, "bits_index": 6, "bits_k": 2, "bits_v": 3},
            32,
            16,
            8 * 6 + 24 * 2 + 16 * 3 + 3 * 8,
        ),
        (
            "coded",
            {"index": 16, "read": 256, "bits_k": 2, "page": 16},
            32,
            16,
            16 * 8 + 16 * 2 + 16 * 8 + 3 * 8,
        ),
        ("gear", {}, 32, 32, gear(32, 32, bits=4, group=64, rank=2, outliers=(1, 0))),
        (
            "gear",
            {"bits": 2, "group": 32, "rank": 3, "outliers": 0.1},
            16,
            32,
            gear(16, 32, bits=2, group=32, rank=3, outliers=(2, 2)),
        ),
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
        ("kivi", {"group": 1}, "group=1 must be an integer from 2 to 1024"),
        ("kivi", {"group": 32.0}, "group=32.0 must be an integer from 2 to 1024"),
        ("kivi", {"group": 128}, "window=64 must be at least 128"),
        ("turboquant", {"bits_k": 1}, r"bits_k=1 must be one of \(2, 3, 4, 8\)"),
        ("turboquant", {"bits_v": "4"}, r"bits_v='4' must be one of \(2, 3, 4, 8\)"),
        ("oscar", {"bits": 5}, r"bits=5 must be one of \(2, 3, 4, 8\)"),
        ("oscar", {"group": 1}, "group=1 must be an integer from 2 to 1024"),
        ("oscar", {"clip_k": 0}, "clip_k=0 must be a share above 0, at most 1"),
        ("oscar", {"clip_v": 1.5}, "clip_v=1.5 must be a share above 0, at most 1"),
        ("oscar_free", {"bits": 1}, r"bits=1 must be one of \(2, 3, 4, 8\)"),
        ("oscar_free", {"group": 128}, "window=64 must be at least 128"),
        ("gear", {"bits": 1}, r"bits=1 must be one of \(2, 3, 4, 8\)"),
        ("gear", {"group": 12}, r"group=12 must be one of \(8, 16, .*, 256\)"),
        ("gear", {"rank": -1}, "rank=-1 must be an integer from 0 to 256"),
        ("gear", {"rank": 33}, r"rank=33 must be at most 32, for blocks \[64, 32\]"),
        ("gear", {"outliers": 0.6}, "outliers=0.6 must be a share from 0 to 0.5"),
        ("gear", {"outliers": "0.1"}, "outliers='0.1' must be a share from 0 to 0.5"),
        ("gear", {"group": 128}, "window=64 must be at least 128"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(name, settings, message):
    with pytest.raises(PlanError, match=message):
        plan_of(name, settings, 32, 32)


@pytest.mark.parametrize(
    ("head_dim", "context", "share"),
    [(128, 4096, 20.8), (128, 8192, 17.4), (128, 32_768, 14.9), (64, 8192, 18.9)],
)
def test_oscar_takes_the_bytes_of_the_paper(head_dim, context, share):
    # 2 bits and two numbers of 16 bits for each group, and 64 + 256 tokens in 16 bits.
    layers = tuple(LayerRanks(head_dim, head_dim) for _ in range(2))
    full = CompressionPlan(layers, num_kv_heads=8, head_dim=head_dim)
    plan = replace(
        full, sinks=64, window=256, method="oscar", settings=methods.settings_from_json("oscar", {})
    )
    assert 100 * plan.bytes(context) / full.bytes(context) == pytest.approx(share, abs=0.2)


def test_oscar_needs_a_calibrated_basis():
    with pytest.raises(PlanError, match="rotated=False: method 'oscar' needs a calibrated basis"):
        replace(plan_of("oscar", {}, 32, 32), rotated=False)


def test_a_late_store_refuses_what_it_cannot_delay():
    options = {"num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "R": 16, "Z": 16, "window": 32}
    with pytest.raises(PlanError, match="block=16: must be 1"):
        LateStore(**options, key_code=ChannelIntegers(4, 16), value_code=TokenIntegers(4, 16))
    with pytest.raises(PlanError, match=r"near_code=.*: must be None"):
        LateStore(
            **options,
            key_code=TokenIntegers(4, 16),
            value_code=TokenIntegers(4, 16),
            near_code=FittedIntegers(8),
        )


def test_plans_of_coded_methods_are_saved(tmp_path):
    plan = plan_of("kivi", {"bits": 2, "group": 64}, 32, 16)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
