"""Payload of the exchange: as computed, in 8-bit floating point, or in few bits with a step a token (ours).

`float8` rounds to 3 bits of mantissa, 2^-4 of a number, over a range of 2^15: what matters about a scale is
that nothing overflows. So it is known before a prompt is seen, and no maximum has to be found, nor agreed on.
What it rounds off large scores is what costs, and in a calibrated basis these are made of the first
coordinates: those stay as they are.

`coded` turns the coordinates of each token and head so that none is much larger than the others, and sends
integers with a step of their own, the codes of method `coded`. Most of what rounding costs, it costs where
tokens attend to their neighbours. So these stay on the device: a plan without a near set gets one.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zdc_jax.axes import AnyArray, Array
from zdc_jax.basis import Basis
from zdc_jax.cache.codes import decode_tokens, encode_tokens
from zdc_jax.cache.fitted_integers import FittedIntegers
from zdc_jax.cache.gaussian_codes import gaussian_distortion, turn
from zdc_jax.errors import CalibrationError
from zdc_jax.model.attention import Attention

Payload = Literal["native", "float8", "coded"]
Kind = Literal["q", "k", "v", "o"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)
"""`native`: numbers travel in the dtype that they have. `float8`: q, k, v and o travel as e4m3 but for their
first `EXACT` coordinates; these, halo, sinks and log-sum-exp travel as they are. `coded`: q, k, v and o
travel as integers of `BITS` bits, the log-sum-exp as float16; sinks and the halo of a plan's own window as
they are."""
EXACT = 2
"""Coordinates of each head that `float8` does not round."""
_FLOAT8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_FLOAT8).max)
HEADROOM = 64
"""What is not clipped, in root mean squares: one token of each window of 4096 tokens can reach √4096 at most.
Numbers keep their full precision down to 1/448 to 1/224 of a root mean square."""


class Bits(NamedTuple):
    """Of a coordinate of q, k, v and o, and of the first coordinates of q and k; each 2, 3, 4, 5, 6 or 8."""

    q: int
    k: int
    v: int
    o: int
    first: int


BITS = Bits(q=4, k=4, v=4, o=4, first=6)
"""Of `coded`: in a calibrated basis scores are made of the first coordinates."""
NEAR = (4, 256)
"""Sinks and window that `coded` attends to before it rounds, where a plan has no near set of its own."""
HALO_BITS = 6
"""Of a coordinate of keys and values of that window that come from devices before."""


class Format(ABC):
    """How an array [B, T, N, C] of numbers travels."""

    @abstractmethod
    def packed(self, x: Float[Array, "B T N C"]) -> tuple[Array, ...]:
        """Arrays [B, T, N, _] that travel."""

    @abstractmethod
    def unpacked(self, *parts: Array, dtype: jnp.dtype) -> Float[Array, "B T N C"]:
        """What `packed` was given, rounded, in the dtype that it had."""

    def of_heads(self, count: int) -> "Format":
        """Of so many heads, a multiple of the KV heads."""
        del count
        return self

    def own(self, start: Int[Array, ""], count: int) -> "Format":
        """Of `count` of these heads, from `start` on."""
        del start, count
        return self


@dataclass(frozen=True)
class Native(Format):
    """As the numbers are."""

    def packed(self, x: Array) -> tuple[Array, ...]:
        """`Format.packed`."""
        return (x,)

    def unpacked(self, *parts: Array, dtype: jnp.dtype) -> Array:
        """`Format.unpacked`."""
        return parts[0]


AS_IS = Native()


@dataclass(frozen=True)
class ScaledFloat8(Format):
    """The first `EXACT` coordinates as they are, and the others / scale [N, C] as e4m3.

    Saturating: the cast alone makes NaN of what is beyond ±448.
    """

    scale: Float[AnyArray, "N C"]

    def packed(self, x: Array) -> tuple[Array, ...]:
        """`Format.packed`."""
        rest = jnp.clip(x[..., EXACT:] / self.scale[:, EXACT:], -_LARGEST, _LARGEST)
        return x[..., :EXACT], rest.astype(_FLOAT8)

    def unpacked(self, *parts: Array, dtype: jnp.dtype) -> Array:
        """`Format.unpacked`."""
        exact, rest = parts
        return jnp.concatenate([exact, rest.astype(dtype) * self.scale[:, EXACT:].astype(dtype)], -1)

    def of_heads(self, count: int) -> Format:
        """`Format.of_heads`."""
        return ScaledFloat8(jnp.repeat(self.scale, count // self.scale.shape[0], axis=0))

    def own(self, start: Array, count: int) -> Format:
        """`Format.own`."""
        return ScaledFloat8(jax.lax.dynamic_slice_in_dim(self.scale, start, count))


@dataclass(frozen=True)
class TurnedIntegers(Format):
    """Blocks of coordinates in `FittedIntegers` after `gaussian_codes.turn`, each with a step a token, head.

    blocks: coordinates of each and their bits; in all `width` or, with zeros behind, a few more. The nearest
    levels are shorter than what they stand for, by the share that their square error has in its square. That
    would make all scores and outputs smaller, so what arrives is made longer by as much.

    Packed: of each block levels uint8 [B, T, N, C·bits/8] and the reach uint8 [B, T, N, 1]. A block with a
    coordinate that is no finite number arrives as NaN.
    """

    width: int
    blocks: tuple[tuple[int, int], ...]

    def packed(self, x: Array) -> tuple[Array, ...]:
        """`Format.packed`."""
        wide = sum(size for size, _ in self.blocks)
        x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * 3 + [(0, wide - self.width)])
        parts: list[Array] = []
        for size, bits in self.blocks:
            block, x = x[..., :size], x[..., size:]
            turned = jnp.matmul(block, jnp.asarray(turn(size), jnp.float32), precision="highest")
            parts += encode_tokens(FittedIntegers(bits), turned)
        return tuple(parts)

    def unpacked(self, *parts: Array, dtype: jnp.dtype) -> Array:
        """`Format.unpacked`."""
        found = []
        for (size, bits), coded in zip(self.blocks, itertools.batched(parts, 2), strict=True):
            back = turn(size).T / (1 - gaussian_distortion(bits))
            # Levels are so few that a GPU may round the factors of this product as it likes to.
            found.append(decode_tokens(FittedIntegers(bits), coded, size) @ jnp.asarray(back, jnp.float32))
        return jnp.concatenate(found, -1)[..., : self.width].astype(dtype)


def coded_blocks(kind: Kind, width: int) -> tuple[tuple[int, int], ...]:
    """Blocks of `width` coordinates in `coded`, in whole bytes: of q and k the first quarter is one.

    Where a plan keeps fewer than 32 of q and k all of them are first ones.
    """
    padded, bits = -(-width // 8) * 8, getattr(BITS, kind)
    if kind in ("v", "o"):
        return ((padded, bits),)
    if padded < 32:
        return ((padded, BITS.first),)
    first = padded // 32 * 8
    return (first, BITS.first), (padded - first, bits)


def lse_bytes(payload: Payload) -> int:
    """Of the log-sum-exp of one token and head."""
    return 2 if payload == "coded" else 4


def halo_blocks(width: int) -> tuple[tuple[int, int], ...]:
    """The block of `width` coordinates of a halo in `coded`."""
    return ((-(-width // 8) * 8, HALO_BITS),)


def block_bytes(blocks: Iterable[tuple[int, int]]) -> int:
    """Of one token and head in `TurnedIntegers`: levels and reaches."""
    return sum(size * bits // 8 + 1 for size, bits in blocks)


@dataclass(frozen=True)
class Formats:
    """How q, k [B, T, K, R], v [B, T, K, Z] and o of one layer travel.

    lse: dtype of the log-sum-exp. near: sinks and window that are attended to as they are where the layer has
    no near set; `halo` is how keys and values of that window come from devices before.
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
        """Those of the first coordinates of a layer.

        Raises:
          CalibrationError: `float8`, and the layer has no scales.
        """
        if payload == "native":
            return cls()
        if payload == "coded":
            return cls.coded(R, Z)
        if attention.q_scale is None or attention.k_scale is None or attention.v_scale is None:
            raise CalibrationError(f"{payload=} needs layers with scales: prepare them with it")
        return cls.float8(
            attention.q_scale[...][:, :R], attention.k_scale[...][:, :R], attention.v_scale[...][:, :Z]
        )

    @classmethod
    def float8(
        cls, q: Float[AnyArray, "K R"], k: Float[AnyArray, "K R"], v: Float[AnyArray, "K Z"]
    ) -> "Formats":
        """From what q, k and v are divided by before the cast; o has v's.

        An output is a convex combination of values, so it is within their range. Powers of two, so that
        scaling rounds nothing.
        """
        return cls(ScaledFloat8(q), ScaledFloat8(k), ScaledFloat8(v), ScaledFloat8(v))

    @classmethod
    def coded(cls, R: int, Z: int) -> "Formats":
        """Of `BITS` bits."""
        kinds: dict[Kind, int] = {"q": R, "k": R, "v": Z, "o": Z}
        q, k, v, o = (TurnedIntegers(width, coded_blocks(kind, width)) for kind, width in kinds.items())
        halo = TurnedIntegers(R, halo_blocks(R)), TurnedIntegers(Z, halo_blocks(Z))
        return cls(q, k, v, o, jnp.float16, NEAR, halo)


NATIVE = Formats()


def scale_weights(basis: Basis, layer: int) -> dict[str, np.ndarray]:
    """`q_scale`, `k_scale`, `v_scale` [K, H], float64, of `Attention`; raises what `check_scales` does."""
    return {f"{name}_scale": scale_for(rms[layer]) for name, rms in check_scales(basis).items()}


def check_payload(payload: str) -> None:
    """Raises `ValueError` for what is none of `PAYLOADS`."""
    if payload not in PAYLOADS:
        raise ValueError(f"{payload=} must be one of {PAYLOADS}")


def check_basis(payload: Payload, basis: Basis | None) -> None:
    """Raises `CalibrationError` where a payload needs a basis, or one with scales, and there is none."""
    if payload != "native" and basis is None:
        raise CalibrationError(f"{payload=} needs the coordinates of a calibrated basis; give plan= with it")
    if payload == "float8" and basis is not None:
        check_scales(basis)


def check_scales(basis: Basis) -> dict[str, np.ndarray]:
    """Root mean squares of q, k and v [L, K, H], from which scales are made.

    Raises:
      CalibrationError: a basis made before they were kept.
    """
    if basis.q_rms is None or basis.k_rms is None or basis.v_rms is None:
        raise CalibrationError(
            "payload='float8' needs scales; this older basis has none, "
            "run zdc calibrate MODEL TEXT --overwrite"
        )
    return {"q": basis.q_rms, "k": basis.k_rms, "v": basis.v_rms}


def scale_for(rms: np.ndarray) -> np.ndarray:
    """The least power of two with which e4m3 holds `HEADROOM` root mean squares; 1 for what is always 0."""
    exponent = np.ceil(np.log2(np.where(rms > 0, rms, 1) * HEADROOM / _LARGEST))
    return np.where(rms > 0, 2.0**exponent, 1.0)


def row_bytes(kind: Kind, width: int, payload: Payload, itemsize: int) -> int:
    """Bytes of the first `width` coordinates of one token and head; `itemsize` is a native element's."""
    if payload == "native" or width == 0:
        return width * itemsize
    if payload == "coded":
        return block_bytes(coded_blocks(kind, width))
    exact = min(width, EXACT)
    return exact * itemsize + width - exact
