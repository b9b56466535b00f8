"""Cost model of attention, compared with the measurements that it was fitted to, and its arithmetic."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.fit_costs import fit, measured_rows
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.costs import H200, AttentionCall, request_seconds

RANKS = st.sampled_from(range(16, 128, 16))
TOKENS = st.integers(1, 100_000)
NEAR = st.sampled_from([(0, 0), (64, 0), (512, 4)])
ROWS = measured_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_measured_row_is_met(row):
    assert row.predicted(H200) == pytest.approx(row.seconds, rel=0.07)


def test_the_constants_are_those_of_the_fit():
    assert len(ROWS) == 28
    assert asdict(H200) == pytest.approx(asdict(fit(ROWS)), rel=1e-3)


@given(tokens=TOKENS, more=TOKENS, ranks=st.tuples(RANKS, RANKS), up=st.tuples(RANKS, RANKS), near=NEAR)
def test_more_tokens_and_higher_ranks_cost_more(tokens, more, ranks, up, near):
    window, sinks = near
    small = AttentionCall(32, 8, 128, tokens, 2, window, sinks)
    large = replace(small, tokens=tokens + more)
    low, high = LayerRanks(*ranks), LayerRanks(*map(max, ranks, up))
    for price in (H200.prefill, H200.decode):
        assert price(small, low) < price(large, low)
        assert price(small, low) <= price(small, high) * (1 + 1e-12)
        # Attention to near keys alone has only masked blocks, which only longer prompts outweigh.
        if window and (price == H200.decode or tokens >= 16 * (window + sinks)):
            assert price(small, LayerRanks(0, 0)) <= price(small, low) * (1 + 1e-12)


def test_a_layer_that_keeps_everything_has_no_ring():
    call, full = AttentionCall(32, 8, 128, 4096), LayerRanks(128, 128)
    near = replace(call, window=512, sinks=4)
    assert H200.decode(near, full) == H200.decode(call, full)
    assert H200.prefill(near, full) == H200.prefill(call, full)


def test_a_request_adds_up_over_layers():
    layers = LayerRanks(64, 96), LayerRanks(32, 64)
    plan = CompressionPlan(layers, num_kv_heads=8, head_dim=128)
    call = AttentionCall(32, 8, 128, 4096, batch=16)
    expected = sum(H200.prefill(call, ranks) + 512 * H200.decode(call, ranks) for ranks in layers)
    assert request_seconds(plan, 32, 4096) == pytest.approx(expected)


def test_layers_are_priced_by_their_own_windows():
    # The plan's window says the same: layers keep the last 4096 tokens.
    own = (LayerRanks(0, 0, 4096),) * 4
    full = CompressionPlan(own, num_kv_heads=8, head_dim=128)
    near = CompressionPlan(own, num_kv_heads=8, head_dim=128, window=512, sinks=4)
    alike = CompressionPlan((LayerRanks(0, 0),) * 4, num_kv_heads=8, head_dim=128, window=4096)
    assert len({plan.bytes(32768) for plan in (full, near, alike)}) == 1
    seconds = [request_seconds(plan, 32, 32768) for plan in (full, near, alike)]
    assert seconds == pytest.approx([seconds[-1]] * 3)
    kept = CompressionPlan((*own[1:], LayerRanks(64, 64)), num_kv_heads=8, head_dim=128, window=512)
    last = replace(kept, layers=kept.layers[-1:])
    expected = seconds[-1] * 3 / 4 + request_seconds(last, 32, 32768)
    assert request_seconds(kept, 32, 32768) == pytest.approx(expected)
