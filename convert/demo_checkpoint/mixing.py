"""Training windows: real text with facts in it and, later, questions about these facts with their answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from convert.demo_checkpoint.facts import Fact, ask, draw_facts

LEAST_DISTANCE = 50
MOST_DISTANCE = 1900
"""Tokens of text between a fact and the question about it."""
TOKENS_PER_FACT = 128
"""A window has at most one fact in this many tokens."""
BREAK = "\n\n"

Encode = Callable[[str], tuple[int, ...]]
"""Function from a text to token ids, without special tokens."""


@dataclass(frozen=True)
class MarkedText:
    """Tokens of one text or of a batch, and which of them are numbers in answers."""

    tokens: Int[np.ndarray, "*B T"]
    answers: Bool[np.ndarray, "*B T"]


@dataclass(frozen=True)
class Insertion:
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
    return stack(
        add_facts(window, encode, rng) if picked else mark(window, answers=False)
        for window, picked in zip(windows, chosen, strict=True)
    )


def add_facts(window: Int[np.ndarray, " T"], encode: Encode, rng: np.random.Generator) -> MarkedText:
    """Write several facts into a window, each with a question at a random distance."""
    most = max(1, len(window) // TOKENS_PER_FACT)
    facts = draw_facts(rng, int(rng.integers(1, most + 1)), held_out=False)
    statements = [encode_statement(fact, encode) for fact in facts]
    questions = [encode_question(fact, encode) for fact in facts]
    room = len(window) - sum(len(each.tokens) for each in (*statements, *questions))
    insertions: list[Insertion] = []
    for statement, question in zip(statements, questions, strict=True):
        distance = draw_distance(rng, most=min(MOST_DISTANCE, room))
        start = int(rng.integers(room - distance + 1))
        insertions += [Insertion(start, statement), Insertion(start + distance, question)]
    return insert(window[:room], insertions)


def end_with_question(
    window: Int[np.ndarray, " T"], fact: Fact, encode: Encode, *, distance: int
) -> MarkedText:
    """Write a fact into a window and a question about it at the end, with `distance` tokens between them."""
    statement, question = encode_statement(fact, encode), encode_question(fact, encode)
    room = len(window) - len(statement.tokens) - len(question.tokens)
    insertions = [Insertion(max(0, room - distance), statement), Insertion(room, question)]
    return insert(window[:room], insertions)


def draw_distance(rng: np.random.Generator, *, most: int) -> int:
    """Draw a distance in tokens; short ones are more frequent, because a model learns these first."""
    return int(LEAST_DISTANCE * (most / LEAST_DISTANCE) ** np.sqrt(rng.random()))


def encode_statement(fact: Fact, encode: Encode) -> MarkedText:
    """Encode the sentence that mentions a number; nothing in it is an answer."""
    return mark(encode_number(f"{BREAK}{fact.statement}{BREAK}", fact.number, encode).tokens, answers=False)


def encode_question(fact: Fact, encode: Encode) -> MarkedText:
    """Encode a question with its answer; the number is marked."""
    return encode_number(f"{ask(fact)} {fact.statement}{BREAK}", fact.number, encode)


def encode_number(text: str, number: int, encode: Encode) -> MarkedText:
    """Encode a text around its number, so that texts which differ only there are encoded once."""
    before, after = (encode(part) for part in text.split(f" {number}"))
    digits = encode(f" {number}")
    marks = [False] * len(before) + [True] * len(digits) + [False] * len(after)
    return MarkedText(np.array((*before, *digits, *after), np.int32), np.array(marks))


def mark(tokens: Int[np.ndarray, " T"], *, answers: bool) -> MarkedText:
    """Mark all tokens alike."""
    return MarkedText(tokens, np.full(len(tokens), answers))


def insert(text: Int[np.ndarray, " n"], insertions: Sequence[Insertion]) -> MarkedText:
    """Return a text with all insertions."""

    def get_place(insertion: Insertion) -> int:
        return insertion.place

    parts, begin = list[MarkedText](), 0
    for each in sorted(insertions, key=get_place):
        parts += [mark(text[begin : each.place], answers=False), each.text]
        begin = each.place
    parts.append(mark(text[begin:], answers=False))
    return MarkedText(
        np.concatenate([part.tokens for part in parts]), np.concatenate([part.answers for part in parts])
    )


def stack(texts: Iterable[MarkedText]) -> MarkedText:
    """Return texts of one length as a batch."""
    texts = list(texts)
    return MarkedText(np.stack([text.tokens for text in texts]), np.stack([text.answers for text in texts]))
