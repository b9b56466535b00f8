"""Formats in which the exchange sends values: native, 8-bit floating point, or few-bit integers (ours).

`float8` rounds to 3 bits of mantissa over a range of 2^15, so a scale only has to prevent overflow. Scales
are fixed at calibration, and no maximum has to be computed or agreed on. Rounding matters most in large
scores, which in a calibrated basis come from the first coordinates: those are sent unrounded.

`coded` rotates the coordinates of each token and head so that none is much larger than the others. It sends
integers with a scale per token, the codes of method `coded`. Rounding costs most where tokens attend to their
neighbours, which therefore stay on the device: a plan without a near set gets one.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kernels_pallas.quantized.encode import LONGER
from zdc_jax.axes import AnyArray, Array
from zdc_jax.basis import Basis
from zdc_jax.cache.codes.code import decode_tokens, encode_tokens
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.gaussian import gaussian_distortion, turn
from zdc_jax.errors import CalibrationError
from zdc_jax.model.attention import Attention

Payload = Literal["native", "float8", "coded"]
Kind = Literal["q", "k", "v", "o"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)
"""Payloads of an exchange.

`native`: values travel in their own dtype. `float8`: q, k, v and o travel as e4m3, except their first `EXACT`
coordinates. Halo, sinks and log-sum-exp are not rounded. `coded`: q, k, v and o travel as integers of `BITS`
bits and the log-sum-exp as float16. Sinks and the halo of a plan's own window are not rounded.
"""
EXACT = 2
"""Leading coordinates of each head that `float8` does not round."""
_FLOAT8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_FLOAT8).max)
HEADROOM = 64
"""Largest value that is not clipped, in root mean squares.

One token of a 4096-token window can reach at most √4096 = 64. Full precision extends down to a fraction
1/448 to 1/224 of the root mean square.
"""


BITS, FIRST_BITS = 4, 6
"""Bits per coordinate of `coded`, and those of the first coordinates of q and k: 2, 3, 4, 5, 6 or 8.

The first coordinates get more, because they dominate scores in a calibrated basis.
"""
NEAR = (4, 256)
"""Sinks and window that `coded` attends to unrounded if a plan has no near set of its own."""
HALO_BITS = 6
"""Bits per coordinate of keys and values in the halo of that window."""


class Format(ABC):
    """Representation of an array [B, T, N, C] in the exchange."""

    @abstractmethod
    def pack(self, x: Float[Array, "B T N C"]) -> tuple[Array, ...]:
        """Convert an array into the arrays [B, T, N, _] that are sent."""

    @abstractmethod
    def unpack(self, *parts: Array, dtype: jnp.dtype) -> Float[Array, "B T N C"]:
        """Convert received arrays back, up to rounding, into the original dtype."""

    def expand_heads(self, count: int) -> "Format":
        """Return the format for `count` heads, a multiple of the KV heads."""
        del count
        return self

    def slice_heads(self, start: Int[Array, ""], count: int) -> "Format":
        """Return the format of `count` of these heads, from `start` on."""
        del start, count
        return self


@dataclass(frozen=True)
class Native(Format):
    """Format that sends values unchanged."""

    def pack(self, x: Array) -> tuple[Array, ...]:
        return (x,)

    def unpack(self, *parts: Array, dtype: jnp.dtype) -> Array:
        return parts[0]


AS_IS = Native()


@dataclass(frozen=True)
class ScaledFloat8(Format):
    """Format that sends all but the first `EXACT` coordinates as e4m3, divided by `scale` [N, C].

    Values are clipped first: the cast alone turns values beyond ±448 into NaN.
    """

    scale: Float[AnyArray, "N C"]

    def pack(self, x: Array) -> tuple[Array, ...]:
        rest = jnp.clip(x[..., EXACT:] / self.scale[:, EXACT:], -_LARGEST, _LARGEST)
        return x[..., :EXACT], rest.astype(_FLOAT8)

    def unpack(self, *parts: Array, dtype: jnp.dtype) -> Array:
        exact, rest = parts
        return jnp.concatenate([exact, rest.astype(dtype) * self.scale[:, EXACT:].astype(dtype)], -1)

    def expand_heads(self, count: int) -> Format:
        return ScaledFloat8(jnp.repeat(self.scale, count // self.scale.shape[0], axis=0))

    def slice_heads(self, start: Array, count: int) -> Format:
        return ScaledFloat8(jax.lax.dynamic_slice_in_dim(self.scale, start, count))


@dataclass(frozen=True)
class RotatedIntegers(Format):
    """Format that rotates blocks of coordinates and sends them as integers.

    Each block, token and head has a scale. The rotation is `codes.gaussian.turn`, the quantization that of
    `FittedIntegers`. The sent arrays are, for each block, levels uint8 [B, T, N, C·bits/8] and scale uint8
    [B, T, N, 1]. A block with a non-finite coordinate arrives as NaN.

    Rounding to the nearest levels shrinks vectors by the relative square error, which would shrink all scores
    and outputs. `FittedIntegers` undoes half of that, and received values are scaled up by the rest.

    Attributes:
      width: number of coordinates.
      blocks: coordinates and bits of each block. Together they cover `width`, and zero padding if they are
        wider.
    """

    width: int
    blocks: tuple[tuple[int, int], ...]

    def pack(self, x: Array) -> tuple[Array, ...]:
        wide = sum(size for size, _ in self.blocks)
        x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * 3 + [(0, wide - self.width)])
        parts: list[Array] = []
        for size, bits in self.blocks:
            block, x = x[..., :size], x[..., size:]
            rotated = jnp.matmul(block, jnp.asarray(turn(size), jnp.float32), precision="highest")
            parts += encode_tokens(FittedIntegers(bits), rotated)
        return tuple(parts)

    def unpack(self, *parts: Array, dtype: jnp.dtype) -> Array:
        blocks = []
        for (size, bits), quantized in zip(self.blocks, itertools.batched(parts, 2), strict=True):
            rest = 1 / ((1 - gaussian_distortion(bits)) * LONGER.get(bits, 1.0))
            inverse = jnp.asarray(rest * turn(size).T, jnp.float32)
            # With so few levels, reduced precision in this product does not matter.
            blocks.append(decode_tokens(FittedIntegers(bits), quantized, size) @ inverse)
        return jnp.concatenate(blocks, -1)[..., : self.width].astype(dtype)


def coded_blocks(kind: Kind, width: int) -> tuple[tuple[int, int], ...]:
    """Return the blocks of `width` coordinates in `coded`, in whole bytes.

    The first quarter of q and k is a block of its own; below 32 coordinates it is all of them.
    """
    padded = -(-width // 8) * 8
    if kind in ("v", "o"):
        return ((padded, BITS),)
    if padded < 32:
        return ((padded, FIRST_BITS),)
    first = padded // 32 * 8
    return (first, FIRST_BITS), (padded - first, BITS)


def halo_blocks(width: int) -> tuple[tuple[int, int], ...]:
    """Return the block of `width` coordinates of a halo in `coded`."""
    return ((-(-width // 8) * 8, HALO_BITS),)


@dataclass(frozen=True)
class Formats:
    """Formats of one layer's arrays in the exchange.

    Attributes:
      q: queries [B, T, N, R].
      k: keys [B, T, K, R].
      v: values [B, T, K, Z].
      o: outputs.
      lse: dtype of the log-sum-exp.
      near: sinks and window to attend to unrounded if the layer has no near set.
      halo: formats of keys and values of that window, sent by preceding devices.
    """

    q: Format = AS_IS
    k: Format = AS_IS
    v: Format = AS_IS
    o: Format = AS_IS
    lse: Any = jnp.float32
    near: tuple[int, int] = (0, 0)
    halo: tuple[Format, Format] = (AS_IS, AS_IS)

    @classmethod
    def of(cls, payload: Payload, attention: Attention, R: int, Z: int) -> "Formats":
        """Return the formats of a payload for the first R and Z coordinates of a layer.

        Raises:
          CalibrationError: the payload is `float8` and the layer has no scales.
        """
        if payload == "native":
            return cls()
        if payload == "coded":
            return cls.coded(R, Z)
        if attention.q_scale is None or attention.k_scale is None or attention.v_scale is None:
            raise CalibrationError(f"{payload=}: the layer has no scales; prepare it for this payload")
        return cls.float8(
            attention.q_scale[...][:, :R], attention.k_scale[...][:, :R], attention.v_scale[...][:, :Z]
        )

    @classmethod
    def float8(
        cls, q: Float[AnyArray, "K R"], k: Float[AnyArray, "K R"], v: Float[AnyArray, "K Z"]
    ) -> "Formats":
        """Return the `float8` formats with these divisors of q, k and v; o has those of v.

        An output is a convex combination of values, so it is within their range. The divisors are powers of
        two, so that scaling does not round.
        """
        return cls(ScaledFloat8(q), ScaledFloat8(k), ScaledFloat8(v), ScaledFloat8(v))

    @classmethod
    def coded(cls, R: int, Z: int) -> "Formats":
        """Return the formats of `coded` for R and Z coordinates."""
        kinds: dict[Kind, int] = {"q": R, "k": R, "v": Z, "o": Z}
        q, k, v, o = (RotatedIntegers(width, coded_blocks(kind, width)) for kind, width in kinds.items())
        halo = RotatedIntegers(R, halo_blocks(R)), RotatedIntegers(Z, halo_blocks(Z))
        return cls(q, k, v, o, jnp.float16, NEAR, halo)


NATIVE = Formats()


def scale_weights(basis: Basis, layer: int) -> dict[str, np.ndarray]:
    """Return `q_scale`, `k_scale` and `v_scale` [K, H] of `Attention`, in float64.

    Errors are those of `check_scales`.
    """
    return {f"{name}_scale": scale_for(rms[layer]) for name, rms in check_scales(basis).items()}


def check_payload(payload: str) -> None:
    """Raise `ValueError` if `payload` is not in `PAYLOADS`."""
    if payload not in PAYLOADS:
        raise ValueError(f"{payload=}: must be one of {PAYLOADS}")


def check_basis(payload: Payload, basis: Basis | None) -> None:
    """Raise `CalibrationError` if the payload needs a basis (`float8`: one with scales) that is missing."""
    if payload != "native" and basis is None:
        raise CalibrationError(f"{payload=}: needs a calibrated basis; pass plan= with a calibrated plan")
    if payload == "float8" and basis is not None:
        check_scales(basis)


def check_scales(basis: Basis) -> dict[str, np.ndarray]:
    """Return the root mean squares of q, k and v [L, K, H], from which scales are derived.

    Raises:
      CalibrationError: the basis was calibrated by a version that did not store them.
    """
    if basis.q_rms is None or basis.k_rms is None or basis.v_rms is None:
        raise CalibrationError(
            "payload='float8': needs scales, which this older basis lacks; "
            "run zdc calibrate MODEL TEXT --overwrite"
        )
    return {"q": basis.q_rms, "k": basis.k_rms, "v": basis.v_rms}


def scale_for(rms: np.ndarray) -> np.ndarray:
    """Return the smallest power of two with which e4m3 covers `HEADROOM` root mean squares; 1 for zeros."""
    exponent = np.ceil(np.log2(np.where(rms > 0, rms, 1) * HEADROOM / _LARGEST))
    return np.where(rms > 0, 2.0**exponent, 1.0)
