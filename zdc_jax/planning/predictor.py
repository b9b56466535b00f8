"""Plans without a search: perplexity predicted from calibration, by a regression over models (ZDC §5.2).

The paper's regression goes from model and limit to ratios. Ours goes from what calibration has seen of a
layer (`Profile`) and what it keeps to its share of the degradation, and is turned around by taking the
cheapest plan predicted to be within the limit: so it serves any number of layers and heads, and any limit.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import LayerCosts, Precision
from zdc_jax.planning.profile import SINKS, Profile

TINY_NATS = 2e-4
"""Below this, costs of single layers are noise."""


class Weights(NamedTuple):
    """Of the regression; pairs are a constant and what is added to it for rotary models.

    A layer that is cut off costs, in nats a token, exp(cut) times powers of what it cost alone (`nats`, not
    taken below `TINY_NATS`) and of how much more its distant tokens write with another window than the
    measured one (`window`). A layer that keeps some coordinates costs, of that, exp(qk) · score_error **
    exp(qk_power) for Q/K, and likewise for V. exp(floor) is what the basis itself costs in 16 bits.
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
    """Of layers with plans; all broadcast against each other.

    far_nats of the `Profile`; window: its `relative_write` at the plan's window; score, value: its errors at
    the plan's ranks (1: cut off, 0: all coordinates kept). rotary: 0 or 1.
    """

    far_nats: Array
    window: Array
    score: Array
    value: Array
    rotary: Array


def layer_nats(weights: Weights, features: Features) -> Array:
    """Predicted increase of the mean negative log likelihood that each layer causes, nats a token."""
    far_nats, window, score, value, rotary = features

    def at(pair):
        return pair[0] + pair[1] * rotary

    def log(x, least=1e-06):
        return jnp.log(jnp.maximum(x, least))

    def part(error, pair, power):
        return jnp.where(error > 0, jnp.exp(at(pair) + jnp.exp(power) * log(error)), 0.0)

    kept = part(score, weights.qk, weights.qk_power) + part(value, weights.v, weights.v_power)
    whole = jnp.exp(at(weights.cut) + weights.nats * log(far_nats, TINY_NATS) + weights.window * log(window))
    return whole * jnp.where((score >= 1) & (value >= 1), 1.0, kept)


def floor_nats(weights: Weights, rotary: Array) -> Array:
    """Predicted cost of the basis at full rank, nats a token."""
    return jnp.exp(weights.floor[0] + weights.floor[1] * rotary)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A fitted regression. `margin` ≥ 1 is the factor by which unchecked predictions are taken too low;
    `models` names what it learned from."""

    weights: Weights
    margin: float
    models: tuple[str, ...]

    @classmethod
    def stored(cls) -> Self:
        """The one that ships with the package."""
        return cls.from_json(_stored_text())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`; raises `PlanError` where the text is no predictor."""
        try:
            value = json.loads(text)
            weights = Weights(**{name: jnp.array(x) for name, x in value.pop("weights").items()})
            return cls(weights, value["margin"], tuple(value["models"]))
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"not a predictor: {error!r}") from error

    def to_json(self) -> str:
        """Readable JSON."""
        weights = {
            name: np.asarray(x, np.float64).round(4).tolist() for name, x in self.weights._asdict().items()
        }
        value = {"models": self.models, "margin": round(self.margin, 4), "weights": weights}
        return json.dumps(value, indent=1) + "\n"

    def layer_costs(self, profile: Profile, window: int, head_dim: int, *, rotary: bool) -> LayerCosts:
        """Predicted costs of single layers at the index `window` of the profile's windows."""
        layers = profile.far_nats, profile.relative_write()[:, window]
        whole = np.zeros((len(profile.far_nats), 1))
        score, value = (np.hstack([e, whole]) for e in (profile.score_error, profile.value_error))

        def nats(score: np.ndarray, value: np.ndarray) -> np.ndarray:
            columns = (*(x[:, None] for x in layers), score, value, float(rotary))
            features = Features(*map(jnp.asarray, columns))
            return np.asarray(layer_nats(self.weights, features), np.float64)

        none, one = np.zeros_like(score), whole + 1
        levels = tuple(map(Precision, (*profile.ranks.tolist(), head_dim)))
        cut = nats(one, one)[:, 0]
        return LayerCosts(levels, levels, nats(score, none), nats(none, value), cut).monotone()

    def forecast(self, config: ModelConfig, profile: Profile) -> Forecast:
        """Of plans with ranks, for each of the profile's windows."""
        rotary = config.is_rotary
        costs = {
            window: self.layer_costs(profile, index, config.head_dim, rotary=rotary)
            for index, window in enumerate(profile.windows.tolist())
        }

        def named(plan):
            return plan.for_model(profile.fingerprint)

        def near(window):
            return {"window": window, "sinks": SINKS}

        def make(ranks, window):
            return named(CompressionPlan.of_layers(config, ranks, **near(window)))

        floor = float(floor_nats(self.weights, jnp.array(float(rotary))))
        return Forecast(named(CompressionPlan.full(config)), floor, costs, make)

    def plan(
        self, config: ModelConfig, profile: Profile, *, max_degradation: float, context: int
    ) -> CompressionPlan:
        """The plan of fewest bytes at `context` tokens predicted to raise perplexity by no more, with margin.

        All coordinates are kept where nothing less is predicted to hold the limit.

        Raises:
          PlanError: a limit of 0 or below.
        """
        check_limit(max_degradation)
        forecast = self.forecast(config, profile)
        allowed = np.log1p(max_degradation / self.margin)
        held = [draft for draft in forecast.paths() if forecast.nats(draft).sum() <= allowed]
        least = min([forecast.nothing, *held], key=lambda draft: forecast.bytes(draft, context))
        return forecast.plan(least)


def check_limit(max_degradation: float) -> None:
    """Raises `PlanError` for a limit of 0 or below."""
    if not max_degradation > 0:
        raise PlanError(f"max_degradation={max_degradation} must be > 0 (0.02 means 2 %)")


@cache
def _stored_text() -> str:
    return (resources.files("zdc_jax.planning") / "predictor.json").read_text()
