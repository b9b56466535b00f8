"""Tasks of RULER: solvers that only read the prompt find the references, and prompts fill their context."""

import re
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import tiny_tokenizers

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.ruler import RECIPES
from zdc_jax.evaluation.ruler.haystack import DEPTHS, NOISE, collect_words, cut_sentences, draw_depths, hide
from zdc_jax.evaluation.ruler.prompt import Setting, make_task
from zdc_jax.evaluation.ruler.score import LEAST_COUNTED, compare_scores, score_answer
from zdc_jax.evaluation.ruler.variables import EXAMPLE_TOKENS
from zdc_jax.evaluation.text import Document

TOKENIZER = tiny_tokenizers.demo()
TEXT = collect_words([Document("a", "It was dark, he said. But no! Did they sleep? One boy was awake.")], 99)
BUDGETS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
"""Tokens to generate, from RULER's `constants.py`."""


def task(name: str, length: int = 2048, count: int = 3, seed: int = 0):
    return make_task(name, RECIPES[name], Setting(length, TOKENIZER, TEXT), count=count, seed=seed)


def prompts(name: str, **options):
    """Return the text and the references of each sample."""
    samples = task(name, **options).samples
    return [(TOKENIZER.decode(sample.tokens.tolist()), sample.references) for sample in samples]


def find_needles(prompt: str) -> dict[str, set[str]]:
    """Return the values that the prompt states for each key."""
    values: dict[str, set[str]] = {}
    for key, value in re.findall(r"One of the special magic \w+ for (.+?) is: ([-\w]+)\.", prompt):
        values.setdefault(key, set()).add(value)
    return values


def solve_needles(prompt: str) -> set[str]:
    asked = re.search(r"What .* special magic \w+ for (.*?) mentioned in the provided text\?", prompt)[1]
    needles = find_needles(prompt)
    return set().union(*(needles[key] for key in re.split(r", and |, ", asked)))


def solve_chain(prompt: str) -> set[str]:
    question = prompt[prompt.rindex("Memorize and track") :]
    names = set()
    value = re.search(r"assigned the value (\d+) in", question)[1]
    assignments = re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", question)
    for name, source in assignments:  # A chain is stated in its order.
        if source == value or source in names:
            names.add(name)
    assert len(names) == len(assignments)
    return names


def solve_common(prompt: str) -> set[str]:
    listed = prompt[prompt.rindex("Below is a numbered list") :].split("\n")[1]
    numbered = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", listed)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    ranked = Counter(word for _, word in numbered).most_common()
    assert ranked[9][1] > ranked[10][1]
    return {word for word, _ in ranked[:10]}


def solve_coded(prompt: str) -> set[str]:
    words = re.search(r"coded words\. (.*)\nQuestion", prompt)[1].split()
    noise, *ranked = Counter(words).most_common()
    assert noise[0] == "..."
    assert ranked[2][1] > ranked[3][1]
    return {word for word, _ in ranked[:3]}


SOLVERS = {"vt": solve_chain, "cwe": solve_common, "fwe": solve_coded}


LONGER = ("niah_multikey_3", *SOLVERS)
"""Tasks that differ, or have many needles, in long contexts."""


@pytest.mark.parametrize(("name", "length"), [*((n, 2048) for n in RECIPES), *((n, 8192) for n in LONGER)])
@pytest.mark.matrix
def test_a_reader_of_the_prompt_finds_the_references(name, length):
    for prompt, references in prompts(name, length=length):
        assert SOLVERS.get(name, solve_needles)(prompt) == set(references)
        assert len(set(references)) == len(references)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.matrix
def test_prompt_and_answer_fill_the_context(name):
    made = task(name, length=2048, count=8)
    assert made.answer_tokens == BUDGETS[name.split("_")[0]]
    lengths = [len(sample.tokens) + made.answer_tokens for sample in made.samples]
    assert max(lengths) <= 2048
    assert min(lengths) > 0.93 * 2048  # Half a line, or two percent, may be left after each reduction.


def test_the_number_of_needles_is_that_of_the_recipe():
    # Keys, values of the keys that have several, and references.
    expected = {
        "niah_single_1": (1, 1, 1),
        "niah_single_2": (1, 1, 1),
        "niah_single_3": (1, 1, 1),
        "niah_multikey_1": (4, 1, 1),
        "niah_multivalue": (1, 4, 4),
        "niah_multiquery": (4, 1, 4),
    }
    for name, (keys, values, references) in expected.items():
        ((prompt, answers),) = prompts(name, count=1)
        needles = find_needles(prompt)
        assert len(needles) == keys
        assert {len(each) for each in needles.values()} == {values}
        assert len(answers) == references
    for name in ("niah_multikey_2", "niah_multikey_3"):
        ((prompt, _),) = prompts(name, count=1)
        lines = prompt.split("\n")[1:-1]
        assert len(find_needles(prompt)) == len(lines) > 10  # The haystack has nothing but needles.


def test_keys_and_values_have_the_kind_of_the_recipe():
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    for name, key, value in (
        ("niah_single_1", r"[\w -]+-[\w -]+", r"[1-9]\d{6}"),
        ("niah_single_3", r"[\w -]+-[\w -]+", uuid),
        ("niah_multikey_3", uuid, uuid),
    ):
        ((prompt, _),) = prompts(name, count=1)
        for found, values in find_needles(prompt).items():
            assert re.fullmatch(key, found)
            assert all(re.fullmatch(value, each) for each in values)


def test_prompts_have_the_words_of_ruler():
    ((one, _),) = prompts("niah_single_1", count=1)
    assert one.startswith("A special magic number is hidden within the following text. Make sure to")
    assert re.search(
        r"\nWhat is the special magic number for (.+) mentioned in the provided text\? The special "
        r"magic number for \1 mentioned in the provided text is$",
        one,
    )
    assert f"{NOISE}\n{NOISE}" in one
    ((several, _),) = prompts("niah_multiquery", count=1)
    assert several.startswith("Some special magic numbers are hidden within the following text.")
    assert several.endswith("mentioned in the provided text are")
    ((chain, _),) = prompts("vt", count=1)
    assert chain.endswith("are assigned the value " + re.findall(r"\d{5}", chain)[-1] + ", they are: ")
    ((coded, _),) = prompts("fwe", count=1)
    assert coded.endswith("According to the coded text above, the three most frequently appeared words are:")


def test_an_example_comes_before_chains_and_lists():
    ((chain, references),) = prompts("vt", count=1)
    example, question = chain.split("\n\nMemorize and track")
    assert len(TOKENIZER.encode(example).ids) <= EXAMPLE_TOKENS
    body, names = example.split("they are: ")
    solved = set(names.split())
    assert solve_chain(body) == solved
    assert {len(name) for name in solved} == {3}
    assert not solved & set(references)
    assert all(name in question for name in references)
    for length, frequencies in ((2048, {3, 1}), (4096, {10, 3})):
        ((lists, _),) = prompts("cwe", length=length, count=1)
        example, _ = re.split(r"\n(?=Below is a numbered list)", lists)
        body, solution = example.split("most often in the list are:")
        assert solve_common(body) == set(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", solution.strip()))
        words = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", body.split("\n")[1])
        assert set(Counter(words).values()) == frequencies


def test_common_words_occur_thirty_times_and_others_three_times():
    ((prompt, _),) = prompts("cwe", length=8192, count=1)
    listed = prompt[prompt.rindex("Below is") :].split("\n")[1]
    words = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", listed)
    assert Counter(Counter(words).values()).keys() == {30, 3}


def test_frequencies_of_coded_words_fall_with_the_square():
    ((prompt, _),) = prompts("fwe", length=8192, count=1)
    words = re.search(r"coded words\. (.*)\nQuestion", prompt)[1].split()
    counts = [count for _, count in Counter(words).most_common(6)]
    for rank, count in enumerate(counts, start=1):
        assert count == pytest.approx(counts[0] / rank**2, abs=1)


def test_depths_are_even_and_needles_lie_at_them():
    assert (DEPTHS[0], DEPTHS[-1], len(DEPTHS)) == (0, 100, 40)
    assert {after - before for before, after in pairwise(DEPTHS)} == {2, 3}
    seen = {tuple(draw_depths(Random(seed), 100, 1)) for seed in range(400)}
    assert seen == {(depth,) for depth in DEPTHS}
    assert hide(["a", "b", "c"], ["x", "y", "z"], [0, 2, 3]) == ["x", "a", "b", "y", "c", "z"]


def test_needles_in_text_lie_between_sentences():
    ((prompt, _),) = prompts("niah_multivalue", count=1)
    context = prompt.split("\n")[1]
    plain = re.sub(r" ?One of the special magic numbers for .+? is: \d+\.", "", context).strip()
    assert plain == " ".join(cut_sentences(TEXT, len(plain.split())))
    assert cut_sentences(TEXT, 8) == ["It was dark, he said.", "But no!", "Did"]
    documents = [Document("a", "a  b\nc"), Document("b", "d e")]
    assert collect_words(documents, 4) == ("a", "b", "c", "d")
    assert collect_words([], 4) == ()


def test_samples_depend_on_seed_index_and_task_only():
    def ids(name: str, **options):
        return [sample.tokens.tobytes() for sample in task(name, length=1024, **options).samples]

    for name in ("niah_multikey_1", "cwe", "fwe", "vt"):
        first = ids(name, count=3)
        assert first == ids(name, count=4)[:3]
        assert len({*first, *ids(name, count=3, seed=1)}) == 6


@pytest.mark.parametrize("name", RECIPES)
def test_contexts_that_are_too_short(name):
    message = f"context=100: task '{name}' needs at least \\d+ tokens .* choose longer contexts"
    with pytest.raises(EvaluationError, match=message) as caught:
        task(name, length=100)
    if name in ("niah_single_1", "cwe"):  # The number is the least that suffices, but for other draws.
        least = int(re.search(r"at least (\d+)", str(caught.value))[1])
        assert len(task(name, length=least + 8, count=1).samples) == 1


def test_prompts_begin_as_the_tokenizer_begins_texts():
    tokenizer = tiny_tokenizers.sentencepiece()
    assert Setting(64, tokenizer).encode("the man").tolist() == tokenizer.encode("the man").ids


def test_scores_are_shares_of_references():
    assert score_answer("They are ABC, def.", ("abc", "DEF", "ghi", "jkl")) == 0.5
    assert score_answer("1234567", ("1234567",)) == 1
    assert score_answer("", ("a",)) == 0


def test_retention_is_that_of_counted_samples():
    dense, plan = np.array([1.0, 0.5, 0.0, 0.5]), np.array([0.5, 0.5, 1.0, 0.25])
    found = compare_scores(dense, plan)
    assert (found.score, found.dense) == (0.5625, 0.5)
    assert (found.retention, found.ratio, found.ratio_interval) == (1.25 / 2, 2.25 / 2, None)
    assert (found.samples, found.counted, found.counts) == (4, 3, False)
    assert found.interval == (0.5, 1.0)  # Only the first or only the second sample: 1 in 27 draws.
    none = compare_scores(np.zeros(3), np.ones(3))
    assert (none.retention, none.ratio, none.interval, none.counted) == (None, None, None, 0)
    assert compare_scores(np.ones(1), np.ones(1)).interval is None


def test_intervals_cover_the_retention():
    # Each counted sample is kept with probability 0.9; the normal interval of the mean is known.
    rng = np.random.default_rng(0)
    plan = (rng.random(400) < 0.9).astype(float)
    found = compare_scores(np.ones(400), plan)
    error = 1.96 * plan.std() / np.sqrt(400)
    assert found.interval == pytest.approx((plan.mean() - error, plan.mean() + error), abs=0.005)
    assert (found.ratio, found.ratio_interval) == (found.retention, found.interval)
    assert found.counts
    assert not compare_scores(np.ones(LEAST_COUNTED - 1), np.ones(LEAST_COUNTED - 1)).counts
