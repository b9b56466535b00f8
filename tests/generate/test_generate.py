"""Generation: streaming = batch, ragged = one by one, stopping, sampling, errors, no recompilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zdc_jax import LanguageModel, Sampling, generate, stream
from zdc_jax.errors import CacheMemoryError, PromptError
from zdc_jax.generate import api, loop
from zdc_jax.generate.sampling import restrict
from zdc_jax.plan import CompressionPlan


def byte_tokenizer(vocab: int) -> Tokenizer:
    """A character a token; the ids of a tiny model's vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def model(tiny_llama: TinyModel) -> LanguageModel:
    plan = CompressionPlan.uniform(tiny_llama.config, qk=16, v=16, window=8, sinks=2)
    basis = tiny_llama.basis()
    network = tiny_llama.model(plan, basis).network
    return LanguageModel(network, byte_tokenizer(97), None)


@pytest.fixture(scope="module")
def prompts(tiny_llama: TinyModel) -> list[list[int]]:
    return [tiny_llama.tokens(1, n, seed=n)[0].tolist() for n in (37, 5, 70)]


def greedy_by_hand(model: LanguageModel, prompt: list[int], count: int) -> tuple[int, ...]:
    """Without a cache: the whole forward pass again for every token, at one padded length."""
    forward = jax.jit(lambda network, tokens: network(tokens))
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(forward(model.network, padded)[0, len(tokens) - 1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_equals_greedy_decoding_without_a_cache(model, prompts):
    result = generate(model, prompts, 12, stop_tokens=(), prefill_chunk=32)
    for prompt, completion in zip(prompts, result.completions, strict=True):
        assert completion.tokens == greedy_by_hand(model, prompt, 12)
        assert completion.finish_reason == "length"
    assert result.kv_bytes == model.plan.bytes(result.capacity, 3, 4)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)])
def test_stream_equals_batch(model, prompts, sampling):
    options = {"sampling": sampling, "stop_tokens": ()}
    whole = generate(model, prompts, 30, **options)
    tokens: list[tuple[int, ...]] = [()] * 3
    text = [""] * 3
    ended = [None] * 3
    for delta in stream(model, prompts, 30, **options):
        assert ended[delta.row] is None
        tokens[delta.row] += delta.tokens
        text[delta.row] += delta.text
        ended[delta.row] = delta.finish_reason
    assert tuple(tokens) == tuple(c.tokens for c in whole.completions)
    assert text == [c.text for c in whole.completions]
    assert ended == ["length"] * 3


def test_stop_tokens_end_their_row_only(model, prompts):
    free = [c.tokens for c in generate(model, prompts, 20, stop_tokens=()).completions]
    stop = free[0][6]
    result = generate(model, prompts, 20, stop_tokens=stop)
    for unstopped, completion in zip(free, result.completions, strict=True):
        expected = unstopped
        if stop in unstopped:
            expected = unstopped[: unstopped.index(stop) + 1]
        assert completion.tokens == expected
        assert (completion.finish_reason == "stop") == (stop in unstopped)


def test_stop_strings_are_trimmed(model, prompts):
    free = generate(model, prompts[0], 40, stop_tokens=()).completions[0]
    stop = free.text[17:20]
    result = generate(model, prompts[0], 40, stop_tokens=(), stop=(stop,)).completions[0]
    at = free.text.index(stop)
    assert result.text == free.text[:at]
    assert result.finish_reason == "stop"
    assert model.tokenizer.decode(list(result.tokens)).startswith(free.text[:at] + stop)
    pieces = list(stream(model, prompts[0], 40, stop_tokens=(), stop=stop))
    assert "".join(piece.text for piece in pieces) == free.text[:at]


def test_text_prompts(model):
    by_text = generate(model, "MNO", 5, stop_tokens=()).completions[0]
    ids = model.tokenizer.encode("MNO").ids
    assert by_text == generate(model, [ids], 5, stop_tokens=()).completions[0]
    assert by_text.text == model.tokenizer.decode(list(by_text.tokens))


def test_new_lengths_and_samplings_do_not_recompile(model, prompts):
    generate(model, [prompts[0][:33]], 10, stop_tokens=(), sampling=Sampling(0.7, 5, 0.5, 1))
    sizes = loop._prefill_chunk._cache_size(), loop.decode._cache_size()
    for length in (34, 36, 37):
        sampling = Sampling(0.9, length, 0.8, length)
        generate(model, [prompts[0][:length]], length - 25, stop_tokens=(3,), sampling=sampling)
    assert (loop._prefill_chunk._cache_size(), loop.decode._cache_size()) == sizes


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("", {}, "empty"),
        ([], {}, "at least one prompt"),
        ([[]], {}, "empty"),
        ([1, 97], {}, "97 lies outside the vocabulary 0…96"),
        ([-1], {}, "-1 lies outside"),
        ([[0.5]], {}, "flat list of integers"),
        ([[[1, 2], [3]]], {}, "flat list of integers"),
        (None, {}, "prompts=None must be a text"),
        ([1], {"max_new_tokens": 4.0}, "max_new_tokens=4.0 must be a whole number"),
        ([1] * 250, {"max_new_tokens": 7}, "256 positions"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"prefill_chunk": 33}, "prefill_chunk=33"),
        ([1], {"stop": ("",)}, "empty string"),
        ([1], {"stop_tokens": range(17)}, "17 stop tokens"),
    ],
)
def test_bad_prompts_are_refused(model, prompt, options, named):
    with pytest.raises(PromptError, match=named):
        generate(model, prompt, **options)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_bad_samplings_are_refused(options):
    with pytest.raises(PromptError, match=next(iter(options))):
        Sampling(**options)


def test_text_needs_a_tokenizer(model):
    mute = LanguageModel(model.network)
    with pytest.raises(PromptError, match="no tokenizer"):
        generate(mute, "x")
    assert generate(mute, [3, 4], 2).completions[0].text is None


def test_text_that_a_tokenizer_cannot_encode_is_named(model):
    knows_one = Tokenizer(models.WordLevel({"x": 3}))
    with pytest.raises(PromptError, match=r"the tokenizer cannot encode 'y': .*UNK"):
        generate(LanguageModel(model.network, knows_one), "y")


def test_a_cache_that_cannot_fit_says_what_would(model, monkeypatch):
    need = model.plan.bytes(128, 2, 4)
    monkeypatch.setattr("zdc_jax.cache.prefix_ring.free_bytes", lambda: need - 1)
    with pytest.raises(CacheMemoryError, match=f"needs {need:,} bytes.*batch 1 at this length"):
        generate(model, [[3], [4]], 4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), top_k=st.integers(1, 40), top_p=st.floats(0.05, 1.0))
def test_restrict_keeps_the_smallest_sufficient_set(seed, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(1, 30)).astype(np.float32) * 3
    out = np.asarray(restrict(jnp.asarray(logits), jnp.int32(min(top_k, 30)), jnp.float32(top_p)))[0]
    order = np.argsort(-logits[0])[:top_k]
    mass = np.exp(logits[0, order].astype(np.float64))
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    kept = set(order[before < top_p - 1e-6])
    allowed = set(order[before < top_p + 1e-6])
    found = set(np.flatnonzero(np.isfinite(out)))
    assert kept <= found <= allowed
    assert found


def test_sampling_follows_the_distribution(model, prompts):
    """Frequencies of the first token over many rows against the softmax."""
    rows = [prompts[1]] * 256
    result = generate(model, rows, 1, stop_tokens=(), sampling=Sampling(temperature=2.0))
    logits = np.asarray(model.network(jnp.asarray([prompts[1]]))[0, -1], np.float64) / 2.0
    expected = np.exp(logits - np.logaddexp.reduce(logits))
    counts = np.bincount([c.tokens[0] for c in result.completions], minlength=97)
    top = np.argsort(-expected)[:3]
    sigma = np.sqrt(256 * expected * (1 - expected))[top]
    assert (np.abs(counts - 256 * expected)[top] < 4 * sigma + 1).all()


def test_capacity_repeats_shapes():
    assert [api.capacity_for(n, 4096) for n in (1, 129, 2049, 4000)] == [128, 256, 4096, 4096]
    assert api.capacity_for(90, 100) == 100
