"""Retrieval heads: scores on patterns by hand, and by whole attention matrices."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax.errors import PlanError
from zdc_jax.model.observe import Seen, observe
from zdc_jax.planning.retrieving import best_heads, induction, retrieving_heads


def probabilities(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Compute causal attention [B, N, T, T] of q [B, T, N, H] to k [B, T, K, H] in float64."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scores = scale * np.einsum("BTNH,BSNH->BNTS", q, k.repeat(q.shape[2] // k.shape[2], 2))
    weights = np.tri(q.shape[1]) * np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def seen(q: np.ndarray, k: np.ndarray) -> Seen:
    """Return the observations of a layer with scale 1, whose heads attend to one key each."""
    q, k = jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)
    lse = jnp.einsum("BTNH,BSNH->BNTS", q, k.repeat(q.shape[2] // k.shape[2], 2)).max(-1)
    return Seen(None, q, k, k, None, None, lse, None, SimpleNamespace(scale=1.0))


def test_the_heads_that_look_behind_the_first_occurrence_score():
    # Keys encode their positions, and each query head looks `back` tokens back. Five is after the first
    # occurrence.
    T, K, back = 12, 4, [5, 0, 5, 5, 4, 6, 0, 11]
    k = np.broadcast_to(np.eye(T)[None, :, None], (1, T, K, T))
    places = np.maximum(np.arange(T)[:, None] - back, 0)
    q = 100 * np.eye(T)[places][None]
    np.testing.assert_allclose(induction(seen(q, k)), [0.5, 1, 0, 0], atol=1e-6)


def queries_and_keys(seen: Seen) -> tuple:
    return seen.q, seen.k


def test_the_best_heads_of_a_network_are_those_of_its_attention_matrices():
    network, length = TinyModel(LLAMA).dense, 8
    tokens = np.random.default_rng(3).integers(LLAMA.vocab_size, size=(2, length), dtype=np.int32)
    rows = np.arange(length, 2 * length)
    scores = []
    for q, k in observe(network, jnp.asarray(np.tile(tokens, 2)), queries_and_keys):
        found = probabilities(q, k, LLAMA.head_dim**-0.5)[:, :, rows, rows - length + 1]
        scores.append(found.reshape(2, LLAMA.num_kv_heads, -1, length).mean((0, 2, 3)))
    order = np.argsort(-np.array(scores), axis=None)
    for share, count in ((0.5, 3), (0.2, 1), (1, 6)):
        expected = [
            [head - 2 * layer for head in sorted(order[:count]) if head // 2 == layer] for layer in range(3)
        ]
        heads = retrieving_heads(network, share, length=length, sequences=2, seed=3)
        assert [list(each) for each in heads] == expected


def test_layers_that_slide_do_not_retrieve():
    scores = np.array([[0.9, 0.8], [0.1, 0.2], [0.2, 0.3]])
    assert best_heads(scores, 0.5, [True, False, False]) == ((), (1,), (0, 1))
    assert best_heads(scores, 0.5, [False, False, False]) == ((0, 1), (), (1,))
    assert best_heads(scores, 1, [True, False, False]) == ((), (0, 1), (0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0}, r"share=0 must lie in \(0, 1\]"),
        ({"share": 1.5}, r"share=1.5 must lie in \(0, 1\]"),
        ({"share": 0.5, "length": 129}, "length=129 must be 2 to 128 tokens"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    network = TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).dense
    with pytest.raises(PlanError, match=message):
        retrieving_heads(network, **{"length": 4, **options})
