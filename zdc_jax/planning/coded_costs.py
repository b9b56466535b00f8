"""What codes of a layer's far tokens cost, foretold from calibration: grades of method `coded` (ours).

A *grade* is so many coordinates at so many bits. Calibration tells what a layer costs without far tokens. Of
that, keys cost a share that goes by the error of scores at their grade, and values by that of their bits.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from zdc_jax.basis import Basis
from zdc_jax.cache.gaussian_codes import gaussian_distortion
from zdc_jax.config import ModelConfig
from zdc_jax.methods.coded import INDEX_STEP, Settings
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks
from zdc_jax.planning.forecast import Forecast
from zdc_jax.planning.layer_costs import CODED_NEAR, LayerCosts, Precision
from zdc_jax.planning.profile import SINKS, Profile

KEY_PRECISIONS = (
    (1, 2, 0),
    (3 / 4, 2, 4),
    (3 / 4, 2, 5),
    (1, 2, 5),
    (1, 2, 6),
    (1, 3, 5),
    (1, 3, 6),
    (1, 4, 6),
    (1, 6, 8),
    (1, 8, 0),
)
"""Share of the head dim that is kept of keys, its bits, and those of its index; 0: there is none. Of their
sizes these err least on a real model (`expected_error`); fewer coordinates retrieve next to nothing."""
VALUE_BITS = (2, 3, 4, 8)
PREDICTED_KEYS, PREDICTED_VALUES = 0.15, 0.03
"""Of what a layer costs without far tokens: what its keys, or values, cost in two bits. From single layers of
a real model (docs/coding.md), where keys stand from 0.12 to 0.21 and most values at nothing."""
INDEX_SHARE = 1 / 4
"""Of the head dim."""


def coded_levels(head_dim: int) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
    """Grades of keys and of values by rising size."""
    index = max(1, round(INDEX_SHARE * head_dim / INDEX_STEP)) * INDEX_STEP
    allowed = np.array(allowed_ranks(head_dim)[1:])

    def nearest(share):
        return int(allowed[np.abs(allowed - share * head_dim).argmin()])

    keys = {
        Precision(nearest(share), bits, *((index, first) if first else ()))
        for share, bits, first in KEY_PRECISIONS
    }
    return tuple(sorted(keys, key=lambda precision: (precision.size, precision.bits))), tuple(
        Precision(head_dim, b) for b in VALUE_BITS
    )


def expected_error(
    precision: Precision, coded: Float[np.ndarray, "K H"], by: Float[np.ndarray, "K H"]
) -> float:
    """Expected square error of products with vectors at a grade, where the other side is not coded.

    Turns spread what an index, or the rest, errs alike over its coordinates; of those that are dropped all is
    lost. coded, by: mean squares of the coordinates of both sides.
    """
    ends = {0, precision.index, precision.rank}
    parts = [slice(*pair) for pair in itertools.pairwise(sorted(ends))]
    bits = (precision.bits_index, precision.bits) if precision.index else (precision.bits,)
    errors = (
        gaussian_distortion(b) * coded[:, part].mean(-1) * by[:, part].sum(-1)
        for b, part in zip(bits, parts, strict=True)
    )
    dropped = (coded[:, precision.rank :] * by[:, precision.rank :]).sum(-1)
    return float(sum(errors, start=dropped).sum())


def key_shares(basis: Basis, layer: int, levels: Sequence[Precision]) -> Float[np.ndarray, " levels"]:
    """What keys of a layer cost at their grades, as shares of the first's: as scores err."""
    alike = np.ones(basis.k_map[layer].shape[:2])  # An old basis does not tell.

    def squares(rms):
        return alike if rms is None else np.square(rms[layer])

    k, q = squares(basis.k_rms), squares(basis.q_rms)
    return _of_the_first([expected_error(precision, k, q) for precision in levels])


def predict_costs(basis: Basis, far_nats: Float[np.ndarray, " L"], head_dim: int) -> LayerCosts:
    """Of single layers that cost `far_nats` without far tokens, in the same unit."""
    keys, values = coded_levels(head_dim)
    far = np.maximum(far_nats, 0)
    of_keys = np.array([nats * key_shares(basis, layer, keys) for layer, nats in enumerate(far)])
    of_values = np.outer(far, _of_the_first([gaussian_distortion(precision.bits) for precision in values]))
    parts = PREDICTED_KEYS * of_keys, PREDICTED_VALUES * of_values
    return LayerCosts(keys, values, *parts, far).monotone()


def coded_plan(config: ModelConfig, ranks: Sequence[LayerRanks], window: int) -> CompressionPlan:
    """The plan whose layers keep so much; far tokens are all read, near ones have eight bits."""
    settings = Settings(index=0, read=0, bits_near=CODED_NEAR)
    near = {"window": window, "sinks": SINKS}
    return CompressionPlan.of_layers(config, ranks, **near, method="coded", settings=settings)


def coded_forecast(config: ModelConfig, profile: Profile, basis: Basis) -> Forecast:
    """Of plans of method `coded`, for each of the profile's windows.

    A layer that sees no far tokens costs with another window than the measured one as much more as it then
    writes more.
    """
    written = profile.relative_write()
    costs = {
        window: predict_costs(basis, profile.far_nats * written[:, index], config.head_dim)
        for index, window in enumerate(profile.windows.tolist())
    }

    def named(plan):
        return plan.for_model(profile.fingerprint)

    def make(ranks, window):
        return named(coded_plan(config, ranks, window))

    return Forecast(named(CompressionPlan.full(config)), 0.0, costs, make)


def _of_the_first(errors: Sequence[float]) -> Float[np.ndarray, " levels"]:
    """Shares of the first error, with the last taken off."""
    return (np.array(errors) - errors[-1]) / (errors[0] - errors[-1])
