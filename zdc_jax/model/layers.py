"""Norms and the feed-forward network, over parameters that are already loaded."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig

Reduce = Callable[[Array], Array]
"""Sum over devices of the partial results of one product, before its bias (tensor parallelism)."""


def skip_reduction(x: Array) -> Array:
    """Return `x` unchanged; the `Reduce` of a device that computes a whole product."""
    return x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def param(weights: Mapping[str, Array], name: str) -> nnx.Param | None:
    """Return the named weight as a parameter, or None where the model has none."""
    return nnx.Param(weights[name]) if name in weights else None


def add_bias(x: Array, bias: nnx.Param | None) -> Array:
    """Add `bias` to `x`, if there is one."""
    return x if bias is None else x + bias[...]


class Norm(nnx.Module):
    """RMSNorm (scale only) or LayerNorm (scale and bias), computed in float32."""

    def __init__(self, weights: Mapping[str, Array], config: ModelConfig):
        self.scale = nnx.Param(weights["scale"])
        self.bias = param(weights, "bias")
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        if self.bias is None:
            return rms_norm(x, self.scale[...], self.eps, self.offset)
        y = x.astype(jnp.float32)
        y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y *= self.scale[...].astype(jnp.float32) + self.offset
        y += self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, offset: float
) -> Float[Array, "*B D"]:
    """Divide `x` by its root mean square and multiply by `scale + offset`.

    The computation is in float32; the result has the dtype of `x`.
    """
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


class FeedForward(nnx.Module):
    """Feed-forward network, gated (Llama) or plain (OPT)."""

    def __init__(self, weights: Mapping[str, Array], activation: str):
        self.gate, self.gate_bias = param(weights, "gate"), param(weights, "gate_bias")
        self.up, self.up_bias = nnx.Param(weights["up"]), param(weights, "up_bias")
        self.down, self.down_bias = nnx.Param(weights["down"]), param(weights, "down_bias")
        self.activation = activation

    def __call__(self, x: Float[Array, "B T D"], reduce: Reduce = skip_reduction) -> Float[Array, "B T D"]:
        act = ACTIVATIONS[self.activation]
        up = add_bias(jnp.einsum("BTD,DF->BTF", x, self.up[...]), self.up_bias)
        gate = None
        if self.gate is not None:
            gate = add_bias(jnp.einsum("BTD,DF->BTF", x, self.gate[...]), self.gate_bias)
        hidden = act(up) if gate is None else act(gate) * up
        return add_bias(reduce(jnp.einsum("BTF,FD->BTD", hidden, self.down[...])), self.down_bias)
