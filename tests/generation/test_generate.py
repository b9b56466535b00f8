"""Generation: streams and batches, ragged prompts, stopping, sampling, errors, and recompilation."""

import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from tiny_tokenizers import byte_tokenizer, demo
from tokenizers import Tokenizer, models

from zdc_jax import LanguageModel, Sampling, generate, stream
from zdc_jax.errors import CacheMemoryError, PromptError
from zdc_jax.generation import request, steps
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.request import Request, tokenized
from zdc_jax.generation.run import Run
from zdc_jax.plan import CompressionPlan


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
    """Decode without a cache: run the whole forward pass for every token, at one padded length."""
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
    assert result.kv_bytes == model.plan.bytes(result.capacity, 3, "float32")


MIXED = (Sampling(1.5, top_k=20, top_p=0.9, seed=3), Sampling(), Sampling(0.8, seed=3))


@pytest.mark.parametrize("sampling", [None, MIXED])
@pytest.mark.matrix
def test_stream_equals_batch(model, prompts, sampling):
    options = {"sampling": sampling, "stop_tokens": ()}
    whole = generate(model, prompts, 30, **options)
    tokens: list[tuple[int, ...]] = [()] * 3
    text = [""] * 3
    ended = [None] * 3
    for delta in stream(model, prompts, 30, **options):
        assert ended[delta.sequence] is None
        tokens[delta.sequence] += delta.tokens
        text[delta.sequence] += delta.text
        ended[delta.sequence] = delta.finish_reason
    assert tuple(tokens) == tuple(c.tokens for c in whole.completions)
    assert text == [c.text for c in whole.completions]
    assert ended == ["length"] * 3


@pytest.mark.full
def test_a_draw_depends_on_its_request_alone(model, prompts):
    # Other prompts and the order do not matter. Equal requests of one call continue the draws.
    def draw(prompts, sampling):
        return [c.tokens for c in generate(model, prompts, 30, sampling=sampling, stop_tokens=()).completions]

    batch = draw(prompts, MIXED)
    assert batch[1] == draw(prompts, None)[1]
    order = [2, 0, 1]
    assert draw([prompts[i] for i in order], [MIXED[i] for i in order]) == [batch[i] for i in order]
    for i in (0, 2):
        assert draw(prompts[i], MIXED[i]) == [batch[i]]
    thrice = draw([prompts[0]] * 3, MIXED[0])
    assert thrice[0] == batch[0]
    assert len(set(thrice)) == 3


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


@pytest.mark.full
def test_stop_strings_are_trimmed(model, prompts):
    free = generate(model, prompts[0], 30, stop_tokens=()).completions[0]
    stop = free.text[17:20]
    result = generate(model, prompts[0], 30, stop_tokens=(), stop=(stop,)).completions[0]
    at = free.text.index(stop)
    assert result.text == free.text[:at]
    assert result.finish_reason == "stop"
    assert model.tokenizer.decode(list(result.tokens)).startswith(free.text[:at] + stop)
    pieces = list(stream(model, prompts[0], 30, stop_tokens=(), stop=stop))
    assert "".join(piece.text for piece in pieces) == free.text[:at]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("most", "pieces", "ahead", "waiting"),
    [
        (1, [1], [], []),
        (9, [1, 8], [1], [1]),
        (10, [1, 8, 1], [1, 1], [1, 9]),
        (30, [1, 8, 8, 8, 5], [1, 1, 9, 17], [1, 9, 17, 25]),
    ],
)
@pytest.mark.parametrize("returns", [True, False])
def test_pieces_are_asked_for_ahead_where_calls_return(
    model, prompts, monkeypatch, most, pieces, ahead, waiting, returns
):
    # ahead, waiting: tokens known at each call, where it returns at once and where it does not.
    decode, known = Run._decode, []

    def spied(self, *given):
        known.append(len(self.chosen[0]))
        return decode(self, *given)

    monkeypatch.setattr(Run, "_decode", spied)
    monkeypatch.setattr(Run, "_may_ask_ahead", lambda self, asked: returns)
    assert [len(piece.tokens) for piece in stream(model, prompts[0], most, stop_tokens=())] == pieces
    assert known == (ahead if returns else waiting)


@pytest.mark.full
@pytest.mark.parametrize("returns", [True, False])
def test_a_run_knows_the_tokens_that_its_cache_holds_behind_a_stop_string(
    model, prompts, monkeypatch, returns
):
    # One sequence ends and the other continues undisturbed, or both end and one more chunk is decoded.
    monkeypatch.setattr(Run, "_may_ask_ahead", lambda self, asked: returns)
    free = generate(model, prompts[:2], 40, stop_tokens=()).completions
    stop = next(free[0].text[i : i + 2] for i in range(9, 20) if free[0].text[i : i + 2] not in free[1].text)
    for rows in (1, 2):
        ran = Run(model, Request.from_arguments(model, prompts[:rows], 40, None, (), (stop,), 32), None)
        deltas = list(ran.deltas(8))
        completions = ran.result().completions
        assert [row.finish_reason for row in completions] == ["stop", "length"][:rows]
        for row in range(1, rows):
            assert "".join(delta.text for delta in deltas if delta.sequence == row) == free[row].text
        chosen, state = ran.settled()
        for row in range(rows):
            assert tuple(chosen[row]) == free[row].tokens[: len(chosen[row])]
            assert state.cache.lengths[row] == len(prompts[row]) + len(chosen[row]) - 1
        behind = len(chosen[0]) - len(completions[0].tokens)
        assert (8 <= behind < 16) if returns else (0 <= behind < 8)


@pytest.mark.gpu
def test_on_a_gpu(model, prompts):
    # On a GPU the loop is one graph. Sampled tokens equal those of the CPU in float32.
    test_equals_greedy_decoding_without_a_cache(model, prompts)
    test_stream_equals_batch(model, prompts, MIXED)
    test_steps_decode_no_token_beyond_their_limit(model, prompts)
    options = {"sampling": MIXED, "stop_tokens": (), "implementation": "xla"}
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        there = replace(model, network=jax.device_put(model.network, cpu))
        expected = generate(there, prompts, 30, **options)
    assert generate(model, prompts, 30, **options).completions == expected.completions


def test_prefill_goes_on_where_a_cache_ends(model, prompts):
    # The cache holds unequal shares of the prompts: one share is empty, and one lacks only the last token.
    request, held = Request.from_arguments(model, prompts, 20, None, (), (), 32), np.array([33, 0, 69])
    tokens = np.zeros((3, 69), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : held[row]] = prompt[: held[row]]
    empty = model.network.new_cache(batch=3, capacity=request.capacity)
    _, part = model.network.extend(empty, jnp.asarray(tokens), jnp.asarray(held))
    assert part.lengths.tolist() == held.tolist()
    runs = [Run(model, request, None, cache) for cache in (None, part)]
    for each in runs:
        assert sum(len(delta.tokens) for delta in each.deltas(8)) == 60
        assert each.state.cache.lengths.tolist() == [len(prompt) + 19 for prompt in prompts]
    assert runs[0].chosen == runs[1].chosen


@pytest.mark.full
def test_steps_decode_no_token_beyond_their_limit(model, prompts):
    # Sequences end where they are full or at a stop token. The cache holds what was decoded.
    held, room = [20, 5, 30], [100, 7, 100]
    tokens = np.stack([np.resize(prompt, 30) for prompt in prompts])
    by_hand = [greedy_by_hand(model, row[:n].tolist(), 7) for row, n in zip(tokens, held, strict=True)]
    stop = (by_hand[2][2],)
    numbers = np.stack(
        [
            pack_parameters(n, most, stop, Sampling(), np.zeros(2, np.uint32))
            for n, most in zip(held, (80, 2, 70), strict=True)
        ]
    )
    flat = steps.Flat.of(model.network)
    for limit in range(1, 7):
        empty = model.network.new_cache(batch=3, capacity=100)
        hidden, cache = model.network.extend(empty, jnp.asarray(tokens), jnp.asarray(held))
        at = steps.take_last(hidden, jnp.asarray(held))
        state, begun = steps.first(flat, steps.DecodeState.of(cache), at, np.ones(3, bool), numbers)
        state, made = steps.decode(flat, state, np.ones(3, bool), numbers, limit, steps=32)
        for row, whole in enumerate(by_hand):
            whole = whole[: room[row] - held[row]]
            whole = whole[: whole.index(stop[0]) + 1] if stop[0] in whole else whole
            got = [int(begun.tokens[row, 0]), *made.tokens[row, : made.counts[row]].tolist()]
            assert got == list(whole[: limit + 1])
            assert int(state.cache.lengths[row]) == held[row] + len(got) - 1


def test_text_prompts(model):
    text = "MNO" * 12
    by_text = generate(model, text, 5, stop_tokens=()).completions[0]
    ids = model.tokenizer.encode(text).ids
    assert by_text == generate(model, [ids], 5, stop_tokens=()).completions[0]
    assert by_text.text == model.tokenizer.decode(list(by_text.tokens))


def test_text_continues_the_prompt_unless_it_is_a_text_of_its_own(model):
    words = replace(model, tokenizer=Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, "w0")))
    (completion,) = generate(words, [[5, 6]], 3, stop_tokens=()).completions
    expected = " ".join(f"w{token}" for token in completion.tokens)
    assert completion.text == f" {expected}"
    assert generate(words, [[5, 6]], 3, stop_tokens=(), new_text=True).completions[0].text == expected


def test_a_stop_string_that_is_a_special_token(model, prompts):
    (free,) = generate(model, prompts[0], 12, stop_tokens=()).completions
    at = next(n for n in range(1, 12) if free.tokens[n] not in free.tokens[:n])
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    name = tokenizer.id_to_token(free.tokens[at])
    tokenizer.add_special_tokens([name])
    (result,) = generate(
        replace(model, tokenizer=tokenizer), prompts[0], 12, stop_tokens=(), stop=name
    ).completions
    assert (result.tokens, result.finish_reason) == (free.tokens[: at + 1], "stop")


def test_new_lengths_and_samplings_do_not_recompile(model, prompts):
    generate(model, [prompts[0][:33]], 10, stop_tokens=(), sampling=Sampling(0.7, 5, 0.5, 1))
    sizes = steps.prefill._cache_size(), steps.decode._cache_size()
    for length in (34, 36, 37):
        sampling = Sampling(0.9, length, 0.8, length)
        generate(model, [prompts[0][:length]], length - 25, stop_tokens=(3,), sampling=sampling)
    assert (steps.prefill._cache_size(), steps.decode._cache_size()) == sizes


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
        ([1], {"prefill_chunk": 64.0}, "prefill_chunk=64.0"),
        ([1], {"stop": ("",)}, "empty string"),
        ([1], {"stop": (3,)}, "stop=.3,. must be a string"),
        ([1], {"stop_tokens": 2.0}, "stop_tokens=2.0 must be a token id"),
        ([1], {"stop_tokens": (True,)}, "stop_tokens=.True,. must be a token id"),
        ([1], {"sampling": [Sampling()] * 2}, "sampling has 2 entries for 1 prompts"),
        ([[1], [2]], {"sampling": []}, "sampling has 0 entries for 2 prompts"),
        ([1], {"sampling": 0.5}, "sampling=0.5 must be a Sampling"),
        ([1], {"sampling": [None]}, "must be a Sampling"),
        ([1], {"stop_tokens": range(17)}, "stop_tokens has 17 ids"),
        ([1], {"stop_tokens": -1}, "stop_tokens=-1: token id -1 lies outside the vocabulary 0…96"),
        ([1], {"stop_tokens": (3, 97)}, "token id 97 lies outside"),
        ([1], {"stop_tokens": 2**40}, f"token id {2**40} lies outside"),
    ],
)
def test_bad_prompts_are_refused(model, prompt, options, named):
    with pytest.raises(PromptError, match=named):
        generate(model, prompt, **options)


def test_a_path_is_no_model():
    with pytest.raises(PromptError, match=r"model='folder' must be a model; pass zdc_jax.load\(FOLDER\)"):
        generate("folder", "text")


def test_text_needs_a_tokenizer(model):
    mute = LanguageModel(model.network)
    with pytest.raises(PromptError, match="no tokenizer"):
        generate(mute, "x")
    assert generate(mute, [3, 4] * 20, 2).completions[0].text is None


def test_other_threads_run_while_a_long_text_is_tokenized():
    tokenizer, ticks, ended = demo(), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    ids = tokenized(tokenizer, "hello " * 300_000, add_special_tokens=False)
    seconds = time.monotonic() - began
    ended.set()
    thread.join()
    assert len(ids) > 300_000
    assert ticks > 50 * seconds


def test_text_that_a_tokenizer_cannot_encode_is_named(model):
    knows_one = Tokenizer(models.WordLevel({"x": 3}))
    with pytest.raises(PromptError, match=r"the tokenizer cannot encode 'y': .*UNK"):
        generate(LanguageModel(model.network, knows_one), "y")


def test_a_cache_that_cannot_fit_says_what_would(model, monkeypatch):
    need = model.plan.bytes(128, 2, "float32")
    monkeypatch.setattr("zdc_jax.cache.kv_cache.free_bytes", lambda: need - 1)
    with pytest.raises(CacheMemoryError, match=f"needs {need:,} bytes.*batch=1 at this capacity"):
        generate(model, [[3], [4]], 4)
    monkeypatch.setattr("zdc_jax.cache.kv_cache.free_bytes", lambda: 0)
    with pytest.raises(CacheMemoryError, match=r"0 are free; use a plan with fewer bytes$"):
        generate(model, [[3], [4]], 4)


def test_capacity_repeats_shapes():
    assert [request.capacity_for(n, 4096) for n in (1, 129, 2049, 4000)] == [128, 256, 4096, 4096]
    assert request.capacity_for(90, 100) == 100
