"""Retention of tasks under a plan: the probability of correct answers compared with the unmodified model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from zdc_jax.evaluation.answers import Answer
from zdc_jax.evaluation.perplexity import bootstrap_interval

LEAST_SCORE = 0.5
"""Smallest score of the unmodified model at which a task, or a quarter of the context, counts."""
HALF_WIDTH = 0.02
"""Largest half-width of a retention interval at which no more documents are read."""
QUARTERS = 4
"""Number of parts of a context by which retention is reported."""


@dataclass(frozen=True)
class DepthRetention:
    """Retention and scores of the questions about one quarter of the contexts.

    Attributes:
      retention: retention of these questions, as in `Retention`.
      score: score with the plan.
      dense: score of the unmodified model.
      questions: number of questions.
    """

    retention: float
    score: float
    dense: float
    questions: int


@dataclass(frozen=True)
class Retention:
    """Retention of one task under a plan.

    A question counts if the unmodified model's score in its quarter of the context is at least `LEAST_SCORE`.
    If no question counts, the other values are those of all questions.

    Attributes:
      retention: exp of the mean change of the log-probability of correct tokens, averaged first within and
        then over documents; 1: no loss.
      interval: 95 % paired bootstrap interval of `retention` over documents; None for one document.
      score: share of correct tokens that are the most likely, with the plan.
      dense: the same share for the unmodified model.
      whole: share of documents whose correct tokens are all the most likely, with the plan.
      counts: whether any question counts.
      documents: number of task documents with questions that count.
      by_depth: retention by the quarter of the context that contains the statement asked about, also of
        quarters that do not count; None for a quarter without questions, and for tasks without statements.
    """

    retention: float
    interval: tuple[float, float] | None
    score: float
    dense: float
    whole: float
    counts: bool
    documents: int
    by_depth: tuple[DepthRetention | None, ...] | None

    @property
    def is_precise(self) -> bool:
        """Whether the interval extends at most `HALF_WIDTH` from the retention."""
        if self.interval is None:
            return False
        return max(self.interval[1] - self.retention, self.retention - self.interval[0]) <= HALF_WIDTH


def retention(dense: Sequence[Sequence[Answer]], plan: Sequence[Sequence[Answer]]) -> Retention:
    """Compute the retention of one task from the answers on each document.

    Args:
      dense: answers of the unmodified model on each document.
      plan: answers with the plan on the same documents.
    """
    by_depth = _split_by_depth(dense, plan)
    marks = mark_counted(dense)
    counts = any(any(document) for document in marks)
    if counts:
        dense, plan = keep_counted(dense, marks), keep_counted(plan, marks)
    changes = log_probability(plan) - log_probability(dense)
    low, high = bootstrap_interval(changes)
    return Retention(
        retention=float(np.exp(changes.mean())),
        interval=(1 + low, 1 + high) if len(changes) > 1 else None,
        score=score(plan),
        dense=score(dense),
        whole=float(np.mean([all(answer.right.all() for answer in document) for document in plan])),
        counts=counts,
        documents=len(changes),
        by_depth=by_depth,
    )


def mark_counted(dense: Sequence[Sequence[Answer]]) -> list[list[bool]]:
    """Mark the questions that count, from the answers of the unmodified model on each document."""
    quarters: dict[int | None, list[Answer]] = {}
    for answer in (answer for document in dense for answer in document):
        quarters.setdefault(_find_quarter(answer), []).append(answer)
    mastered = {quarter for quarter, answers in quarters.items() if score([answers]) >= LEAST_SCORE}
    return [[_find_quarter(answer) in mastered for answer in document] for document in dense]


def keep_counted(
    documents: Sequence[Sequence[Answer]], marks: Sequence[Sequence[bool]]
) -> list[list[Answer]]:
    """Return the marked answers of each document, without documents that have none."""
    marked = (
        [answer for answer, counts in zip(document, own, strict=True) if counts]
        for document, own in zip(documents, marks, strict=True)
    )
    return [document for document in marked if document]


def _find_quarter(answer: Answer) -> int | None:
    """Return the quarter of the context that an answer is about, or None for tasks without statements."""
    return None if answer.depth is None else min(int(answer.depth * QUARTERS), QUARTERS - 1)


def log_probability(documents: Sequence[Sequence[Answer]]) -> Float[np.ndarray, " documents"]:
    """Return the mean log-probability of the correct tokens of each document, float64."""
    tokens = ([answer.log_probability for answer in document] for document in documents)
    return np.array([np.concatenate(document).astype(np.float64).mean() for document in tokens])


def score(documents: Sequence[Sequence[Answer]]) -> float:
    """Return the share of all correct tokens that are the most likely."""
    return float(np.concatenate([answer.right for document in documents for answer in document]).mean())


def _split_by_depth(
    dense: Sequence[Sequence[Answer]], plan: Sequence[Sequence[Answer]]
) -> tuple[DepthRetention | None, ...] | None:
    quarters: list[list[tuple[Answer, Answer]]] = [[] for _ in range(QUARTERS)]
    for documents in zip(dense, plan, strict=True):
        for dense_answer, plan_answer in zip(*documents, strict=True):
            if (quarter := _find_quarter(dense_answer)) is None:
                return None
            quarters[quarter].append((dense_answer, plan_answer))
    return tuple(_compute_quarter(pairs) if pairs else None for pairs in quarters)


def _compute_quarter(pairs: list[tuple[Answer, Answer]]) -> DepthRetention:
    dense, plan = ([[answer] for answer in answers] for answers in zip(*pairs, strict=True))
    changes = log_probability(plan) - log_probability(dense)
    return DepthRetention(float(np.exp(changes.mean())), score(plan), score(dense), len(pairs))
