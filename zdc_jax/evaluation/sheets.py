"""Task documents: contexts of real text with inserted statements, and questions about them.

One context serves all tasks. Task documents are made from any text and need no labels.
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
"""Positions of questions are multiples of this number, because some cache methods need aligned chunks."""


@dataclass(frozen=True, eq=False)
class TaskDocument:
    """Context with the questions of all tasks about it.

    Attributes:
      context: token ids of the context, int32 [S].
      questions: questions of each task. All of them are asked about the same context.
    """

    context: Int[np.ndarray, " S"]
    questions: Mapping[str, tuple[Question, ...]]


def context_length(length: int, alignment: int = ALIGNMENT) -> int:
    """Return the longest context S for which the context and any question have at most `length` tokens.

    Args:
      length: tokens of the context and a question together.
      alignment: number that S is a multiple of.

    Raises:
      EvaluationError: `length` is too short for a context and a question.
    """
    if (context := (length - QUESTION_TOKENS) // alignment * alignment) <= 0:
        needed = alignment + QUESTION_TOKENS
        raise EvaluationError(f"context={length}: must be at least {needed} tokens for tasks")
    return context


def make_task_documents(
    tasks: Mapping[str, Pose],
    windows: Int[np.ndarray, "W S"],
    tokenizer: Tokenizer,
    *,
    seed: int,
    not_drawn: tuple[int, ...] = (),
) -> list[TaskDocument]:
    """Make a task document from each window of text.

    The end of the window is dropped to make room for the statements and the special tokens of the tokenizer.

    Args:
      tasks: `pose` functions by task name, from `tasks.chosen`.
      windows: token ids of real text, int32.
      tokenizer: tokenizer of the model.
      seed: seed for the statements and their positions. With the same seed and the same set of token ids in
        all windows, document i does not depend on the number of windows.
      not_drawn: token ids that tasks must not use, for example end-of-sequence ids.

    Raises:
      EvaluationError: the statements do not fit into S tokens, or the tokenizer cannot encode the questions.
    """
    writer = Writer(tokenizer, np.setdiff1d(windows, not_drawn).astype(np.int32))
    prefix = writer.make_prefix()
    return [
        _make_document(tasks, window, writer, prefix, np.random.default_rng([seed, index]))
        for index, window in enumerate(windows)
    ]


def _make_document(
    tasks: Mapping[str, Pose],
    window: Int[np.ndarray, " S"],
    writer: Writer,
    prefix: Int[np.ndarray, " _"],
    rng: np.random.Generator,
) -> TaskDocument:
    """Make one task document. Statements fill at most half of the context, so that text surrounds them."""
    instances = {name: pose(rng, writer) for name, pose in tasks.items()}
    sizes = {name: sum(map(len, instance.statements)) for name, instance in instances.items()}
    if (total := sum(sizes.values())) > len(window) // 2:
        longest = max(sizes, key=sizes.__getitem__)
        raise EvaluationError(
            f"context={len(window) + QUESTION_TOKENS}: must be at least {2 * total + QUESTION_TOKENS} "
            f"tokens: the statements of all tasks fill up to half of it, and have {total} ({longest} alone "
            f"{sizes[longest]})"
        )
    text = window[: len(window) - len(prefix) - total]
    statements = [statement for instance in instances.values() for statement in instance.statements]
    cuts = rng.integers(len(text) + 1, size=len(statements))
    context, starts = _insert_statements(text, statements, cuts)
    context = np.concatenate([prefix, context])
    next_start = iter((starts + len(prefix)).tolist())
    questions = {
        name: instance.ask(context, [next(next_start) for _ in instance.statements])
        for name, instance in instances.items()
    }
    return TaskDocument(context, questions)


def _insert_statements(
    text: Int[np.ndarray, " _"], statements: list[np.ndarray], cuts: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, " n"]]:
    """Insert each statement before the token at its cut; return the text and the starts of the statements."""
    order = np.argsort(cuts, kind="stable")
    first, *rest = np.split(text, cuts[order])
    parts = [first, *(part for i, after in zip(order, rest, strict=True) for part in (statements[i], after))]
    offsets = np.cumsum([0, *(len(statements[i]) for i in order)])[:-1]
    starts = np.empty(len(cuts), int)
    starts[order] = cuts[order] + offsets
    return np.concatenate(parts), starts
