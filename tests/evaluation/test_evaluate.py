"""Evaluation as a whole: a plan equal to dense loses nothing, and reading stops once results are precise."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_tokenizers
from conftest import LLAMA, TinyModel

from zdc_jax import CompressionPlan
from zdc_jax.errors import EvaluationError, TextError
from zdc_jax.evaluation import evaluate as module
from zdc_jax.evaluation.answers import Answer
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.evaluate import FIRST_CHECK, MIN_DOCUMENTS, Evaluation, evaluate, prepare
from zdc_jax.evaluation.text import Document
from zdc_jax.model import run_layer
from zdc_jax.plan import LayerRanks

CONFIG = replace(LLAMA, max_positions=320, eos_ids=(2,))
CONTEXT = 320
TASKS = ("perplexity", "agreement", "passkey", "copy@128")
TOKENIZER = tiny_tokenizers.chat_tokenizer()


def documents(count: int = 200) -> list[Document]:
    rng = np.random.default_rng(0)

    def text():
        return " ".join("".join(rng.choice(list("abcdefgh"), 5)) for _ in range(40))

    return [Document("a", text()) for _ in range(count)]


def material(plan: CompressionPlan | None = None, **options):
    given = {"tasks": TASKS, "contexts": (CONTEXT,), "split": "test"} | options
    texts = given.pop("documents", documents())
    return prepare(CONFIG, TOKENIZER, plan or CompressionPlan.full(CONFIG), texts, **given)


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(CONFIG)


@pytest.mark.full
def test_a_plan_equal_to_dense_loses_nothing(tiny: TinyModel, monkeypatch):
    monkeypatch.setattr(module, "FIRST_CHECK", 8)
    plan = CompressionPlan.full(CONFIG)
    (report,) = evaluate(tiny.dense, tiny.model(plan).network, material(max_documents=20), batch=3)
    assert report.context == CONTEXT
    assert report.perplexity.increase == pytest.approx(0, abs=1e-5)
    assert report.perplexity.windows == 20
    assert report.agreement.kl == pytest.approx(0, abs=1e-6)
    assert report.agreement.same == 1
    assert list(report.tasks) == ["passkey", "copy@128"]
    for task in report.tasks.values():
        assert task.retention == pytest.approx(1, abs=1e-5)
        assert task.score == task.dense
        assert task.documents == 9  # 9 is the first multiple of the batch that suffices.
    assert report.agreement.contexts == 9
    assert report.tasks["copy@128"].by_depth is None
    assert sum(quarter.questions for quarter in report.tasks["passkey"].by_depth if quarter) == 9
    assert report.to_json()["tasks"]["passkey"]["retention"] == report.tasks["passkey"].retention


@pytest.mark.parametrize("protocol", ["cached", "exact"])
@pytest.mark.full
def test_batches_do_not_matter_and_dense_is_read_once(tiny: TinyModel, protocol, monkeypatch):
    plan = CompressionPlan.uniform(CONFIG, qk=16, v=16, window=32, sinks=4)
    network = tiny.model(plan).network
    (given,) = material(plan, max_documents=MIN_DOCUMENTS, tasks=("passkey", "copy@128"))
    first, *others = (Evaluation(tiny.dense, given, protocol=protocol, batch=batch) for batch in (3, 4))
    found = first.evaluate(network)
    for other in others:
        for task, each in other.evaluate(network).tasks.items():
            assert each.retention == pytest.approx(found.tasks[task].retention, rel=1e-4)
            assert each.documents == MIN_DOCUMENTS
    assert all(abs(each.retention - 1) > 1e-3 for each in found.tasks.values())
    read = []
    monkeypatch.setattr(module, "answer_questions", lambda *given: read.append(given[0]) or real(*given))
    assert first.evaluate(network) == found
    assert tiny.dense not in read


real = module.answer_questions


@pytest.mark.parametrize(
    ("counts", "noise", "documents"),
    [(True, 0.0, FIRST_CHECK), (True, 0.05, 40), (True, 1.0, 64), (False, 1.0, FIRST_CHECK)],
)
@pytest.mark.matrix
def test_reading_stops_when_retention_is_known(tiny: TinyModel, monkeypatch, counts, noise, documents):
    # Answers are invented, with known noise; a standard error of 0.05 / √40 is known within 0.02.
    rng = np.random.default_rng(0)

    def answered(network, cache, batch):
        lost = noise * rng.normal(size=len(batch)) * (network is not tiny.dense)
        return {"a": [(Answer(np.array([-1 - x], np.float32), np.array([counts])),) for x in lost]}

    monkeypatch.setattr(module, "answer_questions", answered)
    monkeypatch.setattr(module, "read_contexts", lambda *given, **options: (None, None))
    (given,) = material(max_documents=64, tasks=("copy@128",))
    (report,) = evaluate(tiny.dense, tiny.model(CompressionPlan.full(CONFIG)).network, [given], batch=2)
    assert report.tasks["a"].counts == counts
    assert FIRST_CHECK <= report.tasks["a"].documents <= documents
    if noise == 1.0 and counts:
        assert report.tasks["a"].documents == 64
    else:
        assert report.tasks["a"].is_precise or not counts


@pytest.mark.full
def test_all_kinds_of_layers_are_compiled_before_any_text_is_read(tiny: TinyModel, monkeypatch):
    ranks = [LayerRanks(16 + 16 * (layer % 2), 32) for layer in range(CONFIG.num_layers)]
    plan = CompressionPlan.of_layers(CONFIG, ranks, window=32, sinks=4)
    network, sizes = tiny.model(plan).network, list[int]()

    def note(*arguments):
        known = compile_ahead(*arguments)
        sizes.append(run_layer.run_whole_layer._cache_size() + run_layer.extend_layer_alone._cache_size())
        return known

    monkeypatch.setattr(module, "compile_ahead", note)
    (given,) = material(plan, max_documents=MIN_DOCUMENTS, tasks=("perplexity", "copy@128"))
    evaluation = Evaluation(tiny.dense, given, protocol="cached", batch=2)
    evaluation.evaluate(tiny.dense)  # Now the unmodified model is compiled, too.
    evaluation.evaluate(network)
    evaluation.evaluate(network)
    assert sizes[0] < sizes[1] == sizes[2]


def test_splits_and_seeds_choose_other_text():
    contexts = [
        material(tasks=("passkey",), max_documents=8, split=split, seed=seed)[0]
        .task_documents[0]
        .context.tobytes()
        for split in ("search", "report", "test")
        for seed in (0, 1)
    ]
    assert len(set(contexts)) == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"tasks": ("poetry",)},
            EvaluationError,
            "task='poetry': unknown; must be one of perplexity, agreement, copy",
        ),
        ({"contexts": (321,)}, EvaluationError, "context=321 must be 2 to the model's 320 positions"),
        ({"contexts": (191,)}, EvaluationError, "context=191: must be at least 192 tokens for tasks"),
        ({"tasks": ("copy@193",)}, EvaluationError, "copy@193 needs contexts of 321 tokens.* have 320"),
        ({"tasks": ("lookup",)}, EvaluationError, "lookup alone"),
        ({"max_documents": 0}, EvaluationError, "max_documents=0 must be >= 1"),
        ({"seed": -1}, EvaluationError, "seed=-1 must be >= 0"),
        (
            {"documents": documents(8), "tasks": ("copy@128",)},
            TextError,
            r"8 windows of 192 tokens \(1,536\) are needed, but split 'test', .* has \d \(\d+\)",
        ),
    ],
)
def test_what_cannot_be_is_said_before_any_work(options, error, message):
    with pytest.raises(error, match=message):
        material(**options)


def test_models_without_a_tokenizer():
    with pytest.raises(EvaluationError, match="has no tokenizer"):
        prepare(CONFIG, None, CompressionPlan.full(CONFIG), documents())
