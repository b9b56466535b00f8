"""Budgets of the comparison at equal bytes."""

from dataclasses import replace

import pytest
from conftest import LLAMA

from benchmarks.quality.plans import FIRST, share_held
from zdc_jax.plan import CompressionPlan


def test_shares_are_of_the_plain_cache():
    # The baseline ignores all other settings of a plan.
    full = CompressionPlan.full(LLAMA)
    plan = replace(full, window=64, sinks=4, method="kivi", settings=None)
    of_plain = plan.bytes(1024, 1, "bfloat16") / full.bytes(1024, 1, "bfloat16")
    assert share_held(full, 1024, "bfloat16") == 1
    assert share_held(plan, 1024, "bfloat16") == of_plain


@pytest.mark.parametrize("name", ["window", "kivi", "h2o"])
def test_a_budget_is_used_up_to_a_step(name):
    (entry,) = (entry for entry in FIRST if entry.name == name)
    found = share_held(entry.at_budget(LLAMA, 1024, 0.52, "bfloat16"), 1024, "bfloat16")
    assert 0.49 < found <= 0.52
