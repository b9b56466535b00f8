"""Block scores: what scores gain in each block of 64 positions, in the prefill and decode kernels.

The truth is float64 attention with one more coordinate per block: queries have the gain there, keys a one.
"""

import interpreting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import check, decode, f64, prefill
from merged_parts import decode_attention

from kernels_pallas import (
    DecodeConfig,
    PrefillConfig,
    Ring,
    Trailing,
    prefill_attention,
)
from kernels_pallas.prefill import attention as prefill_kernel
from kernels_pallas.prefill import consumer, softmax, turns

BF16, F32 = jnp.bfloat16, jnp.float32


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def draw_gains(seed, *shape):
    """Return gains that decide most of attention."""
    return 4 * jax.random.normal(jax.random.key(100 + seed), shape, F32)


def extended(q, k, gains, scale):
    """Return q [B, T, N, R] and k [B, K, S, R] in float64 with a coordinate for each block."""
    one = np.equal.outer(np.arange(k.shape[2]) // 64, np.arange(gains.shape[-1])).astype(float)
    return (
        np.concatenate([f64(q), f64(gains) / scale], -1),
        np.concatenate([f64(k), np.broadcast_to(one, (*k.shape[:3], one.shape[-1]))], -1),
    )


def run_prefill(keys, config, T=150, starts=(0, 217), R=64, Z=64, window=0, sinks=0):
    """Compare one call with the truth: all keys, far keys, or near keys alone."""
    B, S, N, K, scale = 2, 400, 4, 2, 0.2
    starts = np.array(starts)
    q, k, v = draw(0, B, T, N, R), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    gains = draw_gains(0, B, T, N, -(-S // 64))
    options = {"scale": scale, "starts": starts}
    near = {"window": window, "sinks": sinks}
    long_q, long_k = extended(q, k, gains, scale)
    # Blocks after a query's own have no key that it sees, and any score.
    own = (starts[:, None] + np.arange(T)) // 64
    needed = np.arange(gains.shape[-1]) <= own[:, :, None, None]
    given, lengths = {"block_scores": jnp.where(needed, gains, jnp.nan), "config": config}, starts + T
    if keys != "near":
        kind = options | ({} if keys == "all" else {"keys": "far", **near})
        found = prefill_attention(q, k, v, **given, **kind)
        check(*found, *prefill(long_q, long_k, v, lengths=lengths, **kind), BF16)
        return
    first = np.maximum(starts - window + 1, 0) // 64 * 64
    cut = [jnp.stack([jnp.roll(x[b], -first[b], axis=1) for b in range(B)]) for x in (k, v)]
    of_sinks = (k[:, :, :8], v[:, :, :8]) if sinks else ()
    trailing = Trailing(*cut, jnp.asarray(first, jnp.int32), *of_sinks)
    found = prefill_attention(q, k[..., :0], v[..., :0], trailing=trailing, **given, **options, **near)
    truth = prefill(long_q, long_k[..., :0], v[..., :0], tail=(long_k, v), lengths=lengths, **options, **near)
    check(*found, *truth, BF16)


KINDS = {
    "all": {},
    "far": {"window": 70, "sinks": 4},
    "near": {"window": 128, "sinks": 4},
    "near without sinks": {"window": 200},
}
CONFIGS = {"wide": PrefillConfig(128, 1, 2), "turns": PrefillConfig(64, 2, 2, turns=8)}


@pytest.fixture
def interpreted(monkeypatch):
    def dot(a, b):
        return jnp.dot(a.astype(F32), b[...].astype(F32), precision="highest")

    monkeypatch.setattr(softmax, "_any_positive", lambda x: (x > 0).any())
    monkeypatch.setattr(consumer, "_product", lambda *pairs: sum(dot(q[...], k[...].T) for q, k in pairs))
    monkeypatch.setattr(consumer, "_accumulate", lambda acc, p, values: acc + dot(p, values))
    monkeypatch.setattr(turns, "_take_turn", lambda c, m: m)
    monkeypatch.setattr(turns, "_hand_on", lambda c, l: None)
    with interpreting.interpreted_warpgroups(prefill_kernel, "prefill_attention"):
        yield


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.matrix("far-wide", "near-wide")
def test_prefill(kind, config):
    run_prefill(kind.split()[0], CONFIGS[config], **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, PrefillConfig(128, 2, 2, overlap=True), PrefillConfig(64, 2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_on_the_device(kind, config):
    run_prefill(kind.split()[0], config, **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(8, 8), (12, 2), (32, 8)])
@pytest.mark.parametrize("near", [False, True])
def test_decode_on_the_device(N, K, near):
    B, S, H, window, sinks, scale = 4, 1024, 128, 256, 4, 0.1
    lengths = np.array([1, 65, 700, 1024])
    q, k, v = draw(0, B, N, H), draw(1, B, K, S, H), draw(2, B, K, S, H)
    gains = draw_gains(0, B, N, S // 64)
    if not near:
        found = decode_attention(q, k, v, jnp.asarray(lengths), scale=scale, block_scores=gains)
        long_q, long_k = extended(q[:, None], k, gains[:, None], scale)
        check(*found, *decode(long_q[:, 0], long_k, v, lengths, scale=scale), BF16)
        return
    # Slot p mod window of the ring holds position p, so the truth reads its keys by position.
    at = np.stack([ring_order(length, window, sinks) for length in lengths])
    ring = Ring(*(jnp.take_along_axis(x, at[:, None, :, None], axis=2) for x in (k, v)))
    options = {"scale": scale, "sinks": sinks, "window": window}
    none = k[..., :0], v[..., :0]
    found = decode_attention(q, *none, jnp.asarray(lengths), ring=ring, block_scores=gains, **options)
    long_q, long_k = extended(q[:, None], k, gains[:, None], scale)
    for b, length in enumerate(lengths):
        seen = np.arange(length)
        seen = seen[(seen < sinks) | (seen >= length - window)]
        one = slice(b, b + 1)
        truth = decode(long_q[one, 0], long_k[one][:, :, seen], v[one][:, :, seen], [len(seen)], scale=scale)
        check(found[0][one], found[1][one], *truth, BF16)


def ring_order(length, window, sinks):
    """Return the position in each row of a ring of `length` tokens; other rows have any."""
    at = np.zeros(window + 8, int)
    for position in range(sinks, length):
        at[position % window] = position
    at[window : window + sinks] = np.arange(sinks)
    return at


def lower(f, *shapes):
    arguments = (jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in shapes)
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("H", [128, 64, 256])
@pytest.mark.full
def test_lowers(H):
    B, T, S, N, K, M = 2, 300, 1024, 12, 2, 132

    def prompt(q, k, v, gains, tail_k, tail_v, start):
        near = {"sinks": 4, "window": 128}
        far = prefill_attention(q, k, v, scale=0.1, block_scores=gains, keys="far", **near)
        trailing = Trailing(tail_k, tail_v, start, tail_k[:, :, :8], tail_v[:, :, :8])
        none = k[..., :0], v[..., :0]
        return far, prefill_attention(q, *none, scale=0.1, block_scores=gains, trailing=trailing, **near)

    def token(q, k, v, gains, ring_k, ring_v, lengths):
        ring, near = Ring(ring_k, ring_v), {"sinks": 4, "window": 128}
        none = k[..., :0], v[..., :0]
        return (
            decode_attention(q, k, v, lengths, scale=0.1, block_scores=gains),
            decode_attention(q, *none, lengths, scale=0.1, block_scores=gains, ring=ring, **near),
        )

    stored, rows = ((B, K, S, H), BF16), ((B, K, M, H), BF16)
    tail, integers = ((B, K, 768, H), BF16), ((B,), jnp.int32)
    queries, gains = ((B, T, N, H), BF16), ((B, T, N, S // 64), F32)
    assert "mosaic_gpu" in lower(prompt, queries, stored, stored, gains, tail, tail, integers)
    single, single_gains = ((B, N, H), BF16), ((B, N, S // 64), F32)
    assert "mosaic_gpu" in lower(token, single, stored, stored, single_gains, rows, rows, integers)


def test_configs_of_wide_blocks_are_refused():
    q, k = jnp.zeros((1, 8, 2, 64), BF16), jnp.zeros((1, 2, 64, 64), BF16)
    gains = jnp.zeros((1, 8, 2, 1))
    with pytest.raises(ValueError, match=r"block_kv=256: must be at most 128 with block_scores"):
        prefill_attention(q, k, k, scale=1.0, block_scores=gains, config=PrefillConfig(256, 1, 1))
    with pytest.raises(ValueError, match="block=128: must be 64 with block_scores"):
        decode_attention(
            q[:, 0],
            k,
            k,
            jnp.ones(1, jnp.int32),
            scale=1.0,
            block_scores=gains[:, 0],
            config=DecodeConfig(block=128),
        )
