"""Store of quantized tokens against brute force: only far tokens are quantized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zdc_jax.cache.codes.code import Int8
from zdc_jax.cache.codes.integers import ChannelIntegers, TokenIntegers
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import PlanError
from zdc_jax.ops.new_keys import NewKeys

K, G, H, SINKS, SCALE = 2, 3, 16, 2, 0.3


def store(block: int, window: int) -> CodedStore:
    """Return a store with two bits, so that quantized tokens differ clearly."""
    return CodedStore(
        num_kv_heads=K,
        head_dim=H,
        dtype="float32",
        R=H,
        Z=H,
        sinks=SINKS,
        window=window,
        key_code=ChannelIntegers(2, block),
        value_code=TokenIntegers(2, 16),
    )


def through(code: ChannelIntegers | TokenIntegers, x: np.ndarray) -> np.ndarray:
    """Quantize and dequantize vectors [T, K, H] block by block; an unfinished block is NaN."""
    out, block = np.full(x.shape, np.nan), code.block
    for first in range(0, len(x) - block + 1, block):
        rows = jnp.asarray(x[first : first + block]).swapaxes(0, 1)
        out[first : first + block] = code.decode(code.encode(rows), H).swapaxes(0, 1)
    return out


def brute_force(spec: CodedStore, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute the attention of all queries [T, N, H], one score at a time."""
    far_k, far_v = through(spec.key_code, k), through(spec.value_code, v)
    out = np.zeros(q.shape)
    for t, n in np.ndindex(q.shape[:2]):
        near = [j < spec.sinks or j > t - spec.window for j in range(t + 1)]
        keys = np.array([(k if near[j] else far_k)[j, n // G] for j in range(t + 1)], np.float64)
        values = np.array([(v if near[j] else far_v)[j, n // G] for j in range(t + 1)], np.float64)
        weights = np.exp(SCALE * keys @ q[t, n])
        out[t, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(
    ("capacity", "block", "window"),
    [(48, 8, 8), (40, 16, 20), (24, 8, 24), (24, 32, 40)],
    ids=["blocks fill it", "a block is left over", "all is near", "no block fits"],
)
@pytest.mark.full
def test_attention_reads_codes_of_far_tokens_alone(capacity, block, window):
    rng, spec = np.random.default_rng(capacity), store(block, window)
    T = capacity - 1
    q, k, v = (rng.normal(size=(T, heads, H)).astype(np.float32) for heads in (K * G, K, K))
    positions, end = jnp.arange(T)[None], jnp.array([T])
    new_q, new_k, new_v = (jnp.asarray(x)[None] for x in (q, k, v))

    @jax.jit
    def attend(state, q, k, v):
        new = NewTokens(NewKeys(k), v, positions, end)
        return spec.attend(state, q, new, None, Call(SCALE, "xla"))

    done = attend(spec.create(1, capacity), new_q, new_k, new_v)
    np.testing.assert_allclose(done.o[0], brute_force(spec, q, k, v), atol=3e-6)


def test_windows_shorter_than_a_block_are_refused():
    with pytest.raises(
        PlanError, match="window=15 must be at least 16, the tokens that are quantized together"
    ):
        store(16, 15)


def test_a_code_refuses_ranks():
    with pytest.raises(PlanError, match="rank 20 must be a multiple of 8"):
        CodedStore(
            num_kv_heads=K,
            head_dim=20,
            dtype="float32",
            R=20,
            Z=20,
            key_code=Int8(),
            value_code=TokenIntegers(4, 32),
        )
