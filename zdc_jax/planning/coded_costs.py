"""Costs of method `coded` in single layers, predicted from the calibration.

The calibration measures the cost of a layer without older tokens (far tokens). The predicted cost of a
precision is a share of that cost: for keys, by the error of the scores at the precision; for values, by the
error of their bits. Not part of the ZDC paper.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import Float

from zdc_jax.basis import Basis
from zdc_jax.cache.codes.gaussian import gaussian_distortion
from zdc_jax.config import ModelConfig
from zdc_jax.methods.coded import INDEX_STEP, Settings
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import CODED_NEAR, LayerCosts, Precision, nearest_rank
from zdc_jax.planning.profile import SINKS, Profile

KEY_PRECISIONS = (
    (1, 2, 0),
    (3 / 4, 2, 4),
    (3 / 4, 2, 5),
    (1, 2, 4),
    (1, 2, 5),
    (1, 2, 6),
    (1, 3, 5),
    (1, 3, 6),
    (1, 4, 6),
    (1, 6, 8),
    (1, 8, 0),
)
"""Precisions of keys: stored share of the head dim, bits, and bits of the index (0: no index). Of all
precisions of similar size, these have the least error on a real model (`expected_error`). With fewer
coordinates, models retrieve almost nothing."""
VALUE_BITS = (2, 3, 4, 8)
"""Bits of values. All coordinates are stored."""
PREDICTED_KEYS, PREDICTED_VALUES = 0.15, 0.03
"""Costs of two-bit keys and of two-bit values, as shares of the cost of a layer without older tokens.
On single layers of a real model (docs/coding.md), keys cost 0.12 to 0.21 and most values nothing."""
INDEX_SHARE = 1 / 4
"""Width of the index, as a share of the head dim."""


def coded_levels(head_dim: int) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
    """Return the precisions of keys and of values, by increasing size."""
    index = max(1, round(INDEX_SHARE * head_dim / INDEX_STEP)) * INDEX_STEP
    keys = {
        Precision(nearest_rank(head_dim, share), bits, *((index, bits_index) if bits_index else ()))
        for share, bits, bits_index in KEY_PRECISIONS
    }
    values = tuple(Precision(head_dim, bits) for bits in VALUE_BITS)
    return tuple(sorted(keys, key=lambda precision: (precision.size, precision.bits))), values


def expected_error(
    precision: Precision, coded: Float[np.ndarray, "K H"], by: Float[np.ndarray, "K H"]
) -> float:
    """Return the expected squared error of inner products of quantized vectors with exact vectors.

    The rotations distribute the error of the index, and that of the other stored coordinates, evenly over
    their coordinates. The coordinates that are not stored are lost completely.

    Args:
      precision: precision of the quantized vectors.
      coded: mean squares of the coordinates of the quantized vectors.
      by: mean squares of the coordinates of the exact vectors.
    """
    ends = {0, precision.index, precision.rank}
    parts = [slice(*pair) for pair in itertools.pairwise(sorted(ends))]
    bits = (precision.bits_index, precision.bits) if precision.index else (precision.bits,)
    errors = (
        gaussian_distortion(part_bits) * coded[:, part].mean(-1) * by[:, part].sum(-1)
        for part_bits, part in zip(bits, parts, strict=True)
    )
    dropped = (coded[:, precision.rank :] * by[:, precision.rank :]).sum(-1)
    return float(sum(errors, start=dropped).sum())


def key_shares(
    basis: Basis, layer: int, levels: Sequence[Precision], unit: Precision | None = None
) -> Float[np.ndarray, " levels"]:
    """Return the predicted costs of the keys of a layer at each precision, relative to those at `unit`.

    The costs are proportional to the expected errors of the scores, and the last one is 0. `unit` is one of
    the levels, by default the first.
    """
    equal = np.ones(basis.k_map[layer].shape[:2])  # For a basis of an older release, without rms.

    def mean_squares(rms: np.ndarray | None) -> np.ndarray:
        return equal if rms is None else np.square(rms[layer])

    k, q = mean_squares(basis.k_rms), mean_squares(basis.q_rms)
    errors = [expected_error(precision, k, q) for precision in levels]
    return _normalize(errors, 0 if unit is None else levels.index(unit))


def predict_costs(basis: Basis, far_nats: Float[np.ndarray, " L"], head_dim: int) -> LayerCosts:
    """Predict the costs of single layers.

    Args:
      basis: calibrated basis.
      far_nats: cost of each layer without older tokens, in any unit. The result has the same unit.
      head_dim: width of a head.
    """
    keys, values = coded_levels(head_dim)
    far = np.maximum(far_nats, 0)
    key_costs = np.array([nats * key_shares(basis, layer, keys) for layer, nats in enumerate(far)])
    value_shares = _normalize([gaussian_distortion(precision.bits) for precision in values])
    return LayerCosts(
        keys=keys,
        values=values,
        qk=PREDICTED_KEYS * key_costs,
        v=PREDICTED_VALUES * np.outer(far, value_shares),
        cut=far,
    ).monotone()


def coded_plan(config: ModelConfig, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
    """Return a plan of method `coded` that reads all older tokens and stores recent tokens in eight bits."""
    settings = Settings(index=0, read=0, bits_near=CODED_NEAR)
    return CompressionPlan.of_layers(
        config, ranks, window=window, sinks=SINKS, method="coded", settings=settings
    )


def coded_forecast(config: ModelConfig, profile: Profile, basis: Basis) -> Forecast:
    """Return the forecast of plans of method `coded`, for each window of the profile.

    The cost of a layer without older tokens was measured for one window. For other windows it is scaled by
    `Profile.relative_write`.
    """
    relative_write = profile.relative_write()
    costs = {
        window: predict_costs(basis, profile.far_nats * relative_write[:, index], config.head_dim)
        for index, window in enumerate(profile.windows.tolist())
    }
    return Forecast(
        full=CompressionPlan.full(config).for_model(profile.fingerprint),
        floor=0.0,
        costs=costs,
        make=partial(coded_plan, config),
    )


def _normalize(errors: Sequence[float], unit: int = 0) -> Float[np.ndarray, " levels"]:
    """Shift and scale errors so that the one at index `unit` is 1 and the last is 0."""
    return (np.array(errors) - errors[-1]) / (errors[unit] - errors[-1])
