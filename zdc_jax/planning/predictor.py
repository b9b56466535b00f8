"""Predicting the perplexity of plans from the calibration, by a regression over models (after ZDC §5.2).

The regression of the paper maps a model and a limit to ratios. The regression here maps the calibrated
profile of a layer (`Profile`) and its ranks to its share of the degradation. A plan for a limit is the
smallest plan whose predicted degradation is within the limit. This works for any number of layers and heads,
and any limit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from numbers import Real
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import LayerCosts, Precision
from zdc_jax.planning.profile import SINKS, Profile

TINY_NATS = 2e-4
"""Costs of single layers below this number are noise."""


class Weights(NamedTuple):
    """Weights of the regression. A weight of shape [2] is a constant and an addition for rotary models.

    The cost of a layer without older tokens, in nats per token, is

        exp(cut) · max(far_nats, TINY_NATS)^nats · relative_write^window

    A layer that stores some coordinates costs a share of that:

        exp(qk) · score_error^exp(qk_power) + exp(v) · value_error^exp(v_power)

    Attributes:
      cut: logarithm of a factor, [2].
      nats: exponent of `Profile.far_nats`.
      window: exponent of `Profile.relative_write`.
      qk: logarithm of a factor on the error of the scores, [2].
      qk_power: logarithm of the exponent of that error.
      v: logarithm of a factor on the error of the values, [2].
      v_power: logarithm of the exponent of that error.
      floor: logarithm of the cost of a basis in 16 bits at full rank, [2].
    """

    cut: Float[Array, "2"]
    nats: Float[Array, ""]
    window: Float[Array, ""]
    qk: Float[Array, "2"]
    qk_power: Float[Array, ""]
    v: Float[Array, "2"]
    v_power: Float[Array, ""]
    floor: Float[Array, "2"]


class Features(NamedTuple):
    """Features of layers under plans. All arrays broadcast against each other.

    Attributes:
      far_nats: `Profile.far_nats`.
      window: `Profile.relative_write` at the window of the plan.
      score: `Profile.score_error` at the rank of q and k; 1: no older tokens, 0: all coordinates.
      value: `Profile.value_error` at the rank of v, likewise.
      rotary: 1 for rotary models, 0 for others.
    """

    far_nats: Array
    window: Array
    score: Array
    value: Array
    rotary: Array


def layer_nats(weights: Weights, features: Features) -> Array:
    """Return the predicted cost of each layer in nats per token.

    The cost is the increase of the mean negative log-likelihood.
    """
    far_nats, window, score, value, rotary = features

    def select(pair: Array) -> Array:
        return pair[0] + pair[1] * rotary

    def safe_log(x: Array, least: float = 1e-06) -> Array:
        return jnp.log(jnp.maximum(x, least))

    def compute_share(error: Array, factor: Array, power: Array) -> Array:
        return jnp.where(error > 0, jnp.exp(select(factor) + jnp.exp(power) * safe_log(error)), 0.0)

    share = compute_share(score, weights.qk, weights.qk_power) + compute_share(
        value, weights.v, weights.v_power
    )
    cut = jnp.exp(
        select(weights.cut) + weights.nats * safe_log(far_nats, TINY_NATS) + weights.window * safe_log(window)
    )
    return cut * jnp.where((score >= 1) & (value >= 1), 1.0, share)


def floor_nats(weights: Weights, rotary: Array) -> Array:
    """Return the predicted cost of the basis at full rank, in nats per token."""
    return jnp.exp(weights.floor[0] + weights.floor[1] * rotary)


@dataclass(frozen=True, eq=False)
class Predictor:
    """Fitted regression.

    Attributes:
      weights: weights of the regression.
      margin: safety factor for predictions that are not checked on text, at least 1.
      models: names of the models of the fit.
    """

    weights: Weights
    margin: float
    models: tuple[str, ...]

    @classmethod
    def stored(cls) -> Self:
        """Load the predictor that is part of the package."""
        return cls.from_json((resources.files("zdc_jax.planning") / "predictor.json").read_text())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a predictor from the output of `to_json`; raise `PlanError` for any other text."""
        try:
            value = json.loads(text)
            weights = Weights(**{name: jnp.array(x) for name, x in value.pop("weights").items()})
            return cls(weights, value["margin"], tuple(value["models"]))
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"not a predictor: {error!r}") from error

    def to_json(self) -> str:
        """Return the predictor as JSON text."""
        weights = {
            name: np.asarray(x, np.float64).round(4).tolist() for name, x in self.weights._asdict().items()
        }
        value = {"models": self.models, "margin": round(self.margin, 4), "weights": weights}
        return json.dumps(value, indent=1) + "\n"

    def layer_costs(self, profile: Profile, window: int, head_dim: int, *, rotary: bool) -> LayerCosts:
        """Predict the costs of single layers.

        Args:
          profile: profile of the model.
          window: index into `profile.windows`.
          head_dim: width of a head.
          rotary: whether the model has a rotary embedding.
        """
        full_rank = np.zeros((len(profile.far_nats), 1))
        score = np.hstack([profile.score_error, full_rank])
        value = np.hstack([profile.value_error, full_rank])

        def predict_nats(score: np.ndarray, value: np.ndarray) -> np.ndarray:
            features = Features(
                far_nats=jnp.asarray(profile.far_nats[:, None]),
                window=jnp.asarray(profile.relative_write()[:, window, None]),
                score=jnp.asarray(score),
                value=jnp.asarray(value),
                rotary=jnp.asarray(float(rotary)),
            )
            return np.asarray(layer_nats(self.weights, features), np.float64)

        exact, cut = np.zeros_like(score), np.ones_like(full_rank)
        levels = tuple(map(Precision, (*profile.ranks.tolist(), head_dim)))
        return LayerCosts(
            keys=levels,
            values=levels,
            qk=predict_nats(score, exact),
            v=predict_nats(exact, value),
            cut=predict_nats(cut, cut)[:, 0],
        ).monotone()

    def forecast(self, config: ModelConfig, profile: Profile) -> Forecast:
        """Return the forecast of plans of method `zdc`, for each window of the profile."""
        rotary = config.is_rotary
        costs = {
            window: self.layer_costs(profile, index, config.head_dim, rotary=rotary)
            for index, window in enumerate(profile.windows.tolist())
        }

        def make_plan(ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
            return CompressionPlan.of_layers(config, ranks, window=window, sinks=SINKS)

        return Forecast(
            full=CompressionPlan.full(config).for_model(profile.fingerprint),
            floor=float(floor_nats(self.weights, jnp.array(float(rotary)))),
            costs=costs,
            make=make_plan,
        )

    def plan(
        self, config: ModelConfig, profile: Profile, *, max_degradation: float, context: int
    ) -> CompressionPlan:
        """Return the smallest plan whose predicted degradation, with the margin, is within a limit.

        If there is none, the plan stores all coordinates.

        Args:
          config: architecture of the model.
          profile: profile of the model.
          max_degradation: limit on the relative increase of the perplexity; 0.02 means 2 %.
          context: context length for the cache size, in tokens.

        Raises:
          PlanError: `max_degradation` is not between 0 and 1.
        """
        check_limit(max_degradation)
        forecast = self.forecast(config, profile)
        allowed = np.log1p(max_degradation / self.margin)
        within = [draft for draft in forecast.paths() if forecast.nats(draft).sum() <= allowed]
        smallest = min([forecast.full_draft, *within], key=lambda draft: forecast.bytes(draft, context))
        return forecast.plan(smallest)


def check_limit(max_degradation: float) -> None:
    """Raise `PlanError` unless `max_degradation` is a number between 0 and 1."""
    if not (isinstance(max_degradation, Real) and 0 < max_degradation < 1):
        raise PlanError(f"{max_degradation=} must lie strictly between 0 and 1 (0.02 means 2 %)")
