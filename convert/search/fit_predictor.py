"""Fits the predictor of plans to what searches measured on several models (ZDC §5.2; form of it ours)."""

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
from zdc_jax.planning.predictor import Features, Predictor, Weights, floor_nats, layer_nats
from zdc_jax.planning.profile import Profile

STEPS, LEARNING_RATE = 800, 0.03
NOISE = 2e-3
"""Nats a token below which degradations are not told apart."""
COUNTED = (3e-3, 0.15)
"""Degradations, nats a token, from which the margin is taken."""
MARGIN_QUANTILE = 0.9
"""Share of the plans of other models whose degradation the margin covers."""


@dataclass(frozen=True, eq=False)
class Observations:
    """What one model's searches measured, with its features.

    windows [W], ranks [Q], far_nats [L], score_error and value_error [L, Q] as in `Profile`; write [L, W] is
    its `relative_write`. plans: (window, ((R, Z), …)) without token classes; nats: increase of their mean
    negative log likelihood.
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
    def of(cls, name: str, config: ModelConfig, profile: Profile, trials: Sequence[Trial]) -> Self:
        """Of those trials whose plans have a window and ranks of the profile, and no token classes."""
        levels = {0, *profile.ranks.tolist(), config.head_dim}

        def ranks(plan):
            return tuple((layer.qk, layer.v) for layer in plan.layers)

        def known(plan):
            return plan.window in profile.windows and levels.issuperset(sum(ranks(plan), ()))

        kept = [t for t in trials if known(t.plan) and t.plan.classes is None]
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
            tuple((trial.plan.window, ranks(trial.plan)) for trial in kept),
            np.log1p([trial.increase for trial in kept]),
        )

    def features(self) -> Features:
        """Of all plans: arrays [P, L]."""
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
        """Writes JSON, whole or not at all."""
        rounded = {
            name: value.round(7).tolist() if isinstance(value, np.ndarray) else value
            for name, value in asdict(self).items()
        }
        with whole_file(path) as file:
            file.write_text(json.dumps(rounded) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote; raises `PlanError` where it is something else."""
        try:
            value: dict[str, Any] = json.loads(path.read_text())
            plans = tuple((window, tuple(map(tuple, plan))) for window, plan in value.pop("plans"))
            value = {name: np.array(x) if isinstance(x, list) else x for name, x in value.items()}
            return cls(**value, plans=plans)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{path} holds no observations of plans: {error!r}") from error


class _Set(NamedTuple):
    features: Features
    nats: Array


def fit(observations: Sequence[Observations]) -> Predictor:
    """The predictor that fits all models best, each counting alike.

    Adam on the Huber loss of log degradations. The margin is that of each model under the others' fit.

    Raises:
      PlanError: fewer than two models.
    """
    if len(observations) < 2:
        raise PlanError(f"a predictor needs observations of at least two models, got {len(observations)}")
    sets = [_Set(each.features(), jnp.asarray(each.nats)) for each in observations]
    weights = _fit_weights(sets)
    ratios = []
    for index, left_out in enumerate(sets):
        predicted = predicted_nats(_fit_weights(sets[:index] + sets[index + 1 :]), left_out.features)
        counted = (left_out.nats > COUNTED[0]) & (left_out.nats < COUNTED[1])
        ratios.append(np.asarray(left_out.nats / predicted)[np.asarray(counted)])
    margin = max(1.0, float(np.quantile(np.concatenate(ratios), MARGIN_QUANTILE)))
    return Predictor(weights, margin, tuple(each.name for each in observations))


def predicted_nats(weights: Weights, features: Features) -> Array:
    """Predicted degradation of plans, nats a token [P]: the floor and the layers' shares."""
    return floor_nats(weights, features.rotary) + layer_nats(weights, features).sum(-1)


def _loss(weights: Weights, sets: Sequence[_Set]) -> Array:
    def log(nats):
        return jnp.log(jnp.maximum(nats, 0) + NOISE)

    errors = [optax.huber_loss(log(predicted_nats(weights, s.features)), log(s.nats)).mean() for s in sets]
    decay = sum(jnp.square(x).sum() for x in weights)
    return jnp.stack(errors).mean() + 1e-4 * decay


@jax.jit
def _fit_weights(sets: Sequence[_Set]) -> Weights:
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
        updates, moments = optimizer.update(jax.grad(_loss)(weights, sets), moments)
        return (optax.apply_updates(weights, updates), moments), None

    (weights, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return weights
