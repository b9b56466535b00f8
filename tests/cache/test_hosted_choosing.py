"""Tokens in host memory: the same bits as tokens on the device, and stored where the spec says."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel

import zdc_jax
from zdc_jax import CompressionPlan
from zdc_jax.cache import kv_cache
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.gaussian import Gaussian
from zdc_jax.cache.specs import hosted_choosing
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.hosted_choosing import HostedChoosing, fetched, put_tokens
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import CacheMemoryError, PlanError
from zdc_jax.evaluation.answers import answer_questions, read_contexts
from zdc_jax.evaluation.questions import Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.methods.coded import Settings
from zdc_jax.ops.new_keys import NewKeys

B, K, G, H, S = 3, 2, 2, 32, 44
GIVEN = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": 24, "Z": 16, "sinks": 2, "window": 7}
GIVEN |= {
    "index_code": FittedIntegers(4),
    "key_code": FittedIntegers(3),
    "value_code": FittedIntegers(2),
    "read": 12,
}
RAGGED = [[24, 3, 17], [1, 0, 1], [0, 20, 24], [1, 1, 1], [0, 1, 0]]


@partial(jax.jit, static_argnames="spec", donate_argnums=1)
def attend(spec, state, q, k, v, positions, end, aux):
    return spec.attend(state, q, NewTokens(NewKeys(k), v, positions, end), aux, Call(0.3))


def run(spec, schedule, aux=None):
    """Run a schedule of new tokens by sequence and return the results and the last state."""
    rng = np.random.default_rng(0)
    heads = (K * G, K, K)
    state, lengths, found = spec.create(B, S), np.zeros(B, int), []
    for number, new in enumerate(schedule):
        T = max(new)
        x = [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in heads]
        positions, end = lengths[:, None] + np.arange(T), lengths + new
        taken = None if aux is None else aux[number]
        done = attend(spec, state, *x, jnp.asarray(positions), jnp.asarray(end), taken)
        state, lengths = done.state, end
        kept = (np.arange(T) < np.array(new)[:, None])[..., None, None]
        found.append(np.where(kept, np.asarray(done.o), 0))
    return found, state


CASES = [
    ({"index": 8}, RAGGED),
    ({"index": 8}, [[S] * B]),
    ({"index": 8, "page": 4}, RAGGED),
    ({"index": 0}, RAGGED),
]


@pytest.mark.parametrize(("shape", "schedule"), CASES, ids=str)
@pytest.mark.full
def test_equals_the_device(shape, schedule):
    pages, rng = None, np.random.default_rng(1)
    if not shape["index"]:
        numbers = (np.broadcast_to(np.arange(S), (B, max(new), K, S)) for new in schedule)
        pages = [jnp.asarray(rng.permuted(each, axis=-1)[..., :12]) for each in numbers]
    expected, _ = run(CodedChoosing(**GIVEN, **shape), schedule, pages)
    found, state = run(HostedChoosing(**GIVEN, **shape), schedule, pages)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert state.far.k.sharding.memory_kind == "pinned_host"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.near, state.far.index))} == {
        "device"
    }


@pytest.mark.parametrize("unrolled", [B, 1])
@pytest.mark.parametrize("T", [1, 6])
def test_tokens_are_put_where_they_stand(T, unrolled, monkeypatch):
    # Sequences begin and end anywhere, one with padding past the last slot; unrolled and in a loop.
    monkeypatch.setattr(hosted_choosing, "UNROLLED", unrolled)
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (B, S + 1, K, 2), np.uint8)
    held = jax.device_put(rows, hosted_choosing._host_zeros((1,)).sharding)
    x = rng.integers(0, 256, (B, T, K, 2), np.uint8)
    start, end = np.array([S - 3, 5, 0]), np.array([S, 5 + T, 0])
    put = jax.jit(lambda *given: put_tokens(*given))(
        held, jnp.asarray(x), jnp.asarray(start[:, None] + np.arange(T)), jnp.asarray(end)
    )
    expected = rows[:, :-1].copy()
    for b in range(B):
        count = min(T, end[b] - start[b])
        expected[b, start[b] : start[b] + count] = x[b, :count]
    np.testing.assert_array_equal(np.asarray(put)[:, :-1], expected)


@pytest.mark.full
def test_a_decoded_token_copies_no_store():
    # Without a barrier, XLA would keep the store twice in order to read before writing.
    spec = HostedChoosing(**GIVEN, index=8)
    state, at = spec.create(1, S), jnp.full((1, 1), 20)
    heads = [jnp.ones((1, 1, n, H)) for n in (K * G, K, K)]
    program = attend.lower(spec, state, *heads, at, at[:, 0] + 1, None).compile().as_text()
    store = f"u8[{','.join(map(str, state.far.k.shape))}]"
    assert store in program
    assert not re.search(re.escape(store) + r"\S* copy\(", program)


def test_bytes_on_the_host():
    spec, on_device = (kind(**GIVEN, index=8) for kind in (HostedChoosing, CodedChoosing))
    store = spec.create(B, S).far.k
    # 16 coordinates of 3 bits, 16 of 2, and two scales; one slot for dropped tokens.
    assert store.nbytes == spec.host_bytes(S, B) == B * (128 + 1) * K * (6 + 1 + 4 + 1)
    assert spec.bytes(S, B) == on_device.bytes(S, B) + B * K * 12
    assert spec.bytes_read(S) == on_device.bytes_read(S)
    assert on_device.host_bytes(S, B) == 0


def test_what_must_fit(monkeypatch):
    spec, tokens = HostedChoosing(**GIVEN, index=8), 129
    host = spec.host_bytes(tokens, B)
    device = kv_cache.device_bytes([spec], tokens, B)
    assert device + host == kv_cache.cache_bytes([spec], tokens, B)
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: host)
    kv_cache.check_fits([spec], batch=B, capacity=tokens, free=device)
    with pytest.raises(CacheMemoryError, match=f"needs {device:,} bytes, {device - 1:,} are free"):
        kv_cache.check_fits([spec], batch=B, capacity=tokens, free=device - 1)
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: host - 1)
    with pytest.raises(CacheMemoryError, match=f"needs {host:,} bytes on the host, .* and capacity=128 at"):
        kv_cache.check_fits([spec], batch=B, capacity=tokens, free=device)


def test_only_what_is_asked_for_is_fetched():
    # The host gathers, and the program sends only the chosen rows to the device.
    store = hosted_choosing._host_zeros((2, 1000, K, 12))
    slots = jnp.zeros((2, K, 5), jnp.int32)
    program = jax.jit(fetched).trace(store, slots).lower(lowering_platforms=("cuda",)).as_text()
    sent = [line for line in program.splitlines() if '_xla_buffer_placement = "device"' in line]
    assert len(sent) == 1
    assert sent[0].endswith("-> tensor<20x12xui8>")
    gathers = [line for line in program.splitlines() if "stablehlo.gather" in line]
    assert len(gathers) == 1
    assert '_xla_compute_type = "host"' in gathers[0]
    assert fetched(store, slots).shape == (2, K, 5, 12)
    rows = np.arange(2 * 9 * K * 3, dtype=np.uint8).reshape(2, 9, K, 3)
    held = jax.device_put(rows, store.sharding)
    at = np.array([[[0, 7], [3, 3]], [[8, 1], [2, 5]]])
    expected = np.stack([[rows[b, at[b, h], h] for h in range(K)] for b in range(2)])
    np.testing.assert_array_equal(jax.jit(fetched)(held, jnp.asarray(at)), expected)


def test_a_device_without_pinned_memory_is_named(monkeypatch):
    monkeypatch.setattr(hosted_choosing, "HOST_MEMORY", "no such memory")
    with pytest.raises(CacheMemoryError, match="has no 'no such memory' memory"):
        HostedChoosing(**GIVEN, index=8).create(B, S)


def test_settings_that_cannot_be():
    with pytest.raises(PlanError, match="memory='disk' must be one of"):
        Settings(memory="disk")
    with pytest.raises(PlanError, match="memory='host' with read=0"):
        Settings(memory="host", read=0)
    with pytest.raises(PlanError, match="host memory stores bytes"):
        HostedChoosing(**GIVEN | {"value_code": Gaussian(2)}, index=8)


def models(tiny: TinyModel) -> list[zdc_jax.LanguageModel]:
    """Return two models, with tokens on the device and on the host."""
    H = tiny.config.head_dim
    plan = CompressionPlan.uniform(tiny.config, qk=H, v=H, window=8, sinks=2)
    settings = [Settings(index=8, read=12, memory=memory) for memory in ("device", "host")]
    return [tiny.model(replace(plan, method="coded", settings=each)) for each in settings]


@pytest.mark.full
def test_the_same_tokens_are_generated(tiny_llama: TinyModel):
    # Prompts have unequal lengths and decode in one loop on the device.
    prompts = [tiny_llama.tokens(1, n, seed=n)[0].tolist() for n in (40, 23)]
    made = [zdc_jax.generate(model, prompts, max_new_tokens=12) for model in models(tiny_llama)]
    ours, theirs = ([one.tokens for one in each.completions] for each in made)
    assert ours == theirs


@pytest.mark.gpu
def test_on_a_gpu(tiny_llama: TinyModel):
    # Questions are answered too, each on a copy of a row of the cache.
    for case in CASES:
        test_equals_the_device(*case)
    test_the_same_tokens_are_generated(tiny_llama)
    contexts = tiny_llama.tokens(2, 48, seed=5)
    asked = Question(tiny_llama.tokens(1, 6, seed=6)[0], np.arange(6) > 2, None)
    found = []
    for model in models(tiny_llama):
        _, cache = read_contexts(model.network, contexts, room=64, protocol="cached")
        documents = [TaskDocument(row, {"a": (asked,) * 3}) for row in contexts]
        answered = answer_questions(model.network, cache, documents)["a"]
        found.append([answer.log_probability for row in answered for answer in row])
    np.testing.assert_array_equal(*found)
