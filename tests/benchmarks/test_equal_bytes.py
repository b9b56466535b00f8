"""Plans at a budget, the data that judges them, and the JSON of the comparison at equal bytes."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.equal_bytes import merge, save
from benchmarks.quality.kvpress_check import plan_of
from benchmarks.quality.material import Material, _alike, measure
from benchmarks.quality.plans import BUDGETS, FIRST, method_plan, others, share_held, share_read
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.questions import Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.plan import CompressionPlan

WIDE = replace(LLAMA, embed_dim=256, head_dim=64)
"""The smallest head dim for which the table names ranks."""


def HEADS(n):
    return tuple(tuple(h for h in range(2) if 2 * layer + h < n) for layer in range(3))


ENTRIES = (*FIRST, *others(HEADS))
CONTEXT = 2048


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
@pytest.mark.matrix
def test_a_plan_spends_its_budget(entry):
    # A plan stays within its budget, and one step more would exceed it.
    held, refused = 0, []
    for budget in entry.budgets:
        share = share_held if entry.judged_by == "bytes" else share_read
        try:
            plan = entry.at_budget(WIDE, CONTEXT, budget, "bfloat16")
        except PlanError as error:
            refused.append(str(error))
            continue
        held += 1
        assert budget - 0.08 < share(plan, CONTEXT, "bfloat16") <= budget
    assert held
    assert all(f"{entry.name} takes at least" in reason for reason in refused)


def test_bytes_are_those_of_the_whole_cache():
    plan = method_plan(WIDE, "window", window=512, sinks=0)
    assert share_held(plan, CONTEXT, "bfloat16") == pytest.approx(512 / CONTEXT, rel=1e-4)
    plan = method_plan(WIDE, "int8")
    assert share_held(plan, CONTEXT, "bfloat16") == pytest.approx((64 + 2) / 128, rel=1e-4)
    assert tuple(sorted(BUDGETS, reverse=True)) == BUDGETS


def test_plans_that_follow_kvpress_keep_as_many_tokens():
    for label, kept in (("knorm-0.5", 512), ("snapkv-0.75", 256), ("observed-0.25", 768)):
        plan = plan_of(label, WIDE, 1024)
        assert plan is not None
        assert plan.settings.kept + plan.window == kept
    assert plan_of("dense", WIDE, 1024) is None
    with pytest.raises(ValueError, match="quest"):
        plan_of("quest-0.5", WIDE, 1024)


@given(items=st.integers(1, 60), most=st.integers(1, 70))
def test_groups_are_alike_and_lose_nothing(items, most):
    groups = list(_alike(list(range(items)), most))
    assert [i for group in groups for i in group] == list(range(items))
    assert len({len(group) for group in groups}) == 1
    assert len(groups[0]) <= most


@pytest.mark.parametrize("protocol", ["cached", "exact"])
@pytest.mark.matrix
@pytest.mark.full
def test_an_unmodified_model_retains_all(protocol, monkeypatch):
    # Under each protocol only the cache is judged, and perplexity is that of a plain forward pass.
    monkeypatch.setattr("benchmarks.quality.material.CONTINUATION", 128)
    rng = np.random.default_rng(0)

    def tokens(*shape):
        return rng.integers(3, 96, shape).astype(np.int32)

    question = Question(tokens(8), np.arange(8) >= 4)
    documents = tuple(TaskDocument(tokens(64), {"recall": (question,)}) for _ in range(2))
    network = TinyModel(LLAMA).model(CompressionPlan.full(LLAMA)).network
    windows = tokens(2, 256)
    found = measure(network, Material(windows, ("a", "b"), documents), protocol)
    logits = np.asarray(network(jnp.asarray(windows)), np.float64)
    nll = (
        np.log(np.exp(logits).sum(-1))[:, :-1]
        - np.take_along_axis(logits[:, :-1], windows[:, 1:, None], axis=-1)[..., 0]
    )
    expected = nll if protocol == "cached" else nll[:, 128:]
    np.testing.assert_allclose(found.nll, expected.mean(1), rtol=1e-5)
    assert [len(answer.right) for (answer,) in found.answers["recall"]] == [4, 4]


def test_runs_are_put_together(tmp_path):
    config = {"windows": 8, "documents": 8, "seed": 1, "dtype": "bfloat16", "material": {}}

    def row(method, **more):
        return {
            "method": method, "context": 64, "budget": 0.5, "protocol": "exact", "model": "x"
        } | more  # fmt: skip

    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    save(parts[0], {"config": config, "refused": [], "rows": [row("h2o", seen=1)]})
    save(parts[1], {"config": config, "refused": ["r"], "rows": [row("h2o", seen=2), row("fp8")]})
    merge(tmp_path / "equal-bytes-y.json", *parts)
    merged = json.loads((tmp_path / "equal-bytes-y.json").read_text())
    assert [(r["method"], r.get("seen"), r["model"]) for r in merged["rows"]] == [
        ("fp8", None, "y"),
        ("h2o", 1, "y"),
    ]
    assert merged["refused"] == ["r"]
    save(parts[1], {"config": config | {"seed": 2}, "refused": [], "rows": []})
    with pytest.raises(SystemExit, match="same windows"):
        merge(tmp_path / "equal-bytes-y.json", parts[1])
