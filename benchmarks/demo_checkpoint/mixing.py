"""Training windows: real text with facts in it and, later, questions about these facts with their answers."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from convert.demo_checkpoint.facts import Fact, draw_facts

LEAST_DISTANCE = 50
MOST_DISTANCE = 1900
"""Tokens of text between a fact and the question about it."""
TOKENS_PER_FACT = 128
"""A window has at most one fact in this many tokens."""
BREAK = "\n\n"

Encode = Callable[[str], tuple[int, ...]]
"""Function from a text to token ids, without special tokens."""


class MarkedText(NamedTuple):
    """Tokens of one text or of a batch, and which of them are numbers in answers."""

    tokens: Int[np.ndarray, "*B T"]
    answers: Bool[np.ndarray, "*B T"]


class Insertion(NamedTuple):
    """Text that goes in front of the token at `place`."""

    place: int
    text: MarkedText


def cache_encoding(tokenizer: Tokenizer) -> Encode:
    """Return an encoding function that encodes each text once."""

    @lru_cache(maxsize=100_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def mix(
    windows: Int[np.ndarray, "B T"], encode: Encode, rng: np.random.Generator, *, fact_share: float
) -> MarkedText:
    """Write facts and questions into a share of the windows; leave the others as they are."""
    chosen = rng.random(len(windows)) < fact_share
    texts = [
        add_facts(window, encode, rng) if picked else mark_nothing(window)
        for window, picked in zip(windows, chosen, strict=True)
    ]
    return MarkedText(*map(np.stack, zip(*texts, strict=True)))


def add_facts(window: Int[np.ndarray, " T"], encode: Encode, rng: np.random.Generator) -> MarkedText:
    """Write several facts into a window, each with a question at a random distance.

    Short distances are more frequent, because a model learns these first.
    """
    most = max(1, len(window) // TOKENS_PER_FACT)
    facts = draw_facts(rng, int(rng.integers(1, most + 1)), held_out=False)
    pairs = [(encode_statement(fact, encode), encode_question(fact, encode)) for fact in facts]
    room = len(window) - sum(len(each.tokens) for pair in pairs for each in pair)
    insertions: list[Insertion] = []
    for statement, question in pairs:
        ratio = min(MOST_DISTANCE, room) / LEAST_DISTANCE
        distance = int(LEAST_DISTANCE * ratio ** np.sqrt(rng.random()))
        start = int(rng.integers(room - distance + 1))
        insertions += [Insertion(start, statement), Insertion(start + distance, question)]
    return insert(window[:room], insertions)


def end_with_question(
    window: Int[np.ndarray, " T"], fact: Fact, encode: Encode, *, distance: int
) -> MarkedText:
    """Write a fact into a window and a question about it at the end, with `distance` tokens between them."""
    statement, question = encode_statement(fact, encode), encode_question(fact, encode)
    room = len(window) - len(statement.tokens) - len(question.tokens)
    return insert(window[:room], [Insertion(max(0, room - distance), statement), Insertion(room, question)])


def encode_statement(fact: Fact, encode: Encode) -> MarkedText:
    """Encode the sentence that mentions a number; nothing in it is an answer."""
    return mark_nothing(encode_number(f"{BREAK}{fact.statement}{BREAK}", fact.number, encode).tokens)


def encode_question(fact: Fact, encode: Encode) -> MarkedText:
    """Encode a question with its answer; the number is marked."""
    return encode_number(f"{fact.prompt} {fact.statement}{BREAK}", fact.number, encode)


def encode_number(text: str, number: int, encode: Encode) -> MarkedText:
    """Encode a text around its number, so that texts which differ only there are encoded once."""
    before, after = (encode(part) for part in text.split(f" {number}"))
    digits = encode(f" {number}")
    marks = [False] * len(before) + [True] * len(digits) + [False] * len(after)
    return MarkedText(np.array((*before, *digits, *after), np.int32), np.array(marks))


def mark_nothing(tokens: Int[np.ndarray, " T"]) -> MarkedText:
    """Return a text without answers."""
    return MarkedText(tokens, np.zeros(len(tokens), bool))


def insert(text: Int[np.ndarray, " n"], insertions: Iterable[Insertion]) -> MarkedText:
    """Return a text with all insertions."""
    parts, begin = list[MarkedText](), 0
    for place, inserted in sorted(insertions, key=attrgetter("place")):
        parts += [mark_nothing(text[begin:place]), inserted]
        begin = place
    parts.append(mark_nothing(text[begin:]))
    return MarkedText(*map(np.concatenate, zip(*parts, strict=True)))
