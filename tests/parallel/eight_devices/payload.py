"""A float8 exchange: numbers that arrive, attention on them, the cache of a loaded model, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from jax.sharding import PartitionSpec as P

from benchmarks.mesh.rivals.exchanges import ring_attention
from zdc_jax import load
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, MeshError
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.exchange import gather_head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.mesh import SEQUENCE, MeshConfig
from zdc_jax.parallel.payload import EXACT, Formats, scale_weights
from zdc_jax.plan import CompressionPlan, LayerRanks

B, T, U, H = 2, 24, 4, 16
TOKENS, HEADS, HEADS_FIRST = P(None, SEQUENCE), P(None, None, SEQUENCE), P(None, SEQUENCE)


def sharded(f, in_specs, out_specs):
    mesh = MeshConfig(sequence=U).create()
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def drawn(N, K, R=H, Z=H):
    """Return q, k, v and scales that clip some values."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, T, *shape)).astype(np.float32) for shape in ((N, R), (K, R), (K, Z)))
    exponents = (rng.integers(-8, 3, (K, width)) for width in (R, R, Z))
    return (q, k, v), [2.0 ** x.astype(np.float32) for x in exponents]


def emulated(x, scale):
    """Return the received values by NumPy's cast; heads are a multiple of those of the scale."""
    scale = np.repeat(scale, x.shape[2] // len(scale), axis=0)
    rounded = np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    return np.where(np.arange(x.shape[-1]) < EXACT, x, rounded)


@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 2), (12, 6)])
def test_what_arrives_is_what_the_cast_gives(N, K):
    (q, k, v), scales = drawn(N, K, 5, 3)
    sent = Formats.float8(*scales)

    def scatter(*x):
        return scatter_head_groups(x, SEQUENCE, (sent.q, sent.k, sent.v))[0]

    got = sharded(scatter, (TOKENS,) * 3, [HEADS] * 3)(q, k, v)
    copies = kv_copies(K, U)
    expected = [emulated(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    np.testing.assert_array_equal(got[0], expected[0])
    for given, x in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(given, np.repeat(x, copies, axis=2))
    lse = np.random.default_rng(1).normal(size=(B, N, T)).astype(np.float32)
    lse[:, :, :3] = -np.inf
    o = np.random.default_rng(2).normal(size=(B, T, N, 3)).astype(np.float32)

    def back(o, lse):
        alone, _ = gather_head_groups([(o, None)], SEQUENCE, sent.o)
        return alone, *gather_head_groups([(o, lse)], SEQUENCE, sent.o)

    alone, o8, lse8 = sharded(back, (HEADS, HEADS_FIRST), (TOKENS, TOKENS, HEADS))(o, lse)
    np.testing.assert_array_equal(alone, emulated(o, scales[2]))
    np.testing.assert_array_equal(o8, emulated(o, scales[2]))
    np.testing.assert_array_equal(lse8, lse)


def far_and_near(qkv, scales, ranks, sinks, window, round_to):
    """Compute attention by its definition in float64, with far keys, values and outputs rounded."""
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    group = q.shape[2] // k.shape[2]
    far = [x[..., :r] for x, r in zip((q, k, v), (ranks.qk, ranks.qk, ranks.v), strict=True)]
    far_q, far_k, far_v = (np.float64(round_to(x, s)) for x, s in zip(far, scales, strict=True))

    def share(x):
        return np.repeat(x, group, axis=2)

    i, j = np.arange(T)[:, None], np.arange(T)
    near = (i - j < window) | (j < sinks)

    def scores(q, k):
        return np.exp(np.einsum("BTNR,BSNR->BNTS", q, share(k)) / np.sqrt(H)) * (j <= i)

    weights = scores(q, k) * near, scores(far_q, far_k) * ~near
    sums = [w.sum(-1).swapaxes(1, 2)[..., None] for w in weights]
    o = [np.einsum("BNTS,BSNZ->BTNZ", w, share(x)) for w, x in zip(weights, (v, far_v), strict=True)]
    far_o = round_to(np.divide(o[1], sums[1], out=np.zeros_like(o[1]), where=sums[1] > 0), scales[2])
    o[0][..., : ranks.v] += far_o * sums[1]
    return o[0] / (sums[0] + sums[1])


@pytest.mark.parametrize(
    ("K", "ranks", "sinks", "window"),
    [(8, LayerRanks(8, 12), 2, 7), (2, LayerRanks(8, 8), 0, 5), (2, LayerRanks(H, H), 0, 0)],
)
@pytest.mark.matrix
def test_attention_rounds_where_it_says(K, ranks, sinks, window):
    qkv, _ = drawn(8, K)
    scales = [np.full((K, r), 2.0**-4, np.float32) for r in (ranks.qk, ranks.qk, ranks.v)]
    formats = Formats.float8(*scales)

    def attend(q, k, v):
        kept = {"R": ranks.qk, "Z": ranks.v, "sinks": sinks, "window": window}
        spec = PrefixRing(num_kv_heads=k.shape[2], head_dim=H, dtype="float32", **kept)
        return sharded_attention(q, k, v, scale=H**-0.5, spec=spec, formats=formats)[0]

    got = np.asarray(sharded(attend, (TOKENS,) * 3, TOKENS)(*qkv))
    expected = far_and_near(qkv, scales, ranks, sinks, window, emulated)
    exact = far_and_near(qkv, scales, ranks, sinks, window, lambda x, scale: x)
    differs = np.abs(got - expected) > 1e-5
    assert differs.mean() < 1e-3  # An output at the middle of two float8 numbers may go either way.
    assert np.abs(got - expected).max() <= 2.0**-3 * np.abs(exact).max()
    # Relative errors of q, k, v and o are below 2^-4 each, so that of scores is below 2^-3 of Σ|q k|/√H.
    assert 1e-3 < np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) < 2.0**-4


CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a model, its folder without calibration, and load's arguments for a plan on a mesh."""
    model, folder = TinyModel(CONFIG), tmp_path_factory.mktemp("payload") / "model"
    model.write(folder)
    layers = LayerRanks(16, 32), LayerRanks(0, 0)
    plan = CompressionPlan(layers, CONFIG.num_kv_heads, 32, window=9, sinks=2)
    basis = replace(model.basis(), fingerprint=Checkpoint.open(folder).fingerprint)
    return model, folder, {"plan": plan, "basis": basis, "mesh": MeshConfig(data=2, sequence=2, model=2)}


@pytest.mark.full
def test_the_cache_holds_what_arrived(tiny):
    """Compare the first layer, whose keys and values are the same before they are sent."""
    model, folder, options = tiny
    native, float8 = (load(folder, **options, payload=payload) for payload in ("native", "float8"))
    assert (native.network.payload, float8.network.payload) == ("native", "float8")
    tokens, end = jnp.asarray(model.tokens(2, 45)), jnp.array([45, 30])
    (last, cache), (last8, cache8) = (x.network.prefill(tokens, end, capacity=48) for x in (native, float8))
    before, after = cache.layers[0], cache8.layers[0]
    scales = scale_weights(options["basis"], 0)
    for name, rank in (("k", 16), ("v", 32)):
        sent, held = (np.asarray(getattr(x, name)).swapaxes(1, 2) for x in (before, after))
        assert held.shape == (2, 48, 4, rank)  # two copies of each KV head
        expected = emulated(sent, scales[f"{name}_scale"][:, :rank].astype(np.float32))
        np.testing.assert_array_equal(held, expected)
        assert not np.array_equal(held, sent)
    for name in ("ring_k", "ring_v"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert 0 < np.abs(last8 - last).max() < 0.05 * np.abs(last).max()


def test_refusals(tiny):
    model, folder, options = tiny
    without = {name: value for name, value in options.items() if name != "mesh"}
    with pytest.raises(
        MeshError, match="payload='float8' is a format for the exchange between devices; pass mesh="
    ):
        load(folder, **without, payload="float8")
    with pytest.raises(
        MeshError, match="weights='gathered' divides the weights over several devices; pass mesh="
    ):
        load(folder, **without, weights="gathered")
    with pytest.raises(ValueError, match=r"weights='halved' must be one of .*'gathered'"):
        load(folder, **options, weights="halved")
    with pytest.raises(ValueError, match=r"payload='int4': must be one of .*'float8'"):
        load(folder, **options, payload="int4")
    with pytest.raises(CalibrationError, match="needs a calibrated basis; pass plan="):
        load(folder, mesh=options["mesh"], payload="float8")
    with pytest.raises(
        CalibrationError, match="which this older basis lacks; run zdc calibrate MODEL TEXT --overwrite"
    ):
        load(folder, **{**options, "basis": replace(options["basis"], v_rms=None)}, payload="float8")
    network = load(folder, **options, payload="float8").network
    with pytest.raises(NotImplementedError, match=r"payload='float8': not supported by .*ring_attention"):
        network.hidden(jnp.asarray(model.tokens(2, 9)), attention=ring_attention)
