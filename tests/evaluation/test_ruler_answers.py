"""Answers to RULER's prompts, compared with `generate` and with plain loops over single tokens."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_tokenizers
from conftest import LLAMA, TinyModel

from zdc_jax import CompressionPlan, generate
from zdc_jax.errors import EvaluationError, TextError
from zdc_jax.evaluation.answers import read_contexts, read_prompts
from zdc_jax.evaluation.evaluate import Evaluation, evaluate, prepare, reads_text
from zdc_jax.evaluation.greedy import generate_greedy
from zdc_jax.evaluation.ruler import RECIPES
from zdc_jax.evaluation.ruler.answer import score_task
from zdc_jax.evaluation.ruler.prompt import RulerTask, Sample
from zdc_jax.evaluation.text import Document
from zdc_jax.loading import LanguageModel

CONTEXT = 512
TOKENIZER = tiny_tokenizers.demo()
CONFIG = replace(LLAMA, vocab_size=4096, max_positions=CONTEXT, eos_ids=())
PROTOCOLS = ("cached", "exact")


def materials(tasks=("niah_single_1", "fwe"), config=CONFIG, documents=(), **options):
    given = {"contexts": (CONTEXT,), "max_documents": 3} | options
    return prepare(config, TOKENIZER, CompressionPlan.full(config), documents, tasks=tasks, **given)


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(CONFIG)


@pytest.fixture(scope="module")
def lossy(tiny: TinyModel):
    return tiny.model(CompressionPlan.uniform(CONFIG, qk=16, v=16, window=16)).network


def with_known_answers(task: RulerTask, network) -> RulerTask:
    """Replace the references by the beginning of the text that `generate` writes, and one that is nowhere."""
    prompts = [sample.tokens.tolist() for sample in task.samples]
    texts = [each.text for each in generate(LanguageModel(network, TOKENIZER, None), prompts, 24).completions]
    samples = (
        Sample(sample.tokens, (text, "never generated"))
        for sample, text in zip(task.samples, texts, strict=True)
    )
    return replace(task, samples=tuple(samples))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.full
def test_a_plan_in_16_bits_retains_everything(tiny: TinyModel, protocol):
    (material,) = materials()
    known = {name: with_known_answers(task, tiny.dense) for name, task in material.ruler.items()}
    plan = tiny.model(CompressionPlan.full(CONFIG)).network
    given = replace(material, ruler=known)
    (report,) = evaluate(tiny.dense, plan, [given], protocol=protocol, batch=2)
    assert list(report.ruler) == ["niah_single_1", "fwe"]
    for score in report.ruler.values():
        assert (score.score, score.dense, score.retention) == (0.5, 0.5, 1.0)
        assert score.interval == (1.0, 1.0)
        assert (score.samples, score.counted, score.counts) == (3, 3, False)
    assert report.to_json()["ruler"]["fwe"]["retention"] == 1.0
    assert (report.tasks, report.perplexity, report.long_agreement) == ({}, None, None)


@pytest.mark.full
def test_answers_through_the_cache_are_those_of_generate(tiny: TinyModel, lossy):
    (material,) = materials(tasks=("niah_single_1",))
    task = with_known_answers(material.ruler["niah_single_1"], lossy)
    assert score_task(lossy, task, protocol="cached", batch=3).tolist() == [0.5] * 3
    assert score_task(lossy, task, protocol="cached", batch=2).tolist() == [0.5] * 3
    assert score_task(tiny.dense, task, protocol="cached", batch=3).tolist() == [0.0] * 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.full
def test_prompts_of_different_lengths_are_read_as_each_alone(lossy, tiny, protocol, monkeypatch):
    monkeypatch.setattr("zdc_jax.evaluation.answers.PREFILL_CHUNK", 32)
    tokens, lengths = tiny.tokens(3, 80), np.array([80, 20, 64], np.int32)
    hidden, cache = read_prompts(lossy, tokens, lengths, capacity=96, protocol=protocol)
    answers, counts = generate_greedy(lossy, hidden, cache, 8, steps=16)
    assert counts.tolist() == [8] * 3
    for row, length in enumerate(lengths):
        context = tokens[row : row + 1, :length]
        alone, cache = read_contexts(lossy, context, room=16, protocol=protocol)
        np.testing.assert_allclose(alone[0], hidden[row], rtol=1e-3, atol=1e-3)
        said = []
        for _ in range(8):
            said.append(int(np.asarray(lossy.embeddings.unembed(alone))[0].argmax()))
            alone, cache = lossy.extend(cache, jnp.array([[said[-1]]]), cache.lengths + 1)
            alone = alone[:, 0]
        assert answers[row].tolist() == said


@pytest.mark.full
def test_answers_end_at_stop_tokens(tiny: TinyModel):
    contexts = tiny.tokens(1, 32)
    hidden, cache = read_contexts(tiny.dense, contexts, room=8, protocol="cached")
    whole = generate_greedy(tiny.dense, hidden, cache, 8)[0][0].tolist()
    hidden, cache = read_contexts(tiny.dense, contexts, room=8, protocol="cached")
    tokens, counts = generate_greedy(tiny.dense, hidden, cache, 8, stop=(whole[2],))
    count = whole.index(whole[2]) + 1
    assert counts.tolist() == [count]
    assert tokens[0, :count].tolist() == whole[:count]


def test_the_unmodified_model_answers_once(tiny: TinyModel, lossy, monkeypatch):
    (material,) = materials(tasks=("fwe",))
    calls, lines = [], []

    def score(network, task, **options):
        calls.append(network is tiny.dense)
        options["watch"](3)
        return np.ones(3)

    monkeypatch.setattr("zdc_jax.evaluation.evaluate.score_task", score)
    evaluation = Evaluation(tiny.dense, material, protocol="cached", batch=1, watch=lines.append)
    assert evaluation.evaluate(lossy) == evaluation.evaluate(lossy)
    assert calls == [True, False, False]
    assert lines[:2] == [
        "3 of 3 samples of fwe with 512 tokens by the unmodified model",
        "3 of 3 samples of fwe with 512 tokens under the plan",
    ]


def test_one_name_selects_all_tasks():
    text = [Document("a", "Some words. " * 50 + str(index)) for index in range(20)]
    (material,) = materials(
        ("ruler",), replace(CONFIG, max_positions=2048), text, contexts=(2048,), max_documents=1
    )
    assert list(material.ruler) == list(RECIPES)
    assert [name for name in RECIPES if reads_text(name)] == [
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multivalue",
        "niah_multiquery",
    ]
    assert all(map(reads_text, ("ruler", "perplexity", "copy@128", "long_agreement")))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"tasks": ("niah_single_9",)},
            EvaluationError,
            "task='niah_single_9': unknown; .*must be one of .*niah_single_1",
        ),
        ({"contexts": (128,)}, EvaluationError, "context=128: task 'niah_single_1' needs at least"),
        (
            {"tasks": ("niah_single_2", "fwe")},
            TextError,
            "too little text: tasks niah_single_2 hide their needles in text, but split 'report'",
        ),
        (
            {"tasks": ("long_agreement",)},
            EvaluationError,
            "context=512: task 'long_agreement' generates 2000 tokens .* has 512 positions",
        ),
    ],
)
def test_what_cannot_be_is_said_before_any_work(options, error, message):
    with pytest.raises(error, match=message):
        materials(**options)
