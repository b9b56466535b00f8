"""Rotary embedding, and the basis of queries and keys applied after it (`post_rope`)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kernels_pallas import TILE_TOKENS, post_rope, post_rope_refusal
from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.ops import attention
from zdc_jax.ops.attention import Implementation


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> np.ndarray:
    """Return the angle per position of each rotary pair, float64 [H/2], as transformers' `rope_utils` does.

    `longrope` and `dynamic` depend on the context length. Here it is `max_positions` for all tokens. In
    transformers it is the longest sequence so far, and cached keys keep the angles of earlier lengths.
    """
    H = head_dim
    base = rope.theta ** -(np.arange(0, H, 2) / H)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            turns = rope.original_max_positions * base / (2 * np.pi)
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            return _blend(base, rope.factor, np.clip(smooth, 0, 1))
        case "yarn":
            return _blend(base, rope.factor, 1 - _yarn_ramp(rope, H))
        case "longrope":
            is_long = max_positions > rope.original_max_positions
            return base / np.array(rope.long_factors if is_long else rope.short_factors)
        case "dynamic":
            ratio = max(max_positions / rope.original_max_positions, 1)
            stretch = rope.factor * ratio - (rope.factor - 1)
            return base * stretch ** -(np.arange(0, H, 2) / (H - 2))
    return base


def layer_frequencies(spec: LayerSpec, config: ModelConfig) -> np.ndarray:
    """Return the rotary frequencies of a layer, float64 [H/2]; zeros without rotary embedding."""
    if spec.rope is None:
        return np.zeros(config.head_dim // 2)
    return rope_frequencies(spec.rope, config.head_dim, config.max_positions)


def _blend(base: np.ndarray, factor: float, share: np.ndarray) -> np.ndarray:
    """Blend frequencies: `share` [H/2] keeps the original, the rest is divided by `factor`."""
    return base * ((1 - share) / factor + share)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the ramp [H/2] of YaRN, from 0 to 1.

    It is 0 at pairs that turn `beta_fast` times within the original context, and 1 at `beta_slow` times.
    """
    whole = rope.original_max_positions / (2 * np.pi)
    turns = np.array([rope.beta_fast, rope.beta_slow])
    low, high = head_dim * np.log(whole / turns) / (2 * np.log(rope.theta))
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, "*N h"],
    *,
    interleaved: bool,
) -> Float[Array, "B T N H"]:
    """Apply the rotary embedding in float32; return the result in the dtype of `x`.

    Args:
      x: queries or keys.
      positions: position of each token.
      frequencies: rotary frequencies, [H/2], or [N, H/2] where each head has its own order of pairs.
      interleaved: whether pairs are (2i, 2i + 1); otherwise (p, p + H/2), as in Hugging Face weights.
    """
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = x.astype(jnp.float32)
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rope_and_basis(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    frequencies: Float[np.ndarray | Array, "H/2"],
    q_rotation: Float[Array, "K H C"],
    k_rotation: Float[Array, "K H C"],
    implementation: Implementation | None,
    *,
    by_token: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T K C"]]:
    """Compute RoPE(q) A_Q and RoPE(k) A_K; query heads share the basis of their KV head.

    With `implementation` `pallas` or None, the kernel serves the calls that it supports. XLA serves the
    others, with the same result. The kernel writes keys token by token if `by_token`, else head by head;
    XLA copies them if they are read in the other order.
    """
    (B, T, N, _), (H, C) = q.shape, q_rotation.shape[1:]
    arrays = q, k, positions, q_rotation, k_rotation

    def operands(
        q: Array, k: Array, positions: Array, q_rotation: Array, k_rotation: Array
    ) -> dict[str, Any]:
        # The kernel's tiles contain tokens of one sequence. Short sequences are joined into one to fill them.
        cos, sin = rotary_angles(positions, frequencies)
        by_token = {"q": q, "k": k, "angles_cos": cos, "angles_sin": sin}
        if T < TILE_TOKENS:
            by_token = {name: x.reshape(1, B * T, *x.shape[2:]) for name, x in by_token.items()}
        return by_token | {"q_rotation": q_rotation, "k_rotation": k_rotation}

    def refusal() -> str | None:
        return attention.kernel_refusal(post_rope_refusal, operands, *arrays)

    if implementation in (None, "pallas") and refusal() is None:
        queries, keys = post_rope(**operands(*arrays), by_token=by_token)
        keys = keys if by_token else keys.swapaxes(1, 2)
        return queries.reshape(*q.shape[:3], C), keys.reshape(*k.shape[:3], C)
    on_device = jnp.asarray(frequencies, jnp.float32)
    q, k = (rotate(x, positions, on_device, interleaved=False) for x in (q, k))
    groups = q.reshape(B, T, k.shape[2], -1, H)
    q = jnp.einsum("BTKGH,KHR->BTKGR", groups, q_rotation).reshape(B, T, N, C).astype(q.dtype)
    k = jnp.einsum("BTKH,KHR->BTKR", k, k_rotation).astype(k.dtype)
    return q, k


def rotary_angles(
    positions: Int[Array, "B T"], frequencies: Float[np.ndarray | Array, " h"]
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Return cosines and sines of the rotary angles, in float32."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)
