"""Penalties, biases and forbidden tokens, compared with plain loops over a network without a cache."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from tiny_tokenizers import byte_tokenizer

from zdc_jax import LanguageModel, Sampling, generate, stream
from zdc_jax.errors import PromptError
from zdc_jax.generation.guide import Guide
from zdc_jax.generation.masks import ALL, unpack_mask
from zdc_jax.plan import CompressionPlan

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1])
TOKENIZER = byte_tokenizer(97)
WORD = TOKENIZER.decode([40, 41])
"""Word of two tokens."""
OPTIONS = {
    "none": Sampling(),
    "presence": Sampling(presence_penalty=2.0),
    "frequency": Sampling(frequency_penalty=0.75),
    "encouraged": Sampling(presence_penalty=-1.5, frequency_penalty=-0.5),
    "repetition": Sampling(repetition_penalty=1.8),
    "all": Sampling(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={9: 3.5}),
    "bias": Sampling(logit_bias={5: 100, 6: 100.0}),
    "allowed": Sampling(allowed_token_ids=[40, 41, 42]),
    "allowed and biased": Sampling(allowed_token_ids=[40, 41, 42], logit_bias={41: -3, 50: 100}),
    "words": Sampling(allowed_token_ids=[40, 41, 42], bad_words=[WORD, TOKENIZER.decode([42, 42])]),
    "one token": Sampling(allowed_token_ids=[40, 41, 42], bad_words=[TOKENIZER.decode([40])]),
}
COUNT = 16


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    network = TinyModel(CONFIG).model(CompressionPlan.full(CONFIG)).network
    return LanguageModel(network, TOKENIZER, None)


@pytest.fixture(scope="module")
def forward(model):
    """Return a function from tokens to the logits of the next one, without a cache."""
    run = jax.jit(lambda network, tokens: network(tokens))

    def next_logits(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.array(run(model.network, padded)[0, len(tokens) - 1])

    return next_logits


def shape_by_hand(logits, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Change logits token by token, by the formulas of vLLM's documentation."""
    changed = logits.astype(np.float32)
    forbidden = set()
    for word in sampling.bad_words:
        *beginning, last = TOKENIZER.encode(word).ids
        if list(answer[len(answer) - len(beginning) :]) == beginning:
            forbidden.add(last)
    for token in range(len(changed)):
        changed[token] += dict(sampling.logit_bias).get(token, 0)
        if token in prompt or token in answer:
            rate = np.float32(sampling.repetition_penalty)
            changed[token] = changed[token] / rate if changed[token] > 0 else changed[token] * rate
        changed[token] -= sampling.frequency_penalty * answer.count(token)
        changed[token] -= sampling.presence_penalty * (token in answer)
        if token in forbidden or token not in (sampling.allowed_token_ids or range(len(changed))):
            changed[token] = -np.inf
    return changed


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 97, size).tolist() for size in rng.integers(3, 40, len(OPTIONS))]


def test_greedy_answers_follow_the_formulas_in_one_batch(model, forward, prompts):
    result = generate(model, prompts, COUNT, sampling=list(OPTIONS.values()), stop_tokens=())
    rows = zip(OPTIONS.values(), prompts, result.completions, strict=True)
    changes = 0
    for sampling, prompt, completion in rows:
        answer: list[int] = []
        for token in completion.tokens:
            logits = forward([*prompt, *answer])
            shaped = shape_by_hand(logits, sampling, prompt, answer)
            # Sums of other shapes round differently, so the best of two near ties may change.
            assert shaped[token] == pytest.approx(shaped.max(), abs=1e-3)
            changes += shaped.argmax() != logits.argmax()
            answer.append(token)
    assert changes > 3 * COUNT, "options that change nothing are no test"
    texts = {name: row.text for name, row in zip(OPTIONS, result.completions, strict=True)}
    assert not any(word in texts["words"] for word in OPTIONS["words"].bad_words)


@pytest.mark.full
def test_a_stream_and_neighbours_change_no_draw(model, prompts):
    several = [replace(OPTIONS[name], temperature=1.5, seed=3) for name in ("all", "none", "words")]
    whole = generate(model, prompts[:3], 12, sampling=several, stop_tokens=()).completions
    streamed: list[tuple[int, ...]] = [()] * 3
    for delta in stream(model, prompts[:3], 12, sampling=several, stop_tokens=()):
        streamed[delta.sequence] += delta.tokens
    assert streamed == [completion.tokens for completion in whole]
    for prompt, sampling, completion in zip(prompts, several, whole, strict=False):
        alone = generate(model, prompt, 12, sampling=sampling, stop_tokens=()).completions[0]
        assert alone.tokens == completion.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {97: 1}}, "logit_bias: token id 97 lies outside the vocabulary 0…96"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids: token id -1 lies outside the vocabulary 0…96"),
        (
            {"allowed_token_ids": [40], "bad_words": [TOKENIZER.decode([40])]},
            "bad_words=.* leave no token of allowed_token_ids",
        ),
    ],
)
def test_options_that_leave_nothing_are_refused_by_name(model, options, message):
    with pytest.raises(PromptError, match=message):
        generate(model, [5, 6], 4, sampling=Sampling(**options))


def test_an_answer_that_no_token_may_continue_fails_by_name(model):
    bad_word = TOKENIZER.decode([40, 40])
    guide = Guide.of(model, Sampling(allowed_token_ids=[40], bad_words=[bad_word]))
    allowed = unpack_mask(jnp.asarray(guide.mask()[None]), 97)
    assert np.flatnonzero(allowed[0]).tolist() == [40]
    guide.accept([40])
    assert (guide.mask() == ALL).all(), "the step of all sequences goes on"
    with pytest.raises(PromptError, match="bad_words leave no token of allowed_token_ids that may come next"):
        guide.accept([3])


def test_words_without_a_tokenizer_are_refused(model):
    with pytest.raises(PromptError, match="bad_words needs a model with a tokenizer"):
        generate(replace(model, tokenizer=None), [5, 6], 4, sampling=Sampling(bad_words=["a"]))
