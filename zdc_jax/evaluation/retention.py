"""What a plan retains of a task: how likely right answers stay, beside the unmodified model's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from zdc_jax.evaluation.answers import Answer
from zdc_jax.evaluation.perplexity import bootstrap_interval

LEAST_SCORE = 0.5
"""A task counts where the unmodified model's score is no less: what it cannot do cannot be retained."""
HALF_WIDTH = 0.02
"""Enough sheets are read once each interval of retention reaches no further than this."""
QUARTERS = 4


@dataclass(frozen=True)
class DepthRetention:
    """Retention and scores of the questions about one quarter of the contexts."""

    retention: float
    score: float
    dense: float
    questions: int


@dataclass(frozen=True)
class Retention:
    """What a plan retains of one task.

    retention: exp of the mean over sheets of how the mean log-probability of a right token changes; 1 where
    nothing is lost. interval: its 95 % paired bootstrap interval over sheets; None for one sheet. score,
    dense: share of the right tokens that are the most likely, with the plan and without. whole: share of
    sheets with all tokens right. counts: whether `dense` is at least `LEAST_SCORE`. by_depth: by quarter of
    the context, from its beginning, in which what is asked for stands; None for an empty quarter, and for
    tasks that ask for nothing said.
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
    def known(self) -> bool:
        """Whether the interval is within `HALF_WIDTH` of the retention."""
        if self.interval is None:
            return False
        return max(self.interval[1] - self.retention, self.retention - self.interval[0]) <= HALF_WIDTH


def retention(dense: Sequence[Sequence[Answer]], plan: Sequence[Sequence[Answer]]) -> Retention:
    """Retention of one task from the answers on each sheet, without the plan and with it."""
    changes = log_probability(plan) - log_probability(dense)
    dense_score = score(dense)
    low, high = bootstrap_interval(changes)
    return Retention(
        retention=float(np.exp(changes.mean())),
        interval=(1 + low, 1 + high) if len(changes) > 1 else None,
        score=score(plan),
        dense=dense_score,
        whole=float(np.mean([_right(document).all() for document in plan])),
        counts=dense_score >= LEAST_SCORE,
        documents=len(changes),
        by_depth=_by_depth(dense, plan),
    )


def log_probability(documents: Sequence[Sequence[Answer]]) -> Float[np.ndarray, " sheets"]:
    """Mean log-probability of the right tokens of each sheet, float64."""
    tokens = ([answer.log_probability for answer in document] for document in documents)
    return np.array([np.concatenate(document).astype(np.float64).mean() for document in tokens])


def _right(answers: Sequence[Answer]) -> np.ndarray:
    return np.concatenate([answer.right for answer in answers])


def score(documents: Sequence[Sequence[Answer]]) -> float:
    """Share of all right tokens that are the most likely."""
    return float(np.concatenate([_right(document) for document in documents]).mean())


def _by_depth(
    dense: Sequence[Sequence[Answer]], plan: Sequence[Sequence[Answer]]
) -> tuple[DepthRetention | None, ...] | None:
    quarters: list[list[tuple[Answer, Answer]]] = [[] for _ in range(QUARTERS)]
    for pair in (
        (a, b) for documents in zip(dense, plan, strict=True) for a, b in zip(*documents, strict=True)
    ):
        if (depth := pair[0].depth) is None:
            return None
        quarters[min(int(depth * QUARTERS), QUARTERS - 1)].append(pair)
    return tuple(_of_quarter(pairs) if pairs else None for pairs in quarters)


def _of_quarter(pairs: list[tuple[Answer, Answer]]) -> DepthRetention:
    dense, plan = ([[answer] for answer in answers] for answers in zip(*pairs, strict=True))
    changes = log_probability(plan) - log_probability(dense)
    return DepthRetention(float(np.exp(changes.mean())), score(plan), score(dense), len(pairs))
