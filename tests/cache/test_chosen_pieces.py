"""Prompt chunks of layers that choose tokens: kernels compared with XLA and with single tokens.

On a CPU, plain functions replace the kernels.
"""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_coded_kernels as decoding
from test_coded_kernels import CHOOSING, NEAR, PAGE, B, G, H, K, S, attend

from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.gaussian import Gaussian
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.paging.pages import Pages
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.hosted_choosing import HostedChoosing
from zdc_jax.cache.specs.spec import Call
from zdc_jax.ops import attention, cache_attention, new_tokens

PROMPT, PIECES = (300, 290, 40), ((48, 5, 48), (17, 48, 0))
"""Tokens of each sequence. The first queries of the last sequence have no far token."""
LONGEST = 48
ALONE = CodedChoosing(**NEAR, **CHOOSING, index=32, read=128)
LEADER = replace(ALONE, leads=True)
FOLLOWER = replace(ALONE, index=0, key_code=FittedIntegers(8))
LAYERS = {
    "alone": (ALONE,),
    "all far": (replace(ALONE, sinks=0, window=0),),
    "all chosen": (replace(ALONE, read=512),),
    "in order": (LEADER, FOLLOWER),
}
HEADS = {"MHA": 1, "GQA": G}


@pytest.fixture
def plain(monkeypatch):
    """Replace the kernels by plain functions, with few queries at once."""
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda q: None)
    monkeypatch.setattr(cache_attention, "coded_parts", decoding.plain_parts)
    monkeypatch.setattr(cache_attention, "index_scores", decoding.plain_scores)
    monkeypatch.setattr(cache_attention, "largest", decoding.largest_reference)
    monkeypatch.setattr(new_tokens, "encode_refusal", lambda *_, **__: "none here")
    monkeypatch.setattr(cache_attention, "AT_ONCE", 4 * B * K * cache_attention.LEAST_NUMBERS * 32)
    attend.clear_cache()
    yield
    attend.clear_cache()


def run(layers, groups, implementation, *, singly=False, table=None):
    """Return results of chunks, [tokens, layers, B, N, H], with zeros where a sequence has no more tokens.

    The prompt before them is read on XLA. singly: token by token.
    """
    rng = np.random.default_rng(0)
    heads = (K * groups, K, K)

    def draw(T):
        return [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.bfloat16) for n in heads]

    states = [layer.create(B, S) for layer in layers]

    def read(x, start, end, implementation):
        at = start[:, None] + np.arange(x[0][0].shape[1])
        aux, found = None, []
        for i, (layer, given) in enumerate(zip(layers, x, strict=True)):
            done = attend(layer, implementation, states[i], *given, at, end, aux, table)
            states[i], aux = done.state, done.aux
            kept = (at < end[:, None])[..., None, None]
            found.append(np.where(kept, np.asarray(done.o, np.float64), 0))
        return np.stack(found)

    length = np.array(PROMPT)
    read([draw(max(PROMPT)) for _ in layers], np.zeros(B, int), length, "xla")
    outputs = []
    for new in PIECES:
        x, end = [draw(LONGEST) for _ in layers], length + new
        if singly:
            parts = [
                read([[a[:, t : t + 1] for a in each] for each in x], length + t, end, implementation)
                for t in range(LONGEST)
            ]
            outputs.append(np.concatenate(parts, axis=2))
        else:
            outputs.append(read(x, length, end, implementation))
        length = end
    return np.concatenate(outputs, axis=2).transpose(2, 0, 1, 3, 4)


def errors(found, expected):
    """Return relative errors by token, layer, sequence and head; NaN where there is no token."""
    size = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(found - expected, axis=-1) / np.where(size > 0, size, np.nan)


def check(found, expected, share, few=0):
    """Assert that a share of tokens agrees in each chunk, layer, sequence and head.

    No token may be as wrong as zeros. few: tokens that may differ in any chunk, where some may.
    """
    error = errors(found, expected)
    for piece in np.split(error, len(PIECES)):
        apart, there = (piece >= 0.02).sum(0), np.isfinite(piece).sum(0)
        most = np.maximum((1 - share) * there, few * (share < 1))
        assert (apart <= most).all(), (apart / np.maximum(there, 1)).max()
    assert np.nanmax(error) < 1


def check_xla(layers, groups, share, few=0):
    """Assert that results agree with XLA, for all tokens if none are left out.

    Kernels round queries of the index. Among tokens that are nearly equal, they may choose another.
    """
    share = 1.0 if all(layer.read >= S for layer in layers) else share
    check(run(layers, groups, None), run(layers, groups, "xla"), share, few)


def test_one_wrong_head_of_one_row_of_one_piece_shows():
    rng = np.random.default_rng(0)
    expected = rng.normal(size=(2 * LONGEST, 1, B, K * G, H))
    expected[LONGEST + 17 :, :, 0] = expected[5:LONGEST, :, 1] = expected[LONGEST:, :, 2] = 0
    check(expected, expected, share=1.0)
    for tokens, row in ((slice(0, 5), 1), (slice(LONGEST, None), 0)):
        found = expected.copy()
        found[tokens, 0, row, 3] *= 1.1
        with pytest.raises(AssertionError):
            check(found, expected, share=0.5, few=3)


@pytest.fixture
def on_kernels(caplog):
    """Assert that all choices and all attention to chosen tokens ran on kernels."""
    attention._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        yield
    said = {record.getMessage() for record in caplog.get_records("call")}
    for kind in ("choice", "attention to chosen tokens"):
        assert f"{kind} runs on pallas" in said
        assert not any(each.startswith(f"{kind} runs on xla (") for each in said)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.full
def test_a_piece_is_what_xla_makes_of_it(plain, on_kernels, name, heads):
    check_xla(LAYERS[name], HEADS[heads], share=0.7)


@pytest.mark.parametrize("name", ["alone", "in order"])
@pytest.mark.full
def test_a_piece_is_what_each_token_gives_alone(plain, name):
    pieces, tokens = (run(LAYERS[name], G, None, singly=singly) for singly in (False, True))
    assert np.nanmax(errors(pieces, tokens)) < 0.01


def in_pages(layers):
    """Return the layers in pages, and a page table."""
    pages = S // PAGE
    table = np.random.default_rng(0).permutation(2 * B * pages)[: B * pages].reshape(B, pages)
    paged = [Paged.of(layer, page=PAGE, pages=2 * B * pages) for layer in layers]
    return paged, jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize("name", ["alone", "in order"])
@pytest.mark.full
def test_a_piece_reads_pages_as_rows(plain, name):
    paged, table = in_pages(LAYERS[name])
    found, expected = run(paged, G, None, table=table), run(LAYERS[name], G, None)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("T", [1, LONGEST])
def test_no_row_is_copied_out_of_pages_where_kernels_run(plain, T):
    table, q = jnp.zeros((B, S // PAGE), jnp.int32), jnp.zeros((B, T, K * G, H), jnp.bfloat16)
    for layer in (ALONE, LEADER, FOLLOWER):
        state = Paged.of(layer, page=PAGE, pages=9).create(B, S)
        state = replace(state, far=jax.tree.map(lambda pool: Pages(pool, table), state.far))
        assert layer.reads_pages(state, q, None, Call(0.2))
        assert not layer.reads_pages(state, q, None, Call(0.2, "xla"))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layer", [ALONE, LEADER])
@pytest.mark.full
def test_lowers_in_several_blocks(monkeypatch, layer, paged, groups):
    # Lowering for CUDA needs no GPU.
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(module, "device_refusal", lambda q: None)
    monkeypatch.setattr(cache_attention, "AT_ONCE", 4 * B * K * cache_attention.LEAST_NUMBERS * 16)

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    far = jax.eval_shape(lambda: layer.create_far(9 if paged else B, PAGE if paged else S))
    table, call = shape(jnp.int32, B, S // PAGE), Call(0.2, "pallas")

    def attend(far, table, q, positions):
        far = jax.tree.map(lambda pool: Pages(pool, table), far) if paged else far
        return layer.far_part(far, q, None, positions, call, None)[:2]

    given = shape(jnp.bfloat16, B, LONGEST, K * groups, H), shape(jnp.int32, B, LONGEST)
    o, lse = jax.jit(attend).trace(far, table, *given).lower(lowering_platforms=("cuda",)).out_info
    assert (o.shape, lse.shape) == ((B, LONGEST, K * groups, H), (B, K * groups, LONGEST))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 4}, "kernels read single tokens, not pages of 4"),
        ({"value_code": Gaussian(4)}, "kernels support only integer codes with one scale per token"),
        ({"read": 96}, "k=96: must be a multiple of 128"),
    ],
)
@pytest.mark.full
def test_what_kernels_cannot_do_for_a_piece_says_why(plain, change, message):
    layers = (replace(ALONE, **change),)
    with pytest.raises(NotImplementedError, match=message):
        run(layers, G, "pallas")
    np.testing.assert_array_equal(run(layers, G, None), run(layers, G, "xla"))


@pytest.mark.full
def test_a_piece_of_tokens_on_the_host_is_read_on_xla(plain):
    given = {name: getattr(ALONE, name) for name in ("index", "read", *CHOOSING, *NEAR)}
    layers = (HostedChoosing(**given),)
    with pytest.raises(NotImplementedError, match="keys and values lie on the host"):
        run(layers, G, "pallas")
    np.testing.assert_array_equal(run(layers, G, None), run((ALONE,), G, "xla"))


@pytest.mark.full
def test_what_kernels_choose_for_a_piece_serves_xla(plain):
    # The leader's index is on the device, but its tokens are on the host. The last row has few far tokens.
    given = {name: getattr(LEADER, name) for name in ("index", "read", "leads", *CHOOSING, *NEAR)}
    check(run((HostedChoosing(**given),), G, None), run((LEADER,), G, "xla"), share=0.7)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_piece_on_the_device_is_what_xla_makes_of_it(on_kernels, name, heads):
    # On an H100, three tokens of chunks of five differed, and up to a quarter of longer chunks.
    check_xla(LAYERS[name], HEADS[heads], share=0.5, few=3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_piece_on_the_device_is_what_each_token_gives_alone(on_kernels, name, heads, monkeypatch):
    # All kernels round queries and sum samples alike, also in several blocks.
    monkeypatch.setattr(cache_attention, "AT_ONCE", 4 * B * K * cache_attention.LEAST_NUMBERS * 32)
    attend.clear_cache()
    pieces, tokens = (run(LAYERS[name], HEADS[heads], None, singly=singly) for singly in (False, True))
    attend.clear_cache()
    assert np.nanmax(errors(pieces, tokens)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alone", "in order"])
def test_a_piece_on_the_device_reads_pages_as_rows(on_kernels, name):
    paged, table = in_pages(LAYERS[name])
    found, expected = run(paged, G, None, table=table), run(LAYERS[name], G, None)
    np.testing.assert_array_equal(found, expected)
