"""Documents with questions, decoded and read by people's rules."""

import re

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation import tasks
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Question, Writer
from zdc_jax.evaluation.sheets import context_length, make_task_documents

CONTEXT = 1280
S = context_length(CONTEXT)
TOKENIZERS = {"demo": tiny_tokenizers.demo(), "bytes": tiny_tokenizers.byte_tokenizer(256)}
EOS = 2


def windows(count: int = 1, length: int = S, seed: int = 0) -> np.ndarray:
    """Return ids of small letters and spaces, which no task contains alone."""
    return np.random.default_rng(seed).integers(70, 90, (count, length), dtype=np.int32)


def document(tokenizer, *names, seed=0, **options):
    (made,) = make_task_documents(tasks.chosen(names, CONTEXT), windows(**options), tokenizer, seed=seed)
    return made


def answer_of(tokenizer, question: Question) -> str:
    return tokenizer.decode(question.tokens[question.answer].tolist()).strip()


def asked(tokenizer, question: Question) -> str:
    return tokenizer.decode(question.tokens[~question.answer].tolist()).strip()


each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
seeds = given(seed=st.integers(0, 10_000))
few = settings(max_examples=15, deadline=None)


@each_tokenizer
@few
@seeds
def test_a_context_is_text_with_statements(tokenizer, seed):
    names = ("passkey", "needles", "induction", "copy")
    made = document(tokenizer, *names, seed=seed)
    assert list(made.questions) == ["passkey", "needles", "induction", "copy@320", "copy@960"]
    assert made.context.shape == (S,)
    assert made.context.dtype == np.int32
    said = tokenizer.decode(made.context.tolist())
    assert said.count("Remember it.") == 1
    assert said.count("The secret number of") == 4
    for question in (q for questions in made.questions.values() for q in questions):
        assert len(question.tokens) <= QUESTION_TOKENS
        assert question.tokens.dtype == np.int32
        assert not question.answer[0]


@each_tokenizer
@few
@seeds
def test_passkey(tokenizer, seed):
    made = document(tokenizer, "passkey", seed=seed)
    (question,) = made.questions["passkey"]
    key = answer_of(tokenizer, question)
    assert re.fullmatch(r"[1-9]\d{4}", key)
    start = round(question.depth * S)
    statement = Writer(tokenizer, windows()[0]).tokenize(f"\n\nThe pass key is {key}. Remember it.\n\n")
    np.testing.assert_array_equal(made.context[start : start + len(statement)], statement)
    rest = np.delete(made.context, range(start, start + len(statement)))
    np.testing.assert_array_equal(rest, windows()[0, : len(rest)])


@each_tokenizer
@few
@seeds
def test_needles(tokenizer, seed):
    made = document(tokenizer, "needles", seed=seed)
    said = dict(
        re.findall(r"The secret number of (\w+) is (\d{4})\.", tokenizer.decode(made.context.tolist()))
    )
    assert len(said) == 4
    for question in made.questions["needles"]:
        (city,) = re.fullmatch(r"The secret number of (\w+) is", asked(tokenizer, question)).groups()
        assert said[city] == answer_of(tokenizer, question)
        there = tokenizer.decode(made.context[round(question.depth * S) :][:60].tolist())
        assert there.startswith(f"\n\nThe secret number of {city} is")


@each_tokenizer
@few
@seeds
def test_lookup(tokenizer, seed):
    made = document(tokenizer, "lookup", seed=seed)
    said = re.findall(r"(\w+) = (\d{4})\n", tokenizer.decode(made.context.tolist()))
    assert len(said) == 16 == len({key for key, _ in said}) == len({value for _, value in said})
    (question,) = made.questions["lookup"]
    key = asked(tokenizer, question).removesuffix(" =")
    assert dict(said)[key] == answer_of(tokenizer, question)


@few
@given(seed=st.integers(0, 10_000), distance=st.integers(96, S))
def test_copy(seed, distance):
    made = document(TOKENIZERS["demo"], "passkey", f"copy@{distance}", seed=seed)
    (question,) = made.questions[f"copy@{distance}"]
    np.testing.assert_array_equal(question.tokens, made.context[S - distance : S - distance + 96])
    np.testing.assert_array_equal(question.answer, np.arange(96) >= 16)
    assert question.depth is None


@few
@seeds
def test_induction(seed):
    made = document(TOKENIZERS["demo"], "induction", seed=seed)
    (question,) = made.questions["induction"]
    start = round(question.depth * S)
    np.testing.assert_array_equal(made.context[start : start + 48], question.tokens)
    np.testing.assert_array_equal(question.answer, np.arange(48) >= 8)
    assert set(question.tokens.tolist()) <= set(windows()[0].tolist())


def test_random_tokens_are_different_where_text_has_enough():
    text = np.arange(S, dtype=np.int32)[None]
    chosen = tasks.chosen(["induction"], CONTEXT)
    (made,) = make_task_documents(chosen, text, TOKENIZERS["demo"], seed=0, not_drawn=tuple(range(S - 50)))
    run = made.questions["induction"][0].tokens
    assert len(set(run.tolist())) == 48
    assert run.min() >= S - 50


def test_contexts_begin_as_the_tokenizer_begins_texts():
    tokenizer = tiny_tokenizers.chat_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> </s> $A <|im_end|>",
        special_tokens=[
            (name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "</s>", "<|im_end|>")
        ],
    )
    made = document(tokenizer, "passkey")
    assert made.context[:2].tolist() == [0, 2]
    assert 2 not in made.context[2:]
    assert made.context.shape == (S,)


def test_a_sheet_does_not_depend_on_those_beside_it():
    chosen = tasks.chosen(tasks.names(), CONTEXT)
    many = make_task_documents(chosen, windows(3), TOKENIZERS["demo"], seed=5)
    few = make_task_documents(chosen, windows(3)[:2], TOKENIZERS["demo"], seed=5)
    for one, other in zip(many, few, strict=False):
        np.testing.assert_array_equal(one.context, other.context)
    assert not np.array_equal(many[0].questions["passkey"][0].tokens, many[1].questions["passkey"][0].tokens)


@given(length=st.integers(0, 100_000), blocks=st.integers(1, 8))
def test_questions_fit_behind_contexts(length, blocks):
    alignment = 64 * blocks
    if length < alignment + QUESTION_TOKENS:
        with pytest.raises(EvaluationError, match=f"context={length}: must be at least {alignment + 128}"):
            context_length(length, alignment)
        return
    found = context_length(length, alignment)
    assert found % alignment == 0
    assert length - alignment < found + QUESTION_TOKENS <= length


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["poetry"], "task 'poetry' must be one of copy, induction, lookup, needles, passkey"),
        (["copy@"], "task 'copy@' must be a task name, or copy@TOKENS"),
        (["copy@-5"], "task 'copy@-5'"),
        (["passkey@100"], "task 'passkey@100'"),
        (["copy@95"], "task copy@95: the distance must be >= 96"),
        ([f"copy@{S + 1}"], f"task copy@{S + 1} needs contexts of {S + 129} tokens.* have 1280"),
    ],
)
def test_impossible_tasks_are_named(names, message):
    with pytest.raises(EvaluationError, match=message):
        document(TOKENIZERS["demo"], *names)


def test_statements_leave_room_for_text():
    with pytest.raises(EvaluationError, match=r"context=256: must be at least \d+.*\(lookup alone \d+\)"):
        document(TOKENIZERS["bytes"], "passkey", "lookup", length=128)


def test_questions_are_checked():
    with pytest.raises(EvaluationError, match="a question as 129 tokens; at most 128 are allowed"):
        Question(np.zeros(129, np.int32), np.arange(129) > 5)
    for answer in ([True, True], [False, False]):
        with pytest.raises(EvaluationError, match="a question without answer tokens"):
            Question(np.zeros(2, np.int32), np.array(answer))
