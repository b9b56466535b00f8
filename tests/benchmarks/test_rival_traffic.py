"""Bytes sent by rival methods on a well-known shape.

`eight_devices/traffic.py` compares these counts with compiled programs.
"""

import pytest

from benchmarks.mesh.rivals.methods import method_bytes
from benchmarks.mesh.traffic import prefill_bytes
from benchmarks.model.models import LLAMA_2_7B
from zdc_jax.plan import CompressionPlan

PLAN = CompressionPlan.uniform(LLAMA_2_7B, qk=32, v=64, window=512, sinks=4)
SIZES = {"length": 131072, "degree": 4}


def test_late_truncation_sends_what_dense_does():
    dense = prefill_bytes(LLAMA_2_7B, CompressionPlan.full(LLAMA_2_7B), **SIZES)
    assert method_bytes(LLAMA_2_7B, PLAN, method="late_ulysses", **SIZES) == dense
    assert method_bytes(LLAMA_2_7B, PLAN, method="ulysses", **SIZES) == prefill_bytes(
        LLAMA_2_7B, PLAN, **SIZES
    )


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_keys_and_values_come_from_all_other_devices(method):
    # K and V of each of 32 heads with all 128 coordinates, 2 bytes each, in each of 32 layers.
    sent = method_bytes(LLAMA_2_7B, CompressionPlan.full(LLAMA_2_7B), method=method, **SIZES)
    assert sent == 32 * 3 * (131072 // 4) * 32 * 2 * 128 * 2


def test_only_ulysses_has_a_float8_payload():
    with pytest.raises(NotImplementedError, match=r"payload='float8': .* attention=ring_attention"):
        method_bytes(LLAMA_2_7B, PLAN, method="ring", payload="float8", **SIZES)
