"""Training text of the demo checkpoint: facts, questions at the right distance, and marks on answers."""

import json
import lzma

import numpy as np
import pytest
from tiny_tokenizers import demo

from benchmarks.demo_checkpoint.mixing import add_facts, cache_encoding, end_with_question, mix
from benchmarks.demo_checkpoint.step import choose_rate
from benchmarks.demo_checkpoint.train import TOPICS, Options, main
from convert.conversion import convert
from convert.demo_checkpoint import PATH
from convert.demo_checkpoint.facts import Fact, draw_facts, list_pairs

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
    assert written.endswith(f"{FACT.prompt} {FACT.statement}\n\n")
    between = written.split(FACT.statement)[1].removesuffix(FACT.prompt + " ")
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


def test_distances_reach_from_the_least_to_the_most(encode, window):
    window, rng, distances = np.resize(window, 2048), np.random.default_rng(0), []
    for _ in range(40):
        text = add_facts(window, encode, rng)
        written = demo().decode(text.tokens.tolist())
        asked = [part.split("?")[0] for part in written.split("Question: What is the ")[1:]]
        for subject in asked:
            after = written.split(f"The {subject} is ")[1]
            distances.append(len(encode(after.split(f"Question: What is the {subject}?")[0])))
    assert min(distances) < 100
    assert max(distances) > 1400


def test_the_learning_rate_rises_and_falls():
    rates = [choose_rate(progress, 1.0) for progress in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.564, 0.1], abs=0.01)


@pytest.mark.full
def test_training_writes_a_checkpoint_and_its_judgement(tmp_path):
    for topic in TOPICS:
        (tmp_path / topic).mkdir()
        for split in ("train", "heldout"):
            with lzma.open(tmp_path / topic / f"{split}.txt.xz", "wt") as file:
                file.write(f"Call me Ishmael. Some {topic} ago, never mind how long.\n" * 30)
    output = tmp_path / "checkpoint"
    main(Options(tmp_path, output, minutes=0.001, batch=2, layers=1, context=256))
    record = json.loads((output / "training.json").read_text())
    shipped = json.loads((PATH / "training.json").read_text())
    assert record.keys() == shipped.keys()
    assert record["options"].keys() == shipped["options"].keys()
    assert record["heldout_perplexity"].keys() == set(TOPICS)
    assert record["heldout_retrieval"].keys() == {"50"}
    checkpoint = convert(output, tmp_path / "model", progress=False)
    assert checkpoint.config.max_positions == 256
