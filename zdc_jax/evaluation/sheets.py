"""Sheets: long contexts of real text with statements put into them, and questions about each.

One reading of a context serves all tasks. Sheets are made from any text and need no labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import QUESTION_TOKENS, Question, Writer
from zdc_jax.evaluation.tasks import Pose

ALIGNMENT = 64
"""Questions begin at a multiple of this: some cache methods take pieces of a prompt only there."""


@dataclass(frozen=True, eq=False)
class TaskDocument:
    """A context, int32 [S], and the questions of each task about it, all asked of the same context."""

    context: Int[np.ndarray, " S"]
    questions: Mapping[str, tuple[Question, ...]]


def context_length(length: int, alignment: int = ALIGNMENT) -> int:
    """S, so that a context and any question are at most `length` tokens: a multiple of `alignment`.

    Raises:
      EvaluationError: `length` has no room for such a context.
    """
    if (context := (length - QUESTION_TOKENS) // alignment * alignment) <= 0:
        needed = alignment + QUESTION_TOKENS
        raise EvaluationError(f"a context of {length} tokens has no room for tasks, which need {needed}")
    return context


def make_task_documents(
    tasks: Mapping[str, Pose],
    windows: Int[np.ndarray, "W S"],
    tokenizer: Tokenizer,
    *,
    seed: int,
    not_drawn: tuple[int, ...] = (),
) -> list[TaskDocument]:
    """A sheet of each window of text; its end makes room for statements and the tokenizer's first tokens.

    Args:
      tasks: as `tasks.chosen` gives them.
      windows: int32, tokens of real text.
      seed: of what is said and where. Sheet i is the same beside others that hold the same token ids.
      not_drawn: ids that no task draws, such as that of the end of a text.

    Raises:
      EvaluationError: a task does not fit into S tokens, or the tokenizer cannot write its questions.
    """
    writer = Writer(tokenizer, np.setdiff1d(windows, not_drawn).astype(np.int32))
    beginning = writer.beginning()
    rngs = (np.random.default_rng([seed, index]) for index in range(len(windows)))
    return [
        _make_document(tasks, window, writer, beginning, rng)
        for window, rng in zip(windows, rngs, strict=False)
    ]


def _make_document(
    tasks: Mapping[str, Pose],
    window: Int[np.ndarray, " S"],
    writer: Writer,
    beginning: Int[np.ndarray, " _"],
    rng: np.random.Generator,
) -> TaskDocument:
    """Statements take half of a context at most, so that text surrounds them."""
    posed = {name: pose(rng, writer) for name, pose in tasks.items()}
    sizes = {name: sum(map(len, each.statements)) for name, each in posed.items()}
    if (said := sum(sizes.values())) > len(window) // 2:
        longest = max(sizes, key=sizes.__getitem__)
        raise EvaluationError(
            f"tasks put {said} tokens into a context ({longest} alone {sizes[longest]}) and need one of "
            f"{2 * said + QUESTION_TOKENS}, questions included; it has {len(window) + QUESTION_TOKENS}"
        )
    text = window[: len(window) - len(beginning) - said]
    statements = [statement for each in posed.values() for statement in each.statements]
    context, starts = _with_statements(text, statements, rng.integers(len(text) + 1, size=len(statements)))
    context = np.concatenate([beginning, context])
    begin = iter((starts + len(beginning)).tolist())
    questions = {
        name: each.ask(context, [next(begin) for _ in each.statements]) for name, each in posed.items()
    }
    return TaskDocument(context, questions)


def _with_statements(
    text: Int[np.ndarray, " _"], statements: list[np.ndarray], cuts: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, " n"]]:
    """`text` with each statement before the token at its cut, and where each then begins."""
    order = np.argsort(cuts, kind="stable")
    first, *rest = np.split(text, cuts[order])
    parts = [first, *(part for i, piece in zip(order, rest, strict=True) for part in (statements[i], piece))]
    before = np.cumsum([0, *(len(statements[i]) for i in order)])[:-1]
    starts = np.empty(len(cuts), int)
    starts[order] = cuts[order] + before
    return np.concatenate(parts), starts
