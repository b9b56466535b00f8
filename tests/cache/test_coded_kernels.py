"""Decoding from quantized caches on kernels, compared with XLA. Plain functions replace the kernels."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_references import largest_reference
from rings import listed

from kernels_pallas import (
    Parts,
    encode,
    merged_at_once,
    round_tokens,
    turn_and_store,
)
from zdc_jax.cache.codes.code import Split
from zdc_jax.cache.codes.fitted_integers import FittedIntegers, kernel_planes
from zdc_jax.cache.codes.gaussian import Gaussian
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.paging.pages import Pages
from zdc_jax.cache.specs import coded_far
from zdc_jax.cache.specs.coded_choosing import CodedChoosing
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.ops import attention, cache_attention, new_tokens
from zdc_jax.ops.new_keys import NewKeys, Turn
from zdc_jax.ops.shift import ShiftedQueries

B, K, G, H, S, PAGE = 3, 2, 4, 64, 512, 128
PROMPT, STEPS = (300, 290, 40), 6
NEAR = {"num_kv_heads": K, "head_dim": H, "dtype": "bfloat16", "R": 64, "Z": 64, "sinks": 4, "window": 64}
SPLIT = Split(32, FittedIntegers(8), FittedIntegers(4))
CHOOSING = {"index_code": FittedIntegers(8), "key_code": FittedIntegers(4), "value_code": FittedIntegers(4)}
SPECS = {
    "whole": CodedStore(**NEAR, key_code=FittedIntegers(4), value_code=FittedIntegers(4)),
    "split": CodedStore(**NEAR, key_code=SPLIT, value_code=FittedIntegers(2)),
    "all far": CodedStore(**NEAR | {"sinks": 0, "window": 0}, key_code=SPLIT, value_code=FittedIntegers(8)),
    "near tokens, too": CodedStore(
        **NEAR, near_code=FittedIntegers(8), key_code=FittedIntegers(4), value_code=FittedIntegers(4)
    ),
    "near sinks alone": CodedStore(
        **NEAR | {"window": 0},
        near_code=FittedIntegers(8),
        key_code=FittedIntegers(4),
        value_code=FittedIntegers(4),
    ),
    "bit planes": CodedStore(
        **NEAR,
        key_code=Split(16, FittedIntegers(6), FittedIntegers(3)),
        value_code=FittedIntegers(5),
    ),
    "chosen": CodedChoosing(**NEAR, **CHOOSING, index=32, read=128),
    "all chosen": CodedChoosing(**NEAR, **CHOOSING, index=32, read=512),
    "chosen, near tokens, too": CodedChoosing(
        **NEAR, **CHOOSING, near_code=FittedIntegers(8), index=32, read=128
    ),
    "handed on": CodedChoosing(**NEAR, **CHOOSING, index=32, read=128, leads=True),
}


def numbers(planes):
    """Dequantize planes to float32 and concatenate them."""

    def read(p):
        return FittedIntegers(p.bits).decode((p.levels[..., None, :], p.reach[..., None, None]), p.width)

    return jnp.concatenate([read(plane)[..., 0, :] for plane in planes], axis=-1)


def in_rows(plane, table):
    """Return a plane in rows, read through the page table if there is one."""
    return plane if table is None else jax.tree.map(lambda x: Pages(x, table).rows(), plane)


def plain_parts(passes, *, scale):
    """Compute `coded_parts` with one part per pass, from its docstring."""
    return [plain_part(each, scale) for each in passes]


def plain_part(coded_pass, scale):
    q, ring, gains, slots = coded_pass.q, coded_pass.ring, coded_pass.gains, coded_pass.slots
    begin, end = coded_pass.begin, coded_pass.end
    *keys, values = (in_rows(plane, coded_pass.block_table) for plane in coded_pass.planes)
    blocks = None  # Those of listed slots follow from the slots; those of a ring do not.
    if ring is not None:
        slots, blocks, end = listed(ring, keys[0].reach.shape, end)
    k, v, j = numbers(keys), numbers([values]), jnp.arange(keys[0].reach.shape[2])
    times = (j >= begin[:, None]) & (j < end[:, None])
    times = jnp.broadcast_to(times[:, None], k.shape[:3]).astype(jnp.float32)
    if slots is not None:
        times *= (slots[..., None] == j).sum(2)
    group = by_head(q, keys)
    scores = scale * jnp.einsum("bkgr,bksr->bkgs", group, k) + jnp.log(times)[:, :, None]
    if gains is not None:
        # Arranged gains are in base 2.
        of_blocks = (
            gains.swapaxes(2, 3) / np.log2(np.e) if gains.ndim == 4 else gains.reshape(*group.shape[:3], -1)
        )
        at = jnp.broadcast_to(j // 64, times.shape)
        if blocks is not None:
            at = (jnp.where(slots[..., None] == j, blocks[..., None], 0)).sum(2)
        scores += jnp.take_along_axis(of_blocks, at[:, :, None], axis=-1)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(jnp.isneginf(lse)[..., None], 0, jnp.exp(scores - lse[..., None]))
    return Parts(jnp.einsum("bkgs,bksz->bkgz", weights, v)[:, :, None], lse[:, :, None])


def by_head(q, keys):
    """Return queries float32 [B, K, G, R] from plain or arranged ones."""
    (_, heads, _), x = keys[0].reach.shape, q.astype(jnp.float32)
    if q.ndim == 3:
        return x.reshape(len(q), heads, -1, q.shape[-1])
    return x


def plain_scores(q, index, begin, end, *, scale, block_table=None):
    """Compute `index_scores` from its docstring, without rounding queries."""
    index = in_rows(index, block_table)
    k, j = numbers([index]), jnp.arange(index.reach.shape[2])
    counts = ((j >= begin[:, None]) & (j < end[:, None]))[:, None, None]
    group = q.astype(jnp.float32).reshape(*k.shape[:2], -1, q.shape[-1])
    scores = jnp.where(counts, scale * jnp.einsum("bkgr,bksr->bkgs", group, k), -jnp.inf)
    sampled = (j // 128 - begin[:, None, None, None] // 128) % 8 == 0 if scores.shape[2] > 1 else True
    lse = jax.nn.logsumexp(jnp.where(sampled, scores, -jnp.inf), axis=-1)
    worth = jax.nn.logsumexp(scores - lse[..., None], axis=2)
    return jnp.where(counts[:, :, 0], worth, -jnp.inf), lse.reshape(q.shape[:2])


@pytest.fixture
def plain(monkeypatch):
    """Replace the kernels by plain functions for decoding only; prompt chunks use none."""
    for module in (cache_attention, new_tokens):
        monkeypatch.setattr(
            module, "device_refusal", lambda q: None if q.ndim == 4 and q.shape[1] == 1 else "no"
        )
    monkeypatch.setattr(cache_attention, "coded_parts", plain_parts)
    monkeypatch.setattr(cache_attention, "index_scores", plain_scores)
    monkeypatch.setattr(cache_attention, "largest", largest_reference)
    monkeypatch.setattr(cache_attention, "merged_at_once", partial(merged_at_once, interpret=True))
    for kernel in (encode, turn_and_store, round_tokens):
        monkeypatch.setattr(new_tokens, kernel.__name__, partial(kernel, interpret=True))
    attend.clear_cache()
    yield
    attend.clear_cache()


@partial(jax.jit, static_argnames=("spec", "implementation", "shifted"))
def attend(spec, implementation, state, q, k, v, positions, end, aux, table=None, shifted=False):
    call = Call(scale=0.2, implementation=implementation, table=table)
    keys = k if isinstance(k, NewKeys) else NewKeys(k)
    if shifted:
        mean = 3 * jnp.asarray(np.random.default_rng(8).normal(size=(K, H)), jnp.float32)
        keys = keys._replace(shift=ShiftedQueries(q, positions, mean, FREQUENCIES))
    return spec.attend(state, q, NewTokens(keys, v, positions, end), aux, call)


FREQUENCIES = 1e4 ** -(np.arange(H // 2) / (H // 2))


def turned_later(k, positions):
    """Return keys before rotary embedding and basis rotation."""
    rng, frequencies = np.random.default_rng(9), FREQUENCIES
    basis = [np.linalg.qr(rng.normal(size=(K, H, H)))[0] for _ in range(2)]
    return NewKeys(k, Turn(positions, frequencies, *(jnp.asarray(x, k.dtype) for x in basis)))


def run(spec, implementation, seed=0, table=None, unturned=False, shifted=False, rows=B, steps=STEPS):
    """Read a ragged prompt on XLA, then decode tokens of the first `rows` sequences on `implementation`.

    Returns results [steps, rows, N, H] and what each step hands on.

    unturned: queries and keys of the decoded tokens come before the rotation.
    shifted: scores gain the products of queries with a mean of keys.
    """
    rng, T = np.random.default_rng(seed), max(PROMPT)

    def draw(T):
        return (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.bfloat16) for heads in (K * G, K, K))

    state, length = spec.create(B, S), np.array(PROMPT)
    positions, end = jnp.tile(jnp.arange(T), (B, 1)), jnp.asarray(length)
    done = attend(spec, "xla", state, *draw(T), positions, end, None, table, shifted)
    table = None if table is None else table[:rows]
    found, aux, others = [], [], other_rings(done.state, rows)
    for step in range(steps):
        at = jnp.asarray(length + step)[:rows]
        q, k, v = (x[:rows] for x in draw(1))
        k = turned_later(k, at[:, None]) if unturned else k
        done = attend(spec, implementation, done.state, q, k, v, at[:, None], at + 1, None, table, shifted)
        found.append(np.asarray(done.o[:, 0], np.float64))
        aux.append(done.aux)
    jax.tree.map(np.testing.assert_array_equal, other_rings(done.state, rows), others)
    return np.stack(found), aux


def other_rings(state, rows):
    """Return the rings of the sequences after the first `rows`."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[rows:]), state.near)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.full
def test_decoding_on_kernels_is_decoding_on_xla(plain, caplog, name):
    check(SPECS[name], caplog)


@pytest.mark.parametrize("name", ["near tokens, too", "whole"])
@pytest.mark.full
def test_shifted_keys_decode_on_kernels_as_on_xla(plain, name):
    # The ring wraps: a block of its slots holds tokens of two blocks of positions.
    found, _ = run(SPECS[name], None, shifted=True)
    expected, _ = run(SPECS[name], "xla", shifted=True)
    whole, _ = run(SPECS[name], "xla")
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    assert np.abs(expected - whole).max() > 0.2 * np.abs(expected).max()


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.full
def test_a_token_of_shifted_keys_that_one_kernel_turns(plain, caplog, in_pages):
    check(SPECS["near tokens, too"], caplog, unturned=True, in_pages=in_pages, shifted=True)


@pytest.mark.parametrize(("implementation", "unturned"), [(None, True), (None, False), ("xla", False)])
@pytest.mark.full
def test_the_first_of_more_sequences_decode_without_copies_of_their_rings(
    plain, unturned, implementation, monkeypatch
):
    if implementation is None:
        monkeypatch.setattr(coded_far, "_put_rings", None)  # Kernels do not need it.
    spec = Paged.of(SPECS["near tokens, too"], page=PAGE, pages=B * S // PAGE)
    table = jnp.arange(B * S // PAGE).reshape(B, -1)
    options = {"table": table, "unturned": unturned, "shifted": unturned, "steps": 2}
    state = spec.create(B, S)
    assert spec.first_rows(state, 2) is state
    found, _ = run(spec, implementation, rows=2, **options)
    expected, _ = run(spec, implementation, **options)
    np.testing.assert_array_equal(found, expected[:, :2])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("unturned", [False, True])
def test_the_first_of_more_sequences_decode_on_the_device(unturned, rows):
    spec = Paged.of(SPECS["near tokens, too"], page=PAGE, pages=B * S // PAGE)
    options = {"table": jnp.arange(B * S // PAGE).reshape(B, -1), "unturned": unturned, "shifted": unturned}
    found, _ = run(spec, None, rows=rows, **options)
    expected, _ = run(spec, "xla", **options)
    error = np.linalg.norm(found - expected[:, :rows], axis=-1) / np.linalg.norm(found, axis=-1)
    assert error.max() < (0.08 if unturned else 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["near tokens, too", "whole", "split", "bit planes"])
@pytest.mark.parametrize("in_pages", [False, True])
def test_a_token_of_shifted_keys_that_one_kernel_turns_on_the_device(caplog, name, in_pages):
    check(SPECS[name], caplog, unturned=True, in_pages=in_pages, shifted=True)


@pytest.mark.parametrize("name", ["whole", "bit planes", "chosen", "handed on"])
@pytest.mark.full
def test_kernels_read_pages_as_rows(plain, name):
    spec, pages = SPECS[name], S // PAGE
    table = jnp.asarray(np.random.default_rng(0).permutation(2 * B * pages)[: B * pages].reshape(B, pages))
    paged = Paged.of(spec, page=PAGE, pages=2 * B * pages)
    found, _ = run(paged, None, table=table)
    expected, _ = run(spec, None)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["whole", "chosen"])
@pytest.mark.parametrize("capacity", [1, 300, 384])
def test_stores_have_room_for_what_kernels_take(name, capacity):
    state = jax.eval_shape(lambda: SPECS[name].create(B, capacity))
    assert {leaf.shape[2] for leaf in jax.tree.leaves(state.far)} == {128 if capacity == 1 else 384}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_decoding_on_the_device_s_kernels_is_decoding_on_xla(caplog, name):
    check(SPECS[name], caplog)


@pytest.mark.parametrize("name", ["near tokens, too", "chosen, near tokens, too"])
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.full
def test_a_token_that_one_kernel_turns_codes_and_puts(plain, caplog, name, in_pages):
    check(SPECS[name], caplog, unturned=True, in_pages=in_pages)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SPECS if name != "all far"])
@pytest.mark.parametrize("in_pages", [False, True])
def test_a_token_that_one_kernel_turns_codes_and_puts_on_the_device(caplog, name, in_pages):
    check(SPECS[name], caplog, unturned=True, in_pages=in_pages)


def check(spec, caplog, unturned=False, in_pages=False, shifted=False):
    """Assert that kernels ran and that heads differ from XLA by no more than bfloat16 rounding."""
    attention._log_choice.cache_clear()
    held, table = spec, None
    if in_pages:
        pages = S // PAGE
        table = jnp.asarray(np.random.default_rng(0).permutation(B * pages).reshape(B, pages))
        held = Paged.of(spec, page=PAGE, pages=B * pages)
    with caplog.at_level(logging.INFO, logger="zdc_jax.ops"):
        found, _ = run(held, None, table=table, unturned=unturned, shifted=shifted)
    kinds = {"choice", "attention to chosen tokens"} if isinstance(spec, CodedChoosing) else {"coded decode"}
    kinds |= {"new token"} if unturned else {"coding"}
    kinds |= {"near decode"} if spec.near_code else set()
    assert {f"{kind} runs on pallas" for kind in kinds} <= {record.getMessage() for record in caplog.records}
    expected, _ = run(spec, "xla", unturned=unturned, shifted=shifted)
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    # The median over steps counts, because a choice between nearly equal tokens may differ at a few steps.
    few = isinstance(spec, CodedChoosing) and spec.read < S
    # XLA rounds the rotary embedding's result to 16 bits, and scores differ by as much as 10.
    assert (np.median(error, axis=0) if few else error).max() < (0.08 if unturned else 0.02)


@pytest.mark.full
def test_what_is_handed_on_serves_xla_and_kernels(plain):
    leader = SPECS["handed on"]
    (_, on_kernels), (_, on_xla) = (run(leader, each) for each in (None, "xla"))
    for one, other in zip(on_kernels, on_xla, strict=True):
        assert one.shape == other.shape == (B, 1, K, 128)
        for b, kv in np.ndindex(2, K):  # The third row has no far token.
            assert len({*np.asarray(one)[b, 0, kv]} & {*np.asarray(other)[b, 0, kv]}) > 0.95 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_code": Gaussian(4)}, "kernels support only integer codes with one scale per token"),
        ({"value_code": FittedIntegers(7)}, r"values.bits=7: must be one of"),
        ({"Z": 32}, "values has 32 coordinates: must be a multiple of 64"),
    ],
)
@pytest.mark.full
def test_what_kernels_do_not_read_says_why(plain, change, message):
    spec = CodedStore(**(NEAR | {"key_code": SPLIT, "value_code": FittedIntegers(4)} | change))
    with pytest.raises(NotImplementedError, match=message):
        run(spec, "pallas")
    run(spec, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 4}, "kernels read single tokens, not pages of 4"),
        ({"read": 96}, "k=96: must be a multiple of 128"),
        (
            {"index_code": FittedIntegers(3)},
            r"index has 32 coordinates of 3 bits: .* one of \(2, 4, 8\) bits",
        ),
    ],
)
@pytest.mark.full
def test_what_kernels_do_not_choose_says_why(plain, change, message):
    spec = CodedChoosing(**(NEAR | CHOOSING | {"index": 32, "read": 128} | change))
    with pytest.raises(NotImplementedError, match=message):
        run(spec, "pallas")
    run(spec, None)


@pytest.mark.full
def test_planes_of_a_split_are_two():
    coded = SPLIT.encode(jnp.ones((B, K, S, 1, H)))
    index, rest = kernel_planes([(SPLIT, coded)])
    assert (index.bits, index.width, rest.bits, rest.width) == (8, 32, 4, 32)
    assert kernel_planes([(SPLIT, coded), (Gaussian(4), None)]) == []
