"""Norms, feed-forward and rotary embedding, each over already loaded parameters."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import RopeConfig

Reduce = Callable[[Array], Array]
"""Sums what each of several devices gives of one product, before its bias (tensor parallelism)."""


def whole(x: Array) -> Array:
    """The `Reduce` of a device that computes all of a product."""
    return x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def param(weights: Mapping[str, Array], name: str) -> nnx.Param | None:
    """The named weight as a parameter, None where this model has none."""
    return nnx.Param(weights[name]) if name in weights else None


def add_bias(x: Array, bias: nnx.Param | None) -> Array:
    """x + bias, or x where there is no bias."""
    return x if bias is None else x + bias[...]


class Norm(nnx.Module):
    """RMSNorm (only a scale) or LayerNorm (scale and bias), in float32."""

    def __init__(self, weights: Mapping[str, Array], eps: float):
        self.scale = nnx.Param(weights["scale"])
        self.bias = param(weights, "bias")
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y *= self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class FeedForward(nnx.Module):
    """Gated (Llama) or plain (OPT) two-matrix feed-forward."""

    def __init__(self, weights: Mapping[str, Array], activation: str):
        self.gate, self.gate_bias = param(weights, "gate"), param(weights, "gate_bias")
        self.up, self.up_bias = nnx.Param(weights["up"]), param(weights, "up_bias")
        self.down, self.down_bias = nnx.Param(weights["down"]), param(weights, "down_bias")
        self.activation = activation

    def __call__(self, x: Float[Array, "*B D"], reduce: Reduce = whole) -> Float[Array, "*B D"]:
        act = ACTIVATIONS[self.activation]
        up = add_bias(x @ self.up[...], self.up_bias)
        gate = None if self.gate is None else add_bias(x @ self.gate[...], self.gate_bias)
        hidden = act(up) if gate is None else act(gate) * up
        return add_bias(reduce(hidden @ self.down[...]), self.down_bias)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotary pair, float64 [H/2], as in transformers' `rope_utils`."""
    base = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * base / (2 * np.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0, 1)
        return base * ((1 - smooth) / rope.factor + smooth)
    return base


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, "*N h"],
    *,
    interleaved: bool,
) -> Float[Array, "B T N H"]:
    """Rotary embedding in float32, result in x's dtype.

    Pairs are (p, p + H/2) as in Hugging Face weights, or (2i, 2i + 1) when `interleaved`; `frequencies` is
    [H/2], or [N, H/2] when each head has its own order of pairs.
    """
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = x.astype(jnp.float32)
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
