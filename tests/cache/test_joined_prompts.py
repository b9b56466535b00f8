"""Prompts on kernels, whose sinks and far keys are in one array, compared with XLA, which reads three."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_references import joined_prefill_reference

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


@pytest.fixture
def kernels(monkeypatch):
    """Run the kernels of prompts in the interpreter, and attention in its stand-in."""
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda _: None)
    monkeypatch.setattr(coded_store, "dequantise", partial(dequantise, interpret=True))
    monkeypatch.setattr(coded_store, "prefill_attention", joined_prefill_reference)
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

    def attend(*arrays, **options):
        joined.append(1)
        return joined_prefill_reference(*arrays, **options)

    monkeypatch.setattr(coded_store, "prefill_attention", attend)
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
