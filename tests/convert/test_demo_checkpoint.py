"""Training text of the demo checkpoint: facts, questions at the right distance, and marks on answers."""

import numpy as np
import pytest
from tiny_tokenizers import demo

from convert.demo_checkpoint.facts import Fact, ask, draw_facts, list_pairs
from convert.demo_checkpoint.mixing import add_facts, cache_encoding, draw_distance, end_with_question, mix
from convert.demo_checkpoint.options import Options
from convert.demo_checkpoint.step import choose_rate

FACT = Fact("code", "red", "house", 4821)


@pytest.fixture(scope="module")
def encode():
    return cache_encoding(demo())


@pytest.fixture
def window(encode):
    return np.resize(
        np.array(encode("Call me Ishmael. Some years ago, never mind how long.\n"), np.int32), 1024
    )


def test_the_demo_asks_about_pairs_that_training_never_shows():
    trained, asked = (set(list_pairs(held_out=held_out)) for held_out in (False, True))
    assert not trained & asked
    assert {fact.thing for fact in draw_facts(np.random.default_rng(0), 40, held_out=True)} > {"house", "dog"}


def test_a_question_follows_its_fact_at_the_distance_asked_for(encode, window):
    text = end_with_question(window, FACT, encode, distance=700)
    assert text.tokens.shape == window.shape
    written = demo().decode(text.tokens.tolist())
    assert written.endswith(f"{ask(FACT)} {FACT.statement}\n\n")
    between = written.split(FACT.statement)[1].removesuffix(ask(FACT) + " ")
    assert abs(len(encode(between)) - 700) < 5


def test_marks_cover_the_numbers_of_answers_alone(encode, window):
    text = add_facts(window, encode, np.random.default_rng(0))
    written = demo().decode(text.tokens.tolist())
    answers = [line.split()[-1] for line in written.split("\n") if line.startswith("Answer:")]
    assert len(answers) > 1
    assert demo().decode(text.tokens[text.answers].tolist()).split() == [each.rstrip(".") for each in answers]
    assert all(written.count(f" {answer}") == 2 for answer in answers)


def test_a_share_of_windows_has_facts(encode, window):
    windows = np.stack([window] * 40)
    text = mix(windows, encode, np.random.default_rng(0), fact_share=0.5)
    changed = (text.tokens != windows).any(1)
    assert 10 < changed.sum() < 30
    assert (text.answers.any(1) == changed).all()


def test_distances_reach_from_the_least_to_the_most():
    rng = np.random.default_rng(0)
    distances = [draw_distance(rng, most=1900) for _ in range(2000)]
    assert min(distances) >= 50
    assert 1800 < max(distances) <= 1900


def test_the_learning_rate_rises_and_falls(tmp_path):
    rates = [choose_rate(progress, 1.0) for progress in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.564, 0.1], abs=0.01)
    assert Options(tmp_path, tmp_path, tokens=2048 * 64, batch=32).steps == 2
