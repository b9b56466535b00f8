"""Payload of the exchange: as computed, or 8-bit floating point with scales from calibration (ours).

e4m3 rounds to 3 bits of mantissa, 2^-4 of a number, over a range of 2^15: what matters about a scale is that
nothing overflows. So it is known before a prompt is seen, and no maximum has to be found, nor agreed on. What
it rounds off large scores is what costs, and in a calibrated basis these are made of the first coordinates:
those stay as they are.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import AnyArray, Array
from zdc_jax.basis import Basis
from zdc_jax.errors import CalibrationError
from zdc_jax.model.attention import Attention

Payload = Literal["native", "float8"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)
"""`native`: numbers travel in the dtype that they have. `float8`: q, k, v and o travel as e4m3 but for their
first `EXACT` coordinates; these, halo, sinks and log-sum-exp travel as they are."""
EXACT = 2
"""Coordinates of each head that are not rounded."""
_FLOAT8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_FLOAT8).max)
HEADROOM = 64
"""What is not clipped, in root mean squares: one token of each window of 4096 tokens can reach √4096 at most.
Numbers keep their full precision down to 1/448 to 1/224 of a root mean square."""


class Scales(NamedTuple):
    """What q, k [K, R] and v [K, Z] of one layer are divided by before the cast; o has v's.

    An output is a convex combination of values, so it is within their range. Powers of two, so that scaling
    rounds nothing.
    """

    q: Float[Array, "K R"]
    k: Float[Array, "K R"]
    v: Float[Array, "K Z"]

    @classmethod
    def of(cls, attention: Attention, R: int, Z: int) -> "Scales | None":
        """Those of the first coordinates; None where the layer has none."""
        if attention.q_scale is None or attention.k_scale is None or attention.v_scale is None:
            return None
        scales = attention.q_scale[...], attention.k_scale[...], attention.v_scale[...]
        return cls(*(x[:, :rank] for x, rank in zip(scales, (R, R, Z), strict=True)))


def scale_weights(basis: Basis, layer: int) -> dict[str, np.ndarray]:
    """`q_scale`, `k_scale`, `v_scale` [K, H], float64, of `Attention`; raises what `check_scales` does."""
    return {f"{name}_scale": scale_for(rms[layer]) for name, rms in check_scales(basis).items()}


def check_scales(basis: Basis | None) -> dict[str, np.ndarray]:
    """Root mean squares of q, k and v [L, K, H], from which scales are made.

    Raises:
      CalibrationError: no basis, or one made before they were kept.
    """
    if basis is None:
        raise CalibrationError("payload='float8' needs the scales of a calibrated basis; give plan= with it")
    if basis.q_rms is None or basis.k_rms is None or basis.v_rms is None:
        raise CalibrationError("payload='float8' needs scales; this older basis has none, run zdc calibrate")
    return {"q": basis.q_rms, "k": basis.k_rms, "v": basis.v_rms}


def scale_for(rms: np.ndarray) -> np.ndarray:
    """The least power of two with which e4m3 holds `HEADROOM` root mean squares; 1 for what is always 0."""
    exponent = np.ceil(np.log2(np.where(rms > 0, rms, 1) * HEADROOM / _LARGEST))
    return np.where(rms > 0, 2.0**exponent, 1.0)


def packed(
    x: Float[Array, "B T N R"], scale: Float[AnyArray, "N R"]
) -> tuple[Float[Array, "B T N _"], Float[Array, "B T N _"]]:
    """The first `EXACT` coordinates as they are, and the others / scale as e4m3.

    Saturating: the cast alone makes NaN of what is beyond ±448.
    """
    rest = jnp.clip(x[..., EXACT:] / scale[:, EXACT:], -_LARGEST, _LARGEST)
    return x[..., :EXACT], rest.astype(_FLOAT8)


def unpacked(
    exact: Float[Array, "B T N _"], rest: Float[Array, "B T N _"], scale: Float[AnyArray, "N R"]
) -> Float[Array, "B T N R"]:
    """What `packed` was given, rounded, in the dtype that it had."""
    dtype = exact.dtype
    return jnp.concatenate([exact, rest.astype(dtype) * scale[:, EXACT:].astype(dtype)], -1)


def row_bytes(width: int, payload: Payload, itemsize: int) -> int:
    """Bytes of the first `width` coordinates of one head; `itemsize` is a native element's."""
    if payload == "native":
        return width * itemsize
    exact = min(width, EXACT)
    return exact * itemsize + width - exact
