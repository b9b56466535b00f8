"""Cache with far tokens in some KV heads only, compared with loops in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA

from zdc_jax import methods
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.retrieving_heads import RetrievingHeads
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan, LayerRanks

B, K, G, H, S = 2, 3, 2, 8, 24
SPEC = RetrievingHeads(num_kv_heads=K, head_dim=H, dtype="float32", R=6, Z=5, sinks=2, window=5, heads=(0, 2))
HEADS = [[1], [], [0, 1]]


def by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o = np.zeros((B, S, K * G, H))
    for b, t, n in np.ndindex(B, S, K * G):
        head, scores, values = n // G, [], []
        for j in range(t + 1):
            near = j < SPEC.sinks or j > t - SPEC.window
            if near or head in SPEC.heads:
                R, Z = (H, H) if near else (SPEC.R, SPEC.Z)
                scores.append(scale * q[b, t, n, :R] @ k[b, j, head, :R])
                values.append(np.pad(v[b, j, head, :Z], (0, H - Z)))
        weights = np.exp(scores - max(scores))
        o[b, t, n] = weights @ np.array(values) / weights.sum()
    return o


def test_heads_see_far_tokens_where_they_retrieve():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, S, heads, H)).astype(np.float32) for heads in (K * G, K, K))
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    end = jnp.full(len(positions), positions.shape[1])
    attend = jax.jit(
        lambda q, k, v: SPEC.attend_whole(q, NewTokens(NewKeys(k), v, positions, end), None, Call(0.7)).o
    )
    expected = by_loops(q, k, v, 0.7)
    np.testing.assert_allclose(attend(*map(jnp.asarray, (q, k, v))), expected, atol=3e-6)


def plan(heads: object = HEADS, ranks: tuple[int, ...] = (32, 32, 16), window: int = 16) -> CompressionPlan:
    settings = methods.settings_from_json("duo", {"heads": heads})
    layers = tuple(LayerRanks(rank, rank) for rank in ranks)
    whole = replace(CompressionPlan.full(LLAMA), window=window, sinks=4)
    return replace(whole, layers=layers, method="duo", settings=settings)


def test_layers_keep_far_tokens_of_their_heads():
    specs = plan().layer_caches("bfloat16")
    assert [type(spec) for spec in specs] == [RetrievingHeads, PrefixRing, RetrievingHeads]
    ring = (16 + 8) * 2 * 32 * 2 * 2  # window and sinks, K and V, coordinates, heads, bytes
    assert [spec.bytes(1024) - ring for spec in specs] == [1024 * 64 * 2, 0, 2 * 1024 * 32 * 2]


def test_json_round_trip(tmp_path):
    plan().save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": HEADS[:2]}, "heads has 2 lists; it must have one for each"),
        ({"heads": [[2], [], []]}, r"heads=\(2,\) must ascend from 0 to 1, the KV heads"),
        ({"heads": [[1, 0], [], []]}, r"heads=\(1, 0\) must ascend from 0 to 1"),
        ({"heads": [[0, 0], [], []]}, r"heads=\(0, 0\) must ascend"),
        (
            {"heads": [["a"], [], []]},
            r"heads=\(\('a',\), \(\), \(\)\) must be a list, each a list, each an int",
        ),
        ({"heads": HEADS, "ranks": (0, 32, 32)}, r"layer 0: heads=\(1,\) must be empty, because"),
        ({"window": 0}, "window=0 must be at least 1 token"),
        ({"heads": [[], [0], [0]], "window": 0}, "layer 0: window=0 must be at least 1 token, because no"),
    ],
)
def test_impossible_heads_are_refused_by_name(change, message):
    with pytest.raises(PlanError, match=message):
        plan(**change)
