"""Scores of generated answers, and their retention under a plan."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from zdc_jax.evaluation.perplexity import bootstrap

LEAST_COUNTED = 20
"""Fewest counted samples of a task that counts. If none of 20 samples loses, at most one in seven does, with
95 % confidence."""


@dataclass(frozen=True)
class RulerScore:
    """Scores of one task with a plan and with the unmodified model.

    A sample counts if the unmodified model's score on it is above 0. Where that model is often wrong, any
    noise loses some of the counted samples and wins others: `retention` falls, although `ratio` does not.

    Attributes:
      score: mean score with the plan over all samples, 0 to 1.
      dense: mean score of the unmodified model over all samples.
      ratio: ratio of both mean scores; None if the unmodified model scores 0.
      ratio_interval: 95 % paired bootstrap interval of `ratio` over all samples; None unless the task counts.
      retention: ratio of both mean scores over the counted samples; None without any.
      interval: 95 % paired bootstrap interval of `retention` over counted samples; its first number is the
        lower bound. None for fewer than two samples.
      counts: whether at least `LEAST_COUNTED` samples count.
      samples: number of samples.
      counted: number of samples that count.
    """

    score: float
    dense: float
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    retention: float | None
    interval: tuple[float, float] | None
    counts: bool
    samples: int
    counted: int

    def is_precise(self, margin: float) -> bool:
        """Return whether `ratio_interval` extends at most `margin` below `ratio`."""
        if self.ratio is None or self.ratio_interval is None:
            return False
        return self.ratio - self.ratio_interval[0] <= margin


def score_answer(text: str, references: tuple[str, ...]) -> float:
    """Return the share of references that a text contains, in any case (RULER's `string_match_all`)."""
    text = text.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def compare_scores(dense: Float[np.ndarray, " samples"], plan: Float[np.ndarray, " samples"]) -> RulerScore:
    """Compare the scores of a plan with those of the unmodified model on the same samples.

    Args:
      dense: score of the unmodified model on each sample.
      plan: score with the plan on each sample.
    """
    counted = dense > 0
    kept, whole = plan[counted], dense[counted]
    return RulerScore(
        score=float(plan.mean()),
        dense=float(dense.mean()),
        ratio=float(plan.sum() / dense.sum()) if len(whole) else None,
        ratio_interval=_bootstrap_ratio(plan, dense) if len(whole) >= LEAST_COUNTED else None,
        retention=float(kept.sum() / whole.sum()) if len(whole) else None,
        interval=_bootstrap_ratio(kept, whole) if len(whole) > 1 else None,
        counts=len(whole) >= LEAST_COUNTED,
        samples=len(dense),
        counted=len(whole),
    )


def _bootstrap_ratio(kept: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the ratio of sums over resampled samples."""
    return bootstrap(len(whole), lambda picks: kept[picks].sum(1) / whole[picks].sum(1))
