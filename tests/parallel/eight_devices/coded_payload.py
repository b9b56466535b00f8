"""A coded exchange: numbers that arrive, attention on them, near tokens as they are, the cache, bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from jax.sharding import PartitionSpec as P
from payload_codes import emulated

from benchmarks.mesh.traffic import cache_bytes, hlo_bytes, prefill_bytes
from benchmarks.random_weights import random_params
from zdc_jax import load
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CalibrationError, MeshError
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel import payload as payloads
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.exchange import gather_head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.mesh import SEQUENCE, MeshConfig
from zdc_jax.parallel.payload import Formats, coded_blocks, halo_blocks
from zdc_jax.plan import CompressionPlan, LayerRanks

B, T, U, H = 2, 24, 4, 16
TOKENS, HEADS, HEADS_FIRST = P(None, SEQUENCE), P(None, None, SEQUENCE), P(None, SEQUENCE)


def sharded(f, in_specs, out_specs):
    mesh = MeshConfig(sequence=U).create()
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def drawn(N, K, R=H, Z=H):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, *shape)).astype(np.float32) for shape in ((N, R), (K, R), (K, Z))]


def as_sent(kind, x):
    return emulated(x, coded_blocks(kind, x.shape[-1]))


def assert_mostly_close(got, expected, atol=1e-5):
    """Assert that under 1 % of vectors differ: a value between two levels may be rounded either way."""
    differs = np.abs(np.asarray(got) - expected).max(-1) > atol
    assert differs.mean() < 0.01


@pytest.mark.parametrize(("N", "K"), [(8, 8), (8, 2), (12, 6)])
@pytest.mark.matrix
def test_what_arrives_is_what_the_codes_say(N, K):
    qkv = drawn(N, K, 40, 12)
    sent = Formats.coded(40, 12)

    def scatter(*x):
        return scatter_head_groups(x, SEQUENCE, (sent.q, sent.k, sent.v))[0]

    for kind, x, got in zip("qkv", qkv, sharded(scatter, (TOKENS,) * 3, [HEADS] * 3)(*qkv), strict=True):
        copies = 1 if kind == "q" else kv_copies(K, U)
        assert_mostly_close(got, np.repeat(as_sent(kind, x), copies, axis=2))
    rng = np.random.default_rng(1)
    o, lse = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, N, 12), (B, N, T)))
    lse[:, :, :3] = -np.inf
    back = sharded(
        lambda o, lse: gather_head_groups([(o, lse)], SEQUENCE, sent.o, sent.lse),
        (HEADS, HEADS_FIRST),
        (TOKENS, HEADS),
    )
    got, got_lse = back(o, lse)
    assert_mostly_close(got, as_sent("o", o))
    np.testing.assert_array_equal(got_lse, lse.astype(np.float16).astype(np.float32))


def by_definition(qkv, ranks, near, *, of_plan):
    """Compute attention in float64 with far q, k, v, o rounded, and the halo of a window not the plan's."""
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    R, Z, (sinks, window) = ranks.qk, ranks.v, near

    def share(x):
        return np.repeat(x, q.shape[2] // x.shape[2], axis=2)

    far = as_sent("q", q[..., :R]), share(as_sent("k", k[..., :R])), share(as_sent("v", v[..., :Z]))
    if not of_plan:
        q, k, v = q[..., :R], k[..., :R], v[..., :Z]
    halo_k = k if of_plan else emulated(k, halo_blocks(R))
    halo_v = v if of_plan else emulated(v, halo_blocks(Z))
    i, j = np.arange(T)[:, None], np.arange(T)
    is_near = (i - j < window) | (j < sinks)
    is_halo = is_near & (j >= sinks) & (i // (T // U) != j // (T // U))

    def weights(q, k):
        return np.exp(np.einsum("BTNR,BSNR->BNTS", q, k) / np.sqrt(H)) * (j <= i)

    parts = [
        (weights(q, share(k)) * (is_near & ~is_halo), share(v)),
        (weights(q, share(halo_k)) * is_halo, share(halo_v)),
        (weights(*far[:2]) * ~is_near, far[2]),
    ]
    sums = [w.sum(-1).swapaxes(1, 2)[..., None] for w, _ in parts]
    o = [np.einsum("BNTS,BSNZ->BTNZ", w, v) for w, v in parts]
    far_o = as_sent("o", np.divide(o[2], sums[2], out=np.zeros_like(o[2]), where=sums[2] > 0))
    with np.errstate(divide="ignore"):
        weight = np.exp(np.log(sums[2]).astype(np.float16).astype(np.float64))
    found = o[0] + o[1]
    found[..., :Z] += far_o * weight
    return found / (sums[0] + sums[1] + weight)


@pytest.mark.parametrize(
    ("K", "ranks", "near", "of_plan"),
    [
        (8, LayerRanks(H, H), (2, 7), False),
        (2, LayerRanks(H, H), (0, 3), False),
        (2, LayerRanks(H, H), (1, 14), False),
        (2, LayerRanks(8, 12), (2, 7), False),
        (2, LayerRanks(8, 12), (2, 7), True),
    ],
)
@pytest.mark.matrix
def test_attention_rounds_where_it_says(K, ranks, near, of_plan):
    qkv = drawn(8, K)
    R, Z = ranks.qk, ranks.v
    own = {"sinks": near[0], "window": near[1]} if of_plan else {}
    formats = replace(Formats.coded(R, Z), near=(9, 9) if of_plan else near)
    given = qkv if of_plan else [x[..., :r] for x, r in zip(qkv, (R, R, Z), strict=True)]

    def attend(q, k, v):
        spec = PrefixRing(num_kv_heads=k.shape[2], head_dim=H, dtype="float32", R=R, Z=Z, **own)
        return sharded_attention(q, k, v, scale=H**-0.5, spec=spec, formats=formats)[0]

    got = np.asarray(sharded(attend, (TOKENS,) * 3, TOKENS)(*given))
    expected = by_definition(qkv, ranks, near, of_plan=of_plan)
    # A number that goes the other way changes what comes of it: an output, or all that a query gets.
    differs = np.abs(got - expected).max(-1) > 1e-5
    assert differs.mean() < 0.05
    assert np.median(np.abs(got - expected)) < 1e-6
    near_alone = [x[:, : max(1, min(near[1], T // U))] for x in (got, expected)]
    np.testing.assert_allclose(*near_alone, atol=1e-6)  # First tokens of the first device: all are near.


CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a model, its folder without calibration, and its basis."""
    model, folder = TinyModel(CONFIG), tmp_path_factory.mktemp("coded") / "model"
    model.write(folder)
    return model, folder, replace(model.basis(center=True), fingerprint=Checkpoint.open(folder).fingerprint)


PLANS = {
    "window": ({"window": 9, "sinks": 2}, LayerRanks(16, 32), (2, 9)),
    "all coordinates": ({}, LayerRanks(32, 32), (3, 6)),
    "all coordinates and a window": ({"window": 8}, LayerRanks(32, 32), (3, 8)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.matrix
def test_the_cache_holds_what_arrived_and_near_tokens_whole(tiny, monkeypatch, name):
    """Compare the first layer, whose keys and values are the same before they are sent, for two lengths."""
    near, ranks, (sinks, window) = PLANS[name]
    monkeypatch.setattr(payloads, "NEAR", (3, 6))
    model, folder, basis = tiny
    plan = CompressionPlan((ranks,) * 2, CONFIG.num_kv_heads, 32, **near)
    options = {"plan": plan, "basis": basis, "mesh": MeshConfig(data=2, sequence=2, model=2)}
    native, coded = (load(folder, **options, payload=payload) for payload in ("native", "coded"))
    assert (native.network.payload, coded.network.payload) == ("native", "coded")
    tokens, ends = jnp.asarray(model.tokens(2, 45)), (45, 30)
    (last, cache), (last8, cache8) = (
        x.network.prefill(tokens, jnp.array(ends), capacity=48) for x in (native, coded)
    )
    before, after = cache.layers[0], cache8.layers[0]
    for kind, rank in (("k", ranks.qk), ("v", ranks.v)):
        sent, held = (np.asarray(getattr(x, kind)).swapaxes(1, 2) for x in (before, after))
        assert held.shape == (2, 48, 4, rank)  # two copies of each KV head
        for row, end in enumerate(ends):
            position = np.arange(end)
            whole = (position < sinks) | (position >= end - window)
            np.testing.assert_array_equal(held[row, :end][whole], sent[row, :end][whole])
            assert_mostly_close(held[row, :end][~whole], as_sent(kind, sent[row, :end][~whole]))
            assert np.abs(held[row, :end][~whole] - sent[row, :end][~whole]).max() > 1e-3
    for kind in ("ring_k", "ring_v"):
        np.testing.assert_array_equal(getattr(after, kind), getattr(before, kind))
    assert 0 < np.abs(last8 - last).max() < 0.4 * np.abs(last).max()
    # Decoding goes on from there.
    (one, _), (other, _) = (
        x.network.extend(c, tokens[:, :1], jnp.array(ends) + 1) for x, c in ((native, cache), (coded, cache8))
    )
    assert 0 < np.abs(one - other).max() < 0.4 * np.abs(one).max()


TRAFFIC = {
    "all coordinates": ("float32", (4, 4), {}, LayerRanks(32, 32), 1),
    "16 bits": ("bfloat16", (8, 2), {}, LayerRanks(32, 32), 1),
    "two rows, halo of several devices": ("float32", (8, 2), {"window": 37}, LayerRanks(32, 32), 2),
    "first coordinates": ("float32", (4, 4), {}, LayerRanks(16, 32), 1),
    "window": ("float32", (8, 2), {"window": 9, "sinks": 2}, LayerRanks(16, 32), 1),
}


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.matrix
@pytest.mark.full
def test_formula_is_what_is_compiled(monkeypatch, name):
    """Count bytes of hidden states alone; in float32, also those of the cache and the last hidden states.

    In 16 bits without sinks: for CPUs XLA makes a sum over devices one of float32.
    """
    dtype, (N, K), near, ranks, batch = TRAFFIC[name]
    default = (3, 11) if dtype == "float32" else (0, 11)
    monkeypatch.setattr(payloads, "NEAR", default)
    monkeypatch.setattr("benchmarks.mesh.traffic.NEAR", default)
    config = replace(CONFIG, layers=CONFIG.layers[:1], num_heads=N, num_kv_heads=K, dtype=dtype)
    plan = CompressionPlan((ranks,), K, 32, **near)
    params = random_params(config, jax.random.key(0))
    whole = Transformer(config, plan, params["embeddings"], params["layers"])
    model = whole.on_mesh(MeshConfig(sequence=U).create(), payload="coded")
    tokens = jax.ShapeDtypeStruct((batch, 61), jnp.int32)
    options = {"degree": U, "payload": "coded", "batch": batch, "itemsize": jnp.dtype(dtype).itemsize}
    sent = prefill_bytes(config, plan, length=61, **options)
    program = jax.jit(lambda tokens: model.hidden(tokens))
    assert hlo_bytes(program.lower(tokens).compile().as_text()) == sent
    if dtype == "bfloat16":
        return
    program = jax.jit(lambda tokens, end: model.prefill(tokens, end, capacity=64))
    text = program.lower(tokens, jax.ShapeDtypeStruct((batch,), jnp.int32)).compile().as_text()
    last = batch * 2 * config.embed_dim * 4 * (U - 1) // U
    assert hlo_bytes(text) == sent + cache_bytes(config, plan, capacity=64, **options) + last


def test_refusals(tiny):
    _, folder, basis = tiny
    plan = CompressionPlan.full(CONFIG)
    with pytest.raises(
        MeshError, match="payload='coded' is a format for the exchange between devices; pass mesh="
    ):
        load(folder, plan, basis=basis, payload="coded")
    with pytest.raises(CalibrationError, match=r"payload='coded': needs a calibrated basis; pass plan="):
        load(folder, mesh="sequence=2", payload="coded")
    with pytest.raises(ValueError, match=r"payload='int4': must be one of .*'coded'"):
        load(folder, plan, basis=basis, mesh="sequence=2", payload="int4")
    whole = TinyModel(CONFIG).dense
    float8 = whole.on_mesh(MeshConfig(sequence=2).create(), payload="float8")
    with pytest.raises(CalibrationError, match="the layer has no scales"):
        float8.hidden(jnp.ones((1, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"payload='int4': must be one of .*'coded'"):
        whole.on_mesh(MeshConfig(sequence=2).create(), payload="int4")
