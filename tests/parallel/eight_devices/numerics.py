"""Numerics at the timed length: every method is within its tolerance, a head that is slightly off is not."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.mesh.attention_parts import TOLERANCE, AttentionParts, exact_rows
from benchmarks.mesh.rivals.methods import padded
from benchmarks.mesh.rows import NUMERICS, ROWS
from benchmarks.model.models import SHAPES
from zdc_jax.ops.attention import self_attention
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

CONFIG = replace(SHAPES["tiny"], num_kv_heads=2)


def parts(name):
    """Return the parts of a row, for 250 tokens on four devices."""
    row, plan = ROWS[name], CompressionPlan.full(CONFIG)
    if row.near is not None:
        sinks = 4 if row.near == "window and sinks" else 0
        plan = CompressionPlan.uniform(CONFIG, qk=16, v=16, window=20, sinks=sinks)
    return AttentionParts(
        CONFIG,
        plan,
        MeshConfig(sequence=4).create(),
        length=padded(row.method, 250, 4),
        method=row.method,
        implementation="xla",
        payload=row.payload,
    )


NAMES = [task.partition(":")[0] for task in NUMERICS]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dense_pallas", "plan_gathered")])
def test_within_tolerance(name):
    found = parts(name).numerics()
    assert 0.001 < found["head"] <= found["row"] < 3 * TOLERANCE[ROWS[name].payload]


@pytest.mark.parametrize("name", ["plan", "ring_zigzag"])
def test_a_head_that_is_off_by_a_hundredth(name, monkeypatch):
    attend = AttentionParts._attention

    def off(self, *qkv):
        return (attend(self, *qkv) * jnp.ones((8, 1)).at[5].set(1.01)).astype(jnp.bfloat16)

    monkeypatch.setattr(AttentionParts, "_attention", off)
    with pytest.raises(ArithmeticError, match=r"head 5 is off by 1\.\d+%; 0\.5% is allowed"):
        parts(name).numerics()


@pytest.mark.parametrize("near", [(0, 0), (3, 9)])
def test_exact_rows(near):
    """Compare with whole sequences of the library in float32; three query heads share one KV head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(40, heads, 32)).astype(np.float32) for heads in (3, 1, 1))
    (sinks, window), ranks = near, LayerRanks(16, 24)
    positions = np.array([0, 7, 13, 39])
    got = exact_rows(q[positions], k[:, 0], v[:, 0], positions, scale=0.3, ranks=ranks, near=near)
    given = (q, k, v) if window else (q[..., :16], k[..., :16], v[..., :24])
    options = {"qk_rank": 16, "v_rank": 24, "sinks": sinks, "window": window, "implementation": "xla"}
    o, _ = self_attention(*(jnp.asarray(x)[None] for x in given), scale=0.3, **options)
    expected = np.asarray(o)[0, positions]
    np.testing.assert_allclose(got[..., : expected.shape[-1]], expected, atol=1e-5)
    assert not got[..., expected.shape[-1] :].any()
