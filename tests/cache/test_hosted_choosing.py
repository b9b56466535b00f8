"""Tokens on the host answer bit for bit as tokens on the device do, and lie where they are said to."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel

import zdc_jax
from zdc_jax import CompressionPlan
from zdc_jax.cache import hosted_choosing, kv_cache
from zdc_jax.cache.coded_choosing import CodedChoosing
from zdc_jax.cache.gaussian_codes import Gaussian
from zdc_jax.cache.hosted_choosing import HostedChoosing, fetched, put_tokens
from zdc_jax.cache.spec import Call
from zdc_jax.errors import CacheMemoryError, PlanError
from zdc_jax.evaluation.answers import read_contexts, sheet_answers
from zdc_jax.evaluation.questions import Question
from zdc_jax.evaluation.sheets import Sheet
from zdc_jax.methods.coded import Settings

B, K, G, H, S = 3, 2, 2, 32, 44
SHORT = partial(Gaussian, short=True)
GIVEN = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": 24, "Z": 16, "sinks": 2, "window": 7}
GIVEN |= {"index_code": SHORT(4), "key_code": SHORT(3), "value_code": SHORT(2), "read": 12}
RAGGED = [[24, 3, 17], [1, 0, 1], [0, 20, 24], [1, 1, 1], [0, 1, 0]]


@partial(jax.jit, static_argnames="spec", donate_argnums=1)
def attend(spec, state, q, k, v, positions, end, aux):
    return spec.attend(state, q, k, v, positions, end, aux, Call(0.3))


def run(spec, schedule, aux=None):
    """Results of what comes row by row, and the last state."""
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


@pytest.mark.parametrize("shape", [{"index": 8}, {"index": 8, "page": 4}, {"index": 0}], ids=str)
@pytest.mark.parametrize("schedule", [RAGGED, [[S] * B]], ids=["ragged", "whole"])
@pytest.mark.parametrize("unrolled", [B, 1])
def test_equals_the_device(shape, schedule, unrolled, monkeypatch):
    monkeypatch.setattr(hosted_choosing, "UNROLLED", unrolled)
    jax.clear_caches()
    pages = None
    if not shape["index"]:
        rng = np.random.default_rng(1)
        pages = [
            jnp.asarray(
                rng.permuted(np.arange(B * max(new) * K * S).reshape(B, max(new), K, S) % S, axis=-1)[
                    ..., :12
                ]
            )
            for new in schedule
        ]
    expected, _ = run(CodedChoosing(**GIVEN, **shape), schedule, pages)
    found, state = run(HostedChoosing(**GIVEN, **shape), schedule, pages)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert state.far.k.sharding.memory_kind == "pinned_host"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.near, state.far.index))} == {
        "device"
    }


def test_bytes_on_the_host():
    spec, on_device = (kind(**GIVEN, index=8) for kind in (HostedChoosing, CodedChoosing))
    store = spec.create(B, S).far.k
    # 16 coordinates of 3 bits, 16 of 2, and two scales; one slot for what is dropped.
    assert store.nbytes == spec.host_bytes(S, B) == B * (S + 1) * K * (6 + 1 + 4 + 1)
    assert spec.bytes(S, B) == on_device.bytes(S, B) + B * K * 12
    assert spec.bytes_read(S) == on_device.bytes_read(S)
    assert on_device.host_bytes(S, B) == 0


def test_what_must_fit(monkeypatch):
    spec = HostedChoosing(**GIVEN, index=8)
    host = spec.host_bytes(S, B)
    device = kv_cache.device_bytes([spec], S, B)
    assert device + host == kv_cache.held_bytes([spec], S, B)
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: host)
    kv_cache.check_fits([spec], batch=B, capacity=S, free=device)
    with pytest.raises(CacheMemoryError, match=f"needs {device:,} bytes, {device - 1:,} are free"):
        kv_cache.check_fits([spec], batch=B, capacity=S, free=device - 1)
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: host - 1)
    with pytest.raises(CacheMemoryError, match=f"needs {host:,} bytes on the host, .* or length {S - 1} at"):
        kv_cache.check_fits([spec], batch=B, capacity=S, free=device)


def test_only_what_is_asked_for_is_fetched():
    """The gather is the host's: the program sends the device no more than its rows."""
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


def test_what_is_not_kept_goes_nowhere():
    rows = np.arange(B * (S + 1) * K * 2, dtype=np.uint8).reshape(B, S + 1, K, 2)
    held = jax.device_put(rows, hosted_choosing._host_zeros((1,)).sharding)
    positions = jnp.asarray([[S], [S - 1], [3]])
    x = jnp.full((B, 1, K, 2), 255, jnp.uint8)
    put = np.asarray(jax.jit(put_tokens)(held, x, positions, jnp.asarray([S, S, 3])))
    expected = rows[:, :-1].copy()
    expected[1, S - 1] = 255
    np.testing.assert_array_equal(put[:, :-1], expected)


def test_a_device_without_pinned_memory_is_named(monkeypatch):
    monkeypatch.setattr(hosted_choosing, "HOST_MEMORY", "no such memory")
    with pytest.raises(CacheMemoryError, match="has no 'no such memory' memory"):
        HostedChoosing(**GIVEN, index=8).create(B, S)


def test_settings_that_cannot_be():
    with pytest.raises(PlanError, match="memory='disk' must be one of"):
        Settings(memory="disk")
    with pytest.raises(PlanError, match="memory='host' with read=0"):
        Settings(memory="host", read=0)
    with pytest.raises(PlanError, match="not to a mesh"):
        HostedChoosing(**GIVEN, index=8).on_heads(1)
    with pytest.raises(PlanError, match="must give bytes"):
        HostedChoosing(**GIVEN | {"value_code": Gaussian(2)}, index=8)


def same_on_host_and_device(tiny: TinyModel) -> None:
    """Tokens generated in one loop on the device, and answers to questions on copies of a cache."""
    H, config = tiny.config.head_dim, tiny.config
    plan = CompressionPlan.uniform(config, qk=H, v=H, window=8, sinks=2)
    prompts = [tiny.tokens(1, n, seed=n)[0].tolist() for n in (40, 23)]
    contexts = tiny.tokens(2, 48, seed=5)
    asked = Question(tiny.tokens(1, 6, seed=6)[0], np.arange(6) > 2, None)
    found = []
    for memory in ("device", "host"):
        coded = replace(plan, method="coded", settings=Settings(index=8, read=12, memory=memory))
        model = tiny.model(coded)
        made = zdc_jax.generate(model, prompts, max_new_tokens=12)
        _, cache = read_contexts(model.network, contexts, room=64, reading="cached")
        answered = sheet_answers(model.network, cache, [Sheet(row, {"a": [asked] * 3}) for row in contexts])
        found.append(([one.tokens for one in made.completions], answered))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1]["a"], found[1][1]["a"], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine.log_probability, other.log_probability)


def test_a_model_answers_alike(tiny_llama: TinyModel):
    same_on_host_and_device(tiny_llama)


@pytest.mark.gpu
def test_on_a_gpu(tiny_llama: TinyModel, monkeypatch):
    for schedule in (RAGGED, [[S] * B]):
        test_equals_the_device({"index": 8}, schedule, B, monkeypatch)
    same_on_host_and_device(tiny_llama)
