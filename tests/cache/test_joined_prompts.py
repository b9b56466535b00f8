"""Prompts on kernels, whose sinks and far keys are in one array, compared with XLA, which reads three."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dequantise, encode, put_near, round_tokens
from zdc_jax.cache.codes.code import Split
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.specs import coded_store
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.ops import cache_attention, new_tokens
from zdc_jax.ops.new_keys import NewKeys

B, K, G, H, CAPACITY, SINKS, WINDOW = 2, 1, 2, 32, 64, 4, 16
SPEC = CodedStore(
    num_kv_heads=K,
    head_dim=H,
    dtype="bfloat16",
    R=H,
    Z=H,
    sinks=SINKS,
    window=WINDOW,
    key_code=Split(16, FittedIntegers(5), FittedIntegers(2)),
    value_code=FittedIntegers(3),
    near_code=FittedIntegers(8),
)
PIECES = [(24, (24, 9)), (24, (48, 30))]
"""Tokens of each chunk, and lengths after it. The second sequence has padding."""


def attend(q, k, v, *, scale, starts, lengths, needed_from, window, keys, near, block_scores):
    """Compute what the kernel does with near keys in arrays of their own.

    Like the kernel it leaves out queries before those that are needed, but not only whole tiles of them.
    """
    assert (keys, near.sink_k, block_scores) == ("far", None, None)
    t = (starts[:, None] + jnp.arange(q.shape[1]))[:, :, None]
    far_seen = jnp.arange(k.shape[2]) <= t - window
    # Keys that no query sees may have any values.
    k, v = (jnp.where(far_seen.any(1)[:, None, :, None], x, 0) for x in (k, v))
    j = (near.start[:, None] + jnp.arange(near.k.shape[2]))[:, None]
    seen = jnp.concatenate([far_seen, (j > t - window) & (j <= t)], 2) & (t < lengths[:, None, None])
    both_k, both_v = (jnp.concatenate(pair, 2).astype(jnp.float32) for pair in ((k, near.k), (v, near.v)))
    group = q.astype(jnp.float32).reshape(*q.shape[:2], K, G, H)
    scores = scale * jnp.einsum("btkgh,bksh->bkgts", group, both_k)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    o = jnp.einsum("bkgts,bksh->btkgh", weights, both_v).reshape(q.shape)
    if needed_from is not None:
        o = jnp.where((t >= needed_from[:, None, None])[..., None], o, 0)
    return o.astype(q.dtype), lse.reshape(B, K * G, -1)


@pytest.fixture
def kernels(monkeypatch):
    """Run the kernels of prompts in the interpreter, and attention in its stand-in."""
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda _: None)
    monkeypatch.setattr(coded_store, "dequantise", partial(dequantise, interpret=True))
    monkeypatch.setattr(coded_store, "prefill_attention", attend)
    for kernel in (encode, put_near, round_tokens):
        monkeypatch.setattr(new_tokens, kernel.__name__, partial(kernel, interpret=True))


def read(spec, implementation, last=False):
    """Return the results of all chunks, and the cache; only those of last tokens are needed with `last`."""
    rng, state, start, found = np.random.default_rng(0), spec.create(B, CAPACITY), np.zeros(2, int), []
    for T, end in PIECES:
        q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.bfloat16) for n in (K * G, K, K))
        positions, needed_from = jnp.asarray(start[:, None] + np.arange(T)), jnp.array(end) - 1
        call = Call(H**-0.5, implementation, needed_from=needed_from if last else None)
        done = spec.attend(state, q, NewTokens(NewKeys(k), v, positions, jnp.asarray(end)), None, call)
        state, start = done.state, np.array(end)
        found.append(np.where((positions < start[:, None])[..., None, None], done.o, 0))
    return found, state


@pytest.mark.parametrize("sinks", [SINKS, 0])
@pytest.mark.matrix
def test_kernels_read_prompts_as_xla_does(kernels, monkeypatch, sinks):
    spec, joined = replace(SPEC, sinks=sinks), []
    monkeypatch.setattr(coded_store, "prefill_attention", lambda *a, **b: joined.append(1) or attend(*a, **b))
    found, state = read(spec, None)
    assert len(joined) == len(PIECES)
    wanted, other = read(spec, "xla")
    assert len(joined) == len(PIECES)
    of_last, _ = read(spec, None, last=True)
    for one, true, (T, end), start in zip(
        of_last, found, PIECES, (np.zeros(2, int), PIECES[0][1]), strict=True
    ):
        at = np.arange(2), np.array(end) - start - 1
        np.testing.assert_array_equal(one[at], true[at])
        assert np.count_nonzero(one.any(axis=(2, 3))) == 2 < T
    for one, true in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), true.astype(np.float32), atol=0.03)
    for one, true in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert (np.asarray(one) != np.asarray(true)).sum() <= 0.01 * true.size
