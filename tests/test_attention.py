"""Attention contract: every implementation compared with the plain reference in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import attention_reference

from zdc_jax.ops import xla
from zdc_jax.ops.attention import self_attention
from zdc_jax.ops.xla import NearKeys, xla_attention

H = 32


def inputs(B=2, T=24, N=4, K=2, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)

    def draw(heads):
        return rng.normal(size=(B, T, heads, H)).astype(dtype)

    return draw(N), draw(K), draw(K)


def truth(q, k, v, **options):
    with jax.enable_x64(True):
        arrays = (jnp.asarray(x, jnp.float64) for x in (q, k, v))
        o, lse = jax.jit(partial(attention_reference, scale=H**-0.5, **options))(*arrays)
        return np.asarray(o), np.asarray(lse)


def near_keys(k, v, sinks, window):
    """Return near keys of whole sequences: sinks, an empty past of `window`, own tokens."""
    B, T, K, _ = k.shape

    # Absent keys hold large junk, which must not leak.
    def pad(x):
        return jnp.asarray(
            np.concatenate([x[:, :sinks], np.full((B, window, K, H), 1e4, x.dtype), x], 1).swapaxes(1, 2)
        )

    own = np.where(np.arange(T) >= sinks, np.arange(T), -1)
    positions = np.concatenate([np.arange(sinks), np.full(window, -1), own])
    return NearKeys(pad(k), pad(v), jnp.broadcast_to(jnp.asarray(positions), (B, len(positions))))


def run(q, k, v, qk_rank, v_rank, sinks, window):
    B, T = q.shape[:2]

    def whole(x, rank):
        return jnp.asarray(x.swapaxes(1, 2)[..., :rank])

    near = near_keys(k, v, sinks, window) if sinks or window else None
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    # Each call compiles a program of its own, because tests change the blocks of queries.
    attention = jax.jit(partial(xla_attention, scale=H**-0.5, sinks=sinks, window=window))
    q = jnp.asarray(q if near is not None else q[..., :qk_rank])
    return attention(q, whole(k, qk_rank), whole(v, v_rank), positions, near=near)


@settings(max_examples=10, deadline=None)
@given(
    qk_rank=st.sampled_from([0, 16, 32]),
    v_rank=st.sampled_from([16, 32]),
    sinks=st.integers(0, 5),
    window=st.integers(0, 30),
    length=st.sampled_from([1, 7, 24]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
)
@pytest.mark.full
def test_xla_equals_the_reference(qk_rank, v_rank, sinks, window, length, heads):
    if qk_rank == 0:
        v_rank = 0
        window = max(window, 1)
    q, k, v = inputs(T=length, N=heads[0], K=heads[1])
    sinks = min(sinks, length)
    expected, expected_lse = truth(q, k, v, qk_rank=qk_rank, v_rank=v_rank, sinks=sinks, window=window)
    out, lse = (np.asarray(x) for x in run(q, k, v, qk_rank, v_rank, sinks, window))
    np.testing.assert_allclose(lse, expected_lse, atol=3e-6)
    assert np.abs(out - expected[..., : out.shape[-1]]).max() < 3e-6
    assert not np.any(expected[..., out.shape[-1] :])


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (3, 0), (0, 5), (2, 9)])
@pytest.mark.matrix
def test_blocks_of_queries_change_nothing(monkeypatch, sinks, window):
    q, k, v = inputs(T=61)
    whole = run(q, k, v, 16, 16, sinks, window)
    monkeypatch.setitem(xla._LOGITS_BYTES, jax.default_backend(), 1)
    blocked = run(q, k, v, 16, 16, sinks, window)
    for ours, theirs in zip(blocked, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.full
def test_half_precision_loses_what_its_dtype_loses():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(T=48))
    expected, _ = truth(q, k, v, qk_rank=16, v_rank=16, sinks=2, window=8)
    out = np.asarray(run(q, k, v, 16, 16, 2, 8)[0], np.float64)
    plain, _ = attention_reference(
        *(jnp.asarray(x) for x in (q, k, v)), scale=H**-0.5, qk_rank=16, v_rank=16, sinks=2, window=8
    )
    own_error = np.abs(np.asarray(plain, np.float64) - expected).max()
    assert np.abs(out - expected).max() <= 2 * own_error


def test_explicit_cudnn_never_falls_back():
    q, k, v = inputs()
    if jax.default_backend() == "gpu":
        pytest.skip("refusals for lack of a GPU show only without one")
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        self_attention(*(jnp.asarray(x) for x in (q, k, v)), scale=1.0, implementation="cudnn")


@pytest.mark.parametrize(("backend", "queries"), [("cpu", 1024), ("gpu", 65536), ("tpu", 65536)])
def test_queries_at_a_time_on_any_device(backend, queries, monkeypatch):
    # Logits of 1024 keys, 4 bytes each, take 4 MiB on a CPU and 256 MiB elsewhere.
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert xla.query_block(1024, 10**6) == queries


def test_a_block_of_queries_counts_its_own_keys(monkeypatch):
    """Use 512 queries, which score 64 + 512 keys in 4 heads: 4.7 MB of logits, more than 4 MiB."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert xla.query_block(4 * 64, 10**6, own=4) == 256
    assert xla.query_block(4 * 64, 100, own=4) == 100
