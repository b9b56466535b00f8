"""Splits of text, which share nothing."""

from collections import Counter
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax.evaluation.splits import PASSAGE_CHARS, SPLITS, documents_of, split_seed
from zdc_jax.evaluation.text import Document


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("ab \n", max_size=40), max_size=12), st.integers(0, 3 * PASSAGE_CHARS))
def test_every_piece_is_in_one_split(texts, length):
    book = " ".join(f"{i}" for i in range(length // 5))
    documents = [*(Document("short", text) for text in texts), Document("book", book)]
    parts = {split: list(documents_of(split, documents)) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not {each.text for each in parts[one]} & {each.text for each in parts[other]}
    found = [each for part in parts.values() for each in part]
    assert Counter(each.text for each in found if each.topic == "short") == Counter(texts)
    pieces = {each.text for each in found if each.topic == "book"}
    assert sum(map(len, pieces)) == len(book)
    assert all(piece in book for piece in pieces)


def test_each_split_holds_about_a_third():
    documents = [Document("a", f"text {i}") for i in range(3000)]
    shares = [len(list(documents_of(split, documents))) / 3000 for split in SPLITS]
    assert all(0.3 < share < 0.37 for share in shares)


def test_seeds_differ():
    assert len({split_seed(split, seed) for split in SPLITS for seed in range(100)}) == 300
