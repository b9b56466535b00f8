"""Fit of the predictor of a plan's degradation to searches on several models (ZDC §5.2; its form is ours)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from convert.search.trials import Trial
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.files import whole_file
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.predictor import Features, Predictor, Weights, floor_nats, layer_nats
from zdc_jax.planning.profile import Profile

STEPS, LEARNING_RATE = 800, 0.03
NOISE = 2e-3
"""Degradation below which the fit makes no distinction, in nats per token."""
MARGIN_RANGE = (3e-3, 0.15)
"""Range of degradations from which the margin is computed, in nats per token."""
MARGIN_QUANTILE = 0.9
"""Share of plans of unseen models whose degradation the margin covers."""


@dataclass(frozen=True, eq=False)
class Observations:
    """Plans measured by the searches on one model, with the features that predict their degradation.

    Attributes:
      name: name of the model.
      rotary: whether the model has rotary embeddings.
      head_dim: head dimension.
      windows: windows of the profile, [W].
      ranks: ranks of the profile, [Q].
      write: `Profile.relative_write`, [L, W].
      far_nats: as in `Profile`, [L].
      score_error: as in `Profile`, [L, Q].
      value_error: as in `Profile`, [L, Q].
      plans: window and ranks ((R, Z), …) of each plan.
      nats: increase of the negative log-likelihood under each plan, nats per token.
    """

    name: str
    rotary: bool
    head_dim: int
    windows: np.ndarray
    ranks: np.ndarray
    write: np.ndarray
    far_nats: np.ndarray
    score_error: np.ndarray
    value_error: np.ndarray
    plans: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    nats: np.ndarray

    @classmethod
    def from_trials(cls, name: str, config: ModelConfig, profile: Profile, trials: Sequence[Trial]) -> Self:
        """Collect the trials of method `zdc` whose plans have a window and ranks of the profile."""
        levels = {0, *profile.ranks.tolist(), config.head_dim}

        def list_ranks(plan: CompressionPlan) -> tuple[tuple[int, int], ...]:
            return tuple((layer.qk, layer.v) for layer in plan.layers)

        def has_features(plan: CompressionPlan) -> bool:
            ranks = {rank for pair in list_ranks(plan) for rank in pair}
            return plan.window in profile.windows and ranks <= levels and plan.settings.search == "ranks"

        usable = [trial for trial in trials if has_features(trial.plan)]
        return cls(
            name,
            config.is_rotary,
            config.head_dim,
            profile.windows,
            profile.ranks,
            profile.relative_write(),
            profile.far_nats,
            profile.score_error,
            profile.value_error,
            tuple((trial.plan.window, list_ranks(trial.plan)) for trial in usable),
            np.log1p([trial.increase for trial in usable]),
        )

    def features(self) -> Features:
        """Return the features of all plans, arrays [P, L]."""
        ranks = np.array([plan for _, plan in self.plans])
        level = np.searchsorted([0, *self.ranks, self.head_dim], ranks)
        window = np.searchsorted(self.windows, [window for window, _ in self.plans])
        layers, ends = np.arange(ranks.shape[1]), np.ones((ranks.shape[1], 1))
        score, value = (np.hstack([ends, e, 0 * ends]) for e in (self.score_error, self.value_error))
        columns = (
            self.far_nats,
            self.write.T[window],
            score[layers, level[..., 0]],
            value[layers, level[..., 1]],
            np.float64(self.rotary),
        )
        return Features(*map(jnp.asarray, columns))

    def save(self, path: Path) -> None:
        """Write JSON; the file appears complete or not at all."""
        rounded = {
            name: value.round(7).tolist() if isinstance(value, np.ndarray) else value
            for name, value in asdict(self).items()
        }
        with whole_file(path) as file:
            file.write_text(json.dumps(rounded) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read observations that `save` wrote; raise `PlanError` for any other file."""
        try:
            value: dict[str, Any] = json.loads(path.read_text())
            plans = tuple((window, tuple(map(tuple, plan))) for window, plan in value.pop("plans"))
            value = {name: np.array(x) if isinstance(x, list) else x for name, x in value.items()}
            return cls(**value, plans=plans)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{path} is not a file of observations: {error!r}") from error


class _TrainingSet(NamedTuple):
    features: Features
    nats: Array


def fit(observations: Sequence[Observations]) -> Predictor:
    """Fit a predictor to several models of equal weight.

    Adam minimizes the Huber loss of log degradations. The margin comes from predicting each model with
    weights fitted to the others.

    Raises:
      PlanError: fewer than two models.
    """
    if len(observations) < 2:
        raise PlanError(f"a predictor needs observations of at least two models, got {len(observations)}")
    sets = [_TrainingSet(each.features(), jnp.asarray(each.nats)) for each in observations]
    weights = _fit_weights(sets)
    ratios = []
    for index, left_out in enumerate(sets):
        predicted = predict_nats(_fit_weights(sets[:index] + sets[index + 1 :]), left_out.features)
        in_range = (left_out.nats > MARGIN_RANGE[0]) & (left_out.nats < MARGIN_RANGE[1])
        ratios.append(np.asarray(left_out.nats / predicted)[np.asarray(in_range)])
    margin = max(1.0, float(np.quantile(np.concatenate(ratios), MARGIN_QUANTILE)))
    return Predictor(weights, margin, tuple(each.name for each in observations))


def predict_nats(weights: Weights, features: Features) -> Array:
    """Predict the degradation of plans in nats per token, [P]: a floor plus the sum over layers."""
    return floor_nats(weights, features.rotary) + layer_nats(weights, features).sum(-1)


def _compute_loss(weights: Weights, sets: Sequence[_TrainingSet]) -> Array:
    def log_nats(nats: Array) -> Array:
        return jnp.log(jnp.maximum(nats, 0) + NOISE)

    errors = [
        optax.huber_loss(log_nats(predict_nats(weights, each.features)), log_nats(each.nats)).mean()
        for each in sets
    ]
    decay = sum(jnp.square(x).sum() for x in weights)
    return jnp.stack(errors).mean() + 1e-4 * decay


@jax.jit
def _fit_weights(sets: Sequence[_TrainingSet]) -> Weights:
    two, half = jnp.zeros(2), jnp.array(0.5)
    start = Weights(
        cut=two,
        nats=half,
        window=half,
        qk=two - 1.0,
        qk_power=half,
        v=two - 1.0,
        v_power=half,
        floor=jnp.array([-6.0, -2.0]),
    )
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: Any, _: None) -> tuple[Any, None]:
        weights, moments = state
        updates, moments = optimizer.update(jax.grad(_compute_loss)(weights, sets), moments)
        return (optax.apply_updates(weights, updates), moments), None

    (weights, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return weights
