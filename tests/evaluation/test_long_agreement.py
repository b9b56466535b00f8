"""Long greedy texts compared with `generate`, and repetition with counts by hand."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_tokenizers
from conftest import LLAMA, TinyModel

from zdc_jax import CompressionPlan, generate
from zdc_jax.evaluation import evaluate as module
from zdc_jax.evaluation.evaluate import evaluate, prepare
from zdc_jax.evaluation.long_agreement import compare_texts, measure_repetition, write_texts
from zdc_jax.evaluation.text import Document
from zdc_jax.loading import LanguageModel

CONFIG = replace(LLAMA, eos_ids=(2,))
TOKENS = 40


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(CONFIG)


@pytest.mark.matrix
@pytest.mark.parametrize("protocol", ["cached", "exact"])
@pytest.mark.matrix
def test_a_plan_in_16_bits_writes_the_same_texts(tiny: TinyModel, protocol, monkeypatch):
    monkeypatch.setattr(module, "LONG_TOKENS", TOKENS)
    text = [Document("a", "".join(np.random.default_rng(i).choice(list("abc "), 99))) for i in range(60)]
    plan, tokenizer = CompressionPlan.full(CONFIG), tiny_tokenizers.chat_tokenizer()
    materials = prepare(
        CONFIG, tokenizer, plan, text, tasks=("long_agreement",), contexts=(64,), max_documents=3
    )
    (report,) = evaluate(tiny.dense, tiny.model(plan).network, materials, protocol=protocol, batch=2)
    found = report.long_agreement
    assert (found.tokens, found.prompts, found.same, found.share) == (TOKENS, 3, 1.0, 1.0)
    assert found.first_differences == (TOKENS,) * 3
    assert found.repetition == found.dense_repetition


@pytest.mark.full
def test_texts_are_those_of_generate_without_stop_tokens(tiny: TinyModel):
    network = tiny.model(CompressionPlan.uniform(CONFIG, qk=16, v=16, window=16)).network
    prompts = tiny.tokens(3, 64)
    found = write_texts(network, prompts, tokens=TOKENS, protocol="cached", batch=2)
    result = generate(LanguageModel(network, None, None), prompts.tolist(), TOKENS, stop_tokens=())
    assert found.tolist() == [list(each.tokens) for each in result.completions]


def test_first_differences():
    dense = np.array([[1, 2, 3, 4, 5]] * 3)
    plan = np.array([[1, 2, 3, 4, 5], [1, 2, 0, 4, 5], [0, 2, 3, 4, 0]])
    found = compare_texts(dense, plan)
    assert found.first_differences == (5, 2, 0)
    assert found.first_difference == pytest.approx(7 / 3)
    assert found.share == pytest.approx(7 / 15)
    assert found.same == pytest.approx(1 / 3)


def test_repetition_counts_sequences_of_four():
    assert measure_repetition(np.arange(10)) == 0
    assert measure_repetition(np.zeros(10, int)) == pytest.approx(6 / 7)
    # 1234 and 2341 … begin again: 9 sequences, of which 4 are different.
    assert measure_repetition(np.array([1, 2, 3, 4] * 3)) == pytest.approx(5 / 9)
    same = np.array([[1, 2, 3, 4] * 3])
    found = compare_texts(same, np.arange(12)[None])
    assert (found.repetition, found.dense_repetition) == (0, pytest.approx(5 / 9))
