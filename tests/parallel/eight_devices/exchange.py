"""Every element of a relayout lands where it belongs: all elements of the inputs differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zdc_jax.parallel.exchange import gather_head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.mesh import SEQUENCE, MeshConfig
from zdc_jax.parallel.near import first_tokens, halo_rows, with_halo

B, T, U = 2, 24, 4
TOKENS, HEADS = P(None, SEQUENCE), P(None, None, SEQUENCE)


def coded(heads, width, dtype=jnp.float32):
    """Return distinct values [B, T, heads, width]."""
    return jnp.arange(B * T * heads * width).reshape(B, T, heads, width).astype(dtype)


def sharded(f, in_specs, out_specs, devices=U):
    mesh = MeshConfig(sequence=devices).create()
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 4), (8, 2), (8, 1), (4, 4), (12, 3), (12, 6)])
def test_every_head_gets_all_its_tokens(N, K):
    q, k, v = coded(N, 5), coded(K, 5) + 0.25, coded(K, 3) + 0.5
    scatter = sharded(lambda *x: scatter_head_groups(x, SEQUENCE)[0], (TOKENS,) * 3, [HEADS] * 3)
    heads_q, heads_k, heads_v = scatter(q, k, v)
    np.testing.assert_array_equal(heads_q, q)
    copies = kv_copies(K, U)
    assert (K * copies) % U == 0
    assert copies == 1 or all((K * fewer) % U for fewer in range(1, copies))
    np.testing.assert_array_equal(heads_k, np.repeat(k, copies, axis=2))
    np.testing.assert_array_equal(heads_v, np.repeat(v, copies, axis=2))
    # A query head meets its own KV head among those of its device.
    kv_of_query = np.repeat(np.arange(K * copies) // copies, N // (K * copies))
    np.testing.assert_array_equal(kv_of_query, np.arange(N) // (N // K))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_there_and_back_bit_by_bit(dtype):
    bits = jax.random.bits(jax.random.key(0), (B, T, 8, 6), jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}"))
    x = jax.lax.bitcast_convert_type(bits, dtype)  # NaNs and denormals among them

    def round_trip(x):
        ((heads, *_),) = scatter_head_groups((x, x, x), SEQUENCE)
        return gather_head_groups([(heads, None)], SEQUENCE)[0]

    back = sharded(round_trip, (TOKENS,), TOKENS)(x)
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(back, bits.dtype), bits)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_log_sum_exp_travels_in_float32(dtype):
    o = coded(8, 6, dtype)
    lse = jax.random.normal(jax.random.key(0), (B, 8, T)).at[:, :, :3].set(-jnp.inf)
    back = sharded(
        lambda o, lse: gather_head_groups([(o, lse)], SEQUENCE),
        (HEADS, P(None, SEQUENCE)),
        (TOKENS, P(None, None, SEQUENCE)),
    )(o, lse)
    np.testing.assert_array_equal(back[0].astype(jnp.float32), o.astype(jnp.float32))
    np.testing.assert_array_equal(back[1], lse)


@pytest.mark.parametrize("window", [0, 1, 4, 6, 7, 13, 18, 24, 40])
def test_halo(window):
    k, v, t = coded(2, 5) + 1, coded(2, 3) + 1.5, T // U
    mine_k, mine_v = sharded(lambda k, v: with_halo(k, v, window, SEQUENCE), (TOKENS,) * 2, (TOKENS,) * 2)(
        k, jnp.pad(v, [(0, 0)] * 3 + [(0, 2)])
    )
    for got, whole in ((mine_k, k), (mine_v[..., :3], v)):
        padded = np.pad(np.asarray(whole), ((0, 0), (window, 0), (0, 0), (0, 0)))
        expected = [padded[:, u * t : (u + 1) * t + window] for u in range(U)]
        # Only as many rows travel as there are tokens before; further ones are absent, and zeros.
        np.testing.assert_array_equal(got, np.concatenate(expected, 1))
    rows = halo_rows(window, t, U)
    assert sum(rows) == min(window, (U - 1) * t)
    assert len(rows) == min(-(-window // t), U - 1)


@pytest.mark.parametrize("count", [0, 2, 6, 9])
def test_sinks_are_everywhere(count):
    k, v = coded(2, 5), coded(2, 5) + 0.5
    first = sharded(lambda k, v: first_tokens(k, v, count, SEQUENCE), (TOKENS,) * 2, (TOKENS,) * 2)
    for got, whole in zip(first(k, v), (k, v), strict=True):
        np.testing.assert_array_equal(got, np.concatenate([whole[:, :count]] * U, 1))
