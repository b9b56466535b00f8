"""What the study of codes tries: it runs, and agrees with the method where both say the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA

from benchmarks.quality import study_caches as study
from benchmarks.quality.coding import PARTS
from zdc_jax.cache.coded_choosing import CodedChoosing
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.gaussian_codes import Gaussian, turn
from zdc_jax.cache.spec import Call, LayerCacheSpec

WIDE = replace(LLAMA, embed_dim=256, head_dim=64, num_heads=4, num_kv_heads=2)
PLANS = {f"{part}: {label}": plan for part in PARTS for label, plan in PARTS[part](WIDE)}
B, K, N, H, S = 2, 2, 4, 64, 96
FOUR = {name: Gaussian(4) for name in ("index_code", "key_code", "value_code")}
SHAPE = {"num_kv_heads": K, "head_dim": H, "dtype": "float32", "R": H, "Z": H, "sinks": 2, "window": 16}
CALL = Call(H**-0.5)


def tokens(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (B, S, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@partial(jax.jit, static_argnames="spec")
def attend(spec: LayerCacheSpec, state, q, k, v, positions, end):
    return spec.attend(state, q, k, v, positions, end, None, CALL)


def run(spec: LayerCacheSpec, pieces: list[int]) -> np.ndarray:
    state, found, start = spec.create(B, S), [], 0
    for count in pieces:
        x = (jnp.asarray(each[:, start : start + count]) for each in tokens())
        positions = jnp.broadcast_to(jnp.arange(start, start + count), (B, count))
        done = attend(spec, state, *x, positions, jnp.full(B, start + count))
        state, start = done.state, start + count
        found.append(np.asarray(done.o))
    return np.concatenate(found, 1)


class Turned:
    """A layer that gives turned keys, and no others."""

    def project(self, x, positions, implementation):
        return x, x, x


@pytest.mark.sampled
def test_near_tokens_in_8_bits_are_of_turned_keys():
    spec = study.RoundedNear(**SHAPE, key_code=Gaussian(4), value_code=Gaussian(4))
    q, k, v = spec.project(Turned(), jnp.asarray(tokens()[1]), jnp.arange(S)[None], None, None)
    assert jnp.isfinite(spec.attend_whole(q, k, v, jnp.tile(jnp.arange(S), (B, 1)), None, CALL).o).all()


def kind(label: str) -> tuple[type, bool]:
    spec = PLANS[label].layer_caches("float32")[0]
    return type(spec), getattr(spec, "page", 1) > 1


@pytest.mark.parametrize("label", {kind(label): label for label in PLANS}.values())
@pytest.mark.sampled
def test_what_is_tried_reads_alike_whole_and_in_pieces(label):
    """One of each kind of cache."""
    spec = PLANS[label].layer_caches("float32")[0]
    spec = replace(spec, window=32, sinks=2, **({"read": 32} if isinstance(spec, CodedChoosing) else {}))
    whole = run(spec, [S])
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(run(spec, [S - 2, 1, 1]), whole, atol=2e-5)


def test_layers_follow_within_a_share():
    specs = PLANS["choice: 2 layers share a choice"].layer_caches("float32")
    assert [(spec.index, spec.leads) for spec in specs] == [(16, True), (0, False), (16, False)]


@pytest.mark.sampled
def test_parts_are_what_each_code_says():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 32)), jnp.float32)
    codes = Gaussian(8), Gaussian(2), Gaussian(3)
    code = study.parts(*zip((8, 16, 8), codes, strict=True))
    expected = [
        one.decode(one.encode(part), part.shape[-1])
        for one, part in zip(codes, np.split(x, (8, 24), axis=-1), strict=True)
    ]
    np.testing.assert_array_equal(code.decode(code.encode(x), 32), np.concatenate(expected, -1))


def test_scales_of_powers_of_two():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 1, 16)), jnp.float32)
    _, scale = study.PowerOfTwoScale(4).encode(x)
    exponent = np.log2(np.asarray(scale, np.float64)) + 0.5
    np.testing.assert_allclose(exponent, np.round(exponent), atol=0.01)
    np.testing.assert_allclose(scale, jnp.sqrt((x * x).mean(-1, keepdims=True)), rtol=0.42)


@pytest.mark.sampled
def test_choices_by_all_and_by_one_agree_where_there_is_one():
    """A layer's choice with one KV head, a head's with one query head, and the best token of pages of one."""
    own = run(CodedChoosing(**SHAPE, **FOUR, index=16, read=24), [S])
    alike = study.BestTokenOfPage(**SHAPE, **FOUR, index=16, read=24)
    np.testing.assert_allclose(run(alike, [S]), own, atol=1e-6)
    of_heads = study.HeadChoice(**SHAPE | {"num_kv_heads": N}, **FOUR, index=16, read=24, group=2)
    everything = CodedChoosing(**SHAPE, **FOUR, index=16, read=S)
    np.testing.assert_allclose(run(replace(of_heads, read=S), [S]), run(everything, [S]), atol=1e-5)
    layer = study.LayerChoice(**SHAPE, **FOUR, index=16, read=S)
    np.testing.assert_allclose(run(layer, [S]), run(everything, [S]), atol=1e-6)


@pytest.mark.sampled
def test_a_copied_index_answers_with_whole_keys():
    copied = study.CopiedIndex(**SHAPE, **FOUR, index=16, read=S)
    store = CodedStore(**SHAPE, key_code=Gaussian(4), value_code=Gaussian(4))
    np.testing.assert_allclose(run(copied, [S]), run(store, [S]), atol=1e-5)
    x = np.random.default_rng(0).normal(size=(3, H)).astype(np.float32)
    np.testing.assert_allclose(
        copied._index_of(jnp.asarray(x @ turn(H), jnp.float32))[:, :16], x[:, :16], atol=1e-5
    )


@pytest.mark.sampled
def test_important_tokens_keep_more():
    """With a share of all, or of none, the store is that of one code."""
    q, k, v = map(jnp.asarray, tokens())
    positions, end = jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.full(B, S)
    lse = jnp.zeros((B, N, S))
    made = partial(study.ImportantBits, **SHAPE, key_code=Gaussian(8), value_code=Gaussian(8), by="received")
    for share, bits in ((1.0, 4), (0.0, 2)):
        spec = made(share=share, more=Gaussian(4), less=Gaussian(2))
        kept, _ = spec.read(spec.keep_prompt(q, k, v, lse, positions, end, S, CALL).far)
        plain = study._through(Gaussian(bits), k).swapaxes(1, 2)
        np.testing.assert_allclose(kept[:, :, :S], plain, atol=0.05)  # The rest is room for more.
