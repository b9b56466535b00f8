"""Chunks of prompts whose keys left out their mean, on kernels and on XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_references import joined_prefill_reference

from kernels_pallas import dequantise, put_near, round_tokens
from zdc_jax.cache.codes.code import Split
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs import coded_store
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.ops import attention, cache_attention, new_tokens
from zdc_jax.ops.new_keys import NewKeys, Turn
from zdc_jax.ops.shift import ShiftedQueries, means_of_blocks, without_mean

B, K, G, H, S, PAGE = 2, 2, 2, 64, 384, 128
SPEC = CodedStore(
    num_kv_heads=K,
    head_dim=H,
    dtype="bfloat16",
    R=H,
    Z=H,
    sinks=4,
    window=64,
    near_code=FittedIntegers(8),
    key_code=Split(16, FittedIntegers(8), FittedIntegers(6)),
    value_code=FittedIntegers(6),
)
FREQUENCIES = 1e4 ** -(np.arange(H // 2) / (H // 2))
MEAN = np.repeat(np.geomspace(0.1, 40, H // 2)[None], 2, 0).reshape(1, H) * np.ones((K, 1))
"""Means of keys with a norm of 150, nearly all in slow pairs."""
CHUNKS = ((0, 200, (200, 190)), (200, 150, (350, 250)))
"""First position of each chunk, its tokens, and the lengths of both sequences after it."""


@pytest.fixture
def plain(monkeypatch):
    """Run the kernels in the interpreter, and attention of prompts as a plain function."""
    for module in (attention, cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda q: None)
    monkeypatch.setattr(coded_store, "prefill_attention", joined_prefill_reference)
    monkeypatch.setattr(coded_store, "dequantise", partial(dequantise, interpret=True))
    for kernel in (put_near, round_tokens):
        monkeypatch.setattr(new_tokens, kernel.__name__, partial(kernel, interpret=True))
    # XLA stores far tokens, rotates queries and computes block scores.
    monkeypatch.setattr("zdc_jax.cache.specs.coded_far.put_by_kernel", lambda *_: None)
    monkeypatch.setattr("zdc_jax.ops.rotary.post_rope_refusal", lambda *_, **__: "no")
    monkeypatch.setattr(ShiftedQueries, "_kernel_refusal", lambda *_: "no")
    yield
    attend.clear_cache()


@partial(jax.jit, static_argnames=("spec", "implementation"))
def attend(spec, implementation, state, q, k, v, positions, end, basis, table):
    """Attend with keys k + `MEAN` before the rotary embedding; return the cache and the output."""
    mean = jnp.asarray(MEAN, jnp.float32)
    kept = without_mean(k + mean, positions, mean, FREQUENCIES)
    q, kept, v = (x.astype(jnp.bfloat16) for x in (q, kept, v))
    means = jnp.asarray(means_of_blocks(MEAN, FREQUENCIES, S), jnp.float32) @ basis[1].astype(jnp.float32)
    shift = ShiftedQueries(q, positions, mean, FREQUENCIES, means)
    keys = NewKeys(kept, Turn(positions, FREQUENCIES, *basis), shift)
    call = Call(scale=0.05, implementation=implementation, table=table)
    return spec.attend(state, q, NewTokens(keys, v, positions, end), None, call)[:2]


def read_prompts(implementation, table=None) -> np.ndarray:
    """Return what two ragged prompts attend to, chunk by chunk, without padding."""
    rng = np.random.default_rng(0)
    spec = SPEC if table is None else Paged.of(SPEC, page=PAGE, pages=B * S // PAGE)
    basis = [jnp.asarray(np.linalg.qr(rng.normal(size=(K, H, H)))[0], jnp.bfloat16)] * 2
    state, found = spec.create(B, S), []
    for start, T, lengths in CHUNKS:
        q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (K * G, K, K))
        positions, end = jnp.broadcast_to(start + jnp.arange(T), (B, T)), jnp.asarray(lengths, jnp.int32)
        state, o = attend(spec, implementation, state, q, k, v, positions, end, basis, table)
        found += [np.asarray(o[b, : length - start], np.float64) for b, length in enumerate(lengths)]
    return np.concatenate(found)


def check(table=None) -> None:
    found, expected = read_prompts(None, table), read_prompts("xla")
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    # Keys of norm 20 are rounded to 16 bits, or the scores of blocks are added to those of small keys.
    assert error.max() < 0.03
    assert np.median(error) < 0.008


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.matrix("True")
def test_prompts_attend_to_whole_keys_as_xla_adds_block_scores(plain, in_pages):
    check(jnp.arange(B * S // PAGE).reshape(B, -1) if in_pages else None)


@pytest.mark.gpu
@pytest.mark.parametrize("in_pages", [False, True])
def test_prompts_attend_to_whole_keys_on_the_device(in_pages):
    check(jnp.arange(B * S // PAGE).reshape(B, -1) if in_pages else None)
