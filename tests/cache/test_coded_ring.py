"""Near tokens in eight bits, compared with float64 attention to values rounded in loops."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import put_near, round_tokens
from zdc_jax.cache.codes.code import Int8
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.integers import ChannelIntegers
from zdc_jax.cache.specs import coded_ring
from zdc_jax.cache.specs.coded_ring import CodedRing
from zdc_jax.cache.specs.spec import Call, NewTokens, Snapshots
from zdc_jax.errors import PlanError
from zdc_jax.ops import new_tokens
from zdc_jax.ops.new_keys import NewKeys

B, K, G, H, S, SINKS, WINDOW = 2, 2, 2, 16, 30, 3, 7
SHAPE = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": 0, "Z": 0}
RING = CodedRing(**SHAPE, sinks=SINKS, window=WINDOW, code=Int8())
SCALE = 0.3


def tokens(heads: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, S, heads, H)).astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Round each vector to integers -127 … 127 times a scale of 16 bits."""
    scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.clip(np.round(x / scale), -127, 127) * scale


def by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    k, v, o = rounded(k), rounded(v), np.zeros(q.shape)
    for b, t, n in np.ndindex(B, S, K * G):
        near = [j for j in range(t + 1) if j < SINKS or j > t - WINDOW]
        scores = SCALE * k[b, near, n // G] @ q[b, t, n].astype(np.float64)
        weights = np.exp(scores - scores.max())
        o[b, t, n] = weights / weights.sum() @ v[b, near, n // G]
    return o


@pytest.mark.parametrize("pieces", [[S], [11, 8, *[1] * 11]], ids=["whole", "decoded"])
@pytest.mark.full
def test_attends_to_rounded_tokens(pieces):
    q, k, v = (tokens(heads, seed) for seed, heads in enumerate((K * G, K, K)))
    state, found, start = RING.create(B, S), [], 0
    for count in pieces:
        new_q, new_k, new_v = (jnp.asarray(each[:, start : start + count]) for each in (q, k, v))
        positions = jnp.broadcast_to(jnp.arange(start, start + count), (B, count))
        new = NewTokens(NewKeys(new_k), new_v, positions, jnp.full(B, start + count))
        done = RING.attend(state, new_q, new, "aux", Call(SCALE))
        state, start = done.state, start + count
        found.append(np.asarray(done.o))
        assert done.aux == "aux"
    expected = by_loops(q, k, v)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.full
def test_the_kernel_rounds_as_the_code_does(monkeypatch):
    ring = replace(RING, code=FittedIntegers(8))
    q, k, v = (jnp.asarray(tokens(heads, seed)) for seed, heads in enumerate((K * G, K, K)))
    positions, end = jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.array([S, 12])

    def attend():
        state = ring.create(B, S)
        done = jax.jit(
            lambda q, k, v: ring.attend(state, q, NewTokens(NewKeys(k), v, positions, end), None, Call(SCALE))
        )
        return done(q, k, v)

    want = attend()
    asked = []

    def round_here(x, bits):
        asked.append(bits)
        return round_tokens(x, bits, interpret=True)

    monkeypatch.setattr(coded_ring, "round_with_kernel", round_here)
    found = attend()
    assert asked == [8]
    # Another scale may be chosen where errors are equal, so codes may differ.
    np.testing.assert_allclose(found.o[0], want.o[0], atol=0.02)
    for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(want.state), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert (np.asarray(one) != np.asarray(other)).sum() <= 0.05 * np.count_nonzero(other)


def test_one_kernel_does_what_several_steps_of_xla_do(monkeypatch):
    ring = replace(RING, code=FittedIntegers(8))
    k, v = (jnp.asarray(tokens(K, seed)) for seed in range(2))
    begin, end, rows = jnp.array([9, 4]), jnp.array([17, 9]), jnp.array([2, 0])
    positions = begin[:, None] + jnp.arange(8)
    new = [jnp.stack([x[0, 9:17], x[1, 4:12]]) for x in (k, v)]
    snapshots = Snapshots(jax.tree.leaves(ring.create(4, S)), jnp.array([12, 6]), jnp.array([1, 9]))

    @jax.jit
    def run_xla(k, v, new_k, new_v):
        whole, lengths = jnp.broadcast_to(jnp.arange(S), (3, S)), jnp.array([4, 5, 9])
        old_k, old_v = (x[jnp.array([1, 0, 0])] for x in (k, v))
        earlier = ring.write(ring.create(3, S), NewTokens(NewKeys(old_k), old_v, whole, lengths))
        some, new = ring.of_rows(earlier, rows), NewTokens(NewKeys(new_k), new_v, positions, end)
        marked = ring.write_tail(some, replace(new, end=snapshots.marks))
        written, trailing = ring.join_prompt(some, new)
        return (
            earlier,
            (ring.with_rows(earlier, rows, written), snapshots.put(jax.tree.leaves(marked))),
            trailing,
        )

    earlier, want, trailing = run_xla(k, v, *new)

    def put(*arguments, **options):
        return put_near(*arguments, **options, interpret=True)

    monkeypatch.setattr(new_tokens, "device_refusal", lambda x: None)
    monkeypatch.setattr(new_tokens, "put_near", put)
    state, found, made = ring.put_prompt(
        earlier, rows, NewTokens(NewKeys(new[0]), new[1], positions, end), snapshots=snapshots
    )
    for one, other in zip(*map(jax.tree.leaves, ((state, made), want)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Another scale may be chosen where errors are equal, so codes may differ.
        assert (np.asarray(one) != np.asarray(other)).sum() <= 0.05 * np.count_nonzero(other)
    np.testing.assert_array_equal(found.start, trailing.start)
    for name in ("k", "v", "sink_k", "sink_v"):
        for b, length in enumerate(end if name in "kv" else [SINKS] * B):  # Later rows may have any values.
            one, other = (np.asarray(getattr(x, name))[b, :, :length] for x in (found, trailing))
            np.testing.assert_allclose(one, other, atol=0.05)


def test_bytes():
    # One byte per coordinate and two per scale, of keys and values.
    assert RING.bytes(S, B) == B * K * 64 * 2 * (H + 2), "a kernel reads 64 slots at a time"
    wide = replace(RING, window=67)
    assert wide.bytes(100, B) == B * K * (72 + 8) * 2 * (H + 2), "slots come in eights"


def test_what_cannot_be():
    with pytest.raises(PlanError, match="R=8, Z=0: a quantized ring stores no far tokens"):
        CodedRing(**SHAPE | {"R": 8}, sinks=SINKS, window=WINDOW, code=Int8())
    with pytest.raises(PlanError, match="quantizes 8 tokens together; a ring needs single tokens"):
        CodedRing(**SHAPE, sinks=SINKS, window=WINDOW, code=ChannelIntegers(4, 8))
