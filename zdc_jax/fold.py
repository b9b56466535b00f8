"""Folding a calibrated basis into attention weights, and slicing them to a plan's ranks (ZDC §4.1–4.2).

All linear algebra is float64; `prepared_layers` rounds once to the model's dtype. Three placements of the q/k
basis:

- `folded` (no rotary embedding): inside W_Q and W_K, exact, no run-time cost.
- `post_rope` (rotary layers): a general basis does not commute with the rotary embedding, so q and k are
  rotated after it: q' = RoPE(q) A_Q[:, :R]. Nor with a norm of q and k: layers that have one take this, too.
- `pairs` (rotary layers): the basis only reorders rotary pairs, which commutes; W_Q and W_K are permuted.

V and O are always folded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.cache.gaussian_codes import turn as orthogonal_turn
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.errors import CalibrationError
from zdc_jax.methods import Rotations
from zdc_jax.ops.rotary import rope_frequencies
from zdc_jax.parallel.payload import Payload, scale_weights
from zdc_jax.plan import CompressionPlan, LayerRanks

Placement = Literal["folded", "post_rope", "pairs"]


_FOLDED = frozenset({"q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"})
"""Weights that folding has a rule for."""


def prepared_layers(
    layers: Iterator[Any],
    config: ModelConfig,
    plan: CompressionPlan,
    basis: Basis | None,
    dtype: jnp.dtype,
    payload: Payload = "native",
) -> Iterator[dict[str, Any]]:
    """Folded (if there is a basis), sliced and rounded layers, one at a time; `float8`: with scales."""
    for index, layer in enumerate(layers):
        yield prepared_layer(index, layer, config, plan, basis, dtype, payload)


def prepared_layer(
    index: int,
    layer: dict[str, Any],
    config: ModelConfig,
    plan: CompressionPlan,
    basis: Basis | None,
    dtype: jnp.dtype,
    payload: Payload = "native",
) -> dict[str, Any]:
    """One of `prepared_layers`."""
    if basis is not None:
        folded = fold_attention(
            layer["attention"],
            config,
            basis,
            index,
            plan.stored_ranks(index),
            full_width=any(plan.near(index)),
            latent_keys=plan.settings.latent_keys,
            rotations=plan.rotations(index),
        )
        if payload == "float8":
            folded |= scale_weights(basis, index)
        layer = {**layer, "attention": folded}
    return cast(layer, dtype)


_ROTATIONS = ("q_rotation", "k_rotation")


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """A nested dict of arrays rounded once to the model's dtype.

    Rotary frequencies stay float32. Rotations of a bfloat16 model are float16: rounded to bfloat16 those of q
    and k are no longer inverse to each other, which tells in every score.
    """

    def rounded_to(name: str) -> Any:
        if name in _ROTATIONS and dtype == jnp.bfloat16:
            return np.float16
        return np.float32 if name == "frequencies" else dtype

    return {
        name: cast(value, dtype) if isinstance(value, dict) else np.asarray(value).astype(rounded_to(name))
        for name, value in tree.items()
    }


def placement(spec: LayerSpec, basis: Basis) -> Placement:
    """Where this basis acts on q and k of a layer.

    Raises:
      CalibrationError: `pairs` for a layer with norms of q and k, whose weights it cannot reorder.
    """
    if basis.qk_kind == "pairs" and spec.qk_norm:
        raise CalibrationError("a basis of rotary pairs does not fold past a norm of q and k; use 'balanced'")
    if spec.rope is None and not spec.qk_norm:
        return "folded"
    return "pairs" if basis.qk_kind == "pairs" else "post_rope"


def fold_attention(
    weights: Mapping[str, np.ndarray],
    config: ModelConfig,
    basis: Basis,
    layer: int,
    ranks: LayerRanks,
    *,
    full_width: bool,
    latent_keys: bool = False,
    rotations: Rotations = ((), ()),
) -> dict[str, np.ndarray]:
    """The attention parameters of one layer in the rotated basis, physically sliced.

    Args:
      weights: unmodified parameters (`zdc_jax.model.params`, attention).
      ranks: coordinates to keep.
      full_width: keep all H coordinates, rotated; for plans with a window.
      latent_keys: leave q and k as they are, and add `k_latent` [K, H, R] where far keys are kept.
      turns: blocks of the first coordinates of k (and q), and of v, that `gaussian_codes.turn` acts on.

    Returns:
      float64 (integer-free) arrays: q [D, N, R], k [D, K, R], v [D, K, Z], o [N, Z, D], their biases, and
      `q_rotation`/`k_rotation`/`k_shift` or `frequencies` where the placement needs them. Centring adds an
      `o_bias` (values) to models that had none.

    Raises:
      ValueError: a weight that folding has no rule for; it would be lost.
      CalibrationError: what `placement` raises; `latent_keys` of a basis that has no `k_latent`; turns of
        keys in a basis of rotary pairs.
    """
    if unknown := weights.keys() - _FOLDED:
        raise ValueError(f"layer {layer}: no rule to fold the attention weights {sorted(unknown)}")
    R, Z = (config.head_dim,) * 2 if full_width else (ranks.qk, ranks.v)
    old = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    of_keys, of_values = (
        _rotation_matrix(sizes, width) for sizes, width in zip(rotations, (R, Z), strict=True)
    )
    values = _fold_vo(old, config, basis, layer, of_values)
    if latent_keys:
        return _latent_qk(old, basis, layer, ranks.qk) | values
    if rotations[0] and placement(config.layers[layer], basis) == "pairs":
        raise CalibrationError("a basis of rotary pairs cannot be turned for codes of keys; use 'balanced'")
    return _fold_qk(old, config, basis, layer, of_keys) | values


def _rotation_matrix(sizes: Sequence[int], width: int) -> np.ndarray:
    """Orthogonal [width, width]: turns blocks of so many first coordinates, and leaves the rest."""
    matrix, start = np.eye(width), 0
    for size in sizes:
        block = slice(start, start + size)
        matrix[block, block] = orthogonal_turn(size)
        start += size
    return matrix


def _fold_qk(
    old: Mapping[str, np.ndarray], config: ModelConfig, basis: Basis, layer: int, rotation: np.ndarray
) -> dict[str, np.ndarray]:
    R = len(rotation)
    k_map = basis.k_map[layer, :, :, :R] @ rotation
    q_map = basis.q_map[layer, :, :, :R] @ rotation
    shift = None
    if basis.key_mean is not None:
        shift = -np.einsum("KH,KHR->KR", basis.key_mean[layer], k_map)
    spec = config.layers[layer]
    names = [name for name in ("q", "k", "q_bias", "k_bias") if name in old]
    where = placement(spec, basis)
    if where == "post_rope":
        kept = [*names, *(name for name in ("q_norm", "k_norm") if name in old)]
        new = {name: old[name] for name in kept} | {"q_rotation": q_map, "k_rotation": k_map}
        return new if shift is None else new | {"k_shift": shift}
    group_map = np.repeat(q_map, config.group_size, axis=0)
    new = {
        name: np.einsum("...NH,NHR->...NR", old[name], group_map if name[0] == "q" else k_map)
        for name in names
    }
    if where == "pairs":
        assert spec.rope is not None
        assert basis.pairs is not None
        angles = rope_frequencies(spec.rope, config.head_dim, config.max_positions)
        new["frequencies"] = angles[basis.pairs[layer, :, : R // 2]]
    elif shift is not None:
        new["k_bias"] = new.get("k_bias", 0) + shift
    return new


def _latent_qk(old: Mapping[str, np.ndarray], basis: Basis, layer: int, R: int) -> dict[str, np.ndarray]:
    if basis.k_latent is None:
        raise CalibrationError(
            "the basis has no k_latent, coordinates of keys before the rotary embedding: "
            "run zdc calibrate MODEL TEXT --overwrite, without K-means"
        )
    names = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")
    kept = {name: old[name] for name in names if name in old}
    return kept | {"k_latent": basis.k_latent[layer, :, :, :R]} if R else kept


def _fold_vo(
    old: Mapping[str, np.ndarray], config: ModelConfig, basis: Basis, layer: int, rotation: np.ndarray
) -> dict[str, np.ndarray]:
    Z = len(rotation)
    v_map, o_map = basis.v_map[layer, :, :, :Z] @ rotation, rotation.T @ basis.o_map[layer, :, :Z]
    N, H, D = old["o"].shape
    grouped = old["o"].reshape(config.num_kv_heads, config.group_size, H, D)
    new = {
        "v": np.einsum("DKH,KHZ->DKZ", old["v"], v_map, optimize=True),
        "o": np.einsum("KZH,KGHD->KGZD", o_map, grouped, optimize=True).reshape(N, Z, D),
    }
    bias = old.get("v_bias")
    out_bias = old.get("o_bias")
    if basis.value_mean is not None:
        mean = basis.value_mean[layer]
        bias = (0 if bias is None else bias) - mean
        # Rows of softmax sum to one, so what every value lost comes back as a constant of the output.
        moved = np.einsum("KH,KGHD->D", mean, grouped)
        out_bias = moved if out_bias is None else out_bias + moved
    if bias is not None:
        new["v_bias"] = np.einsum("KH,KHZ->KZ", bias, v_map)
    if out_bias is not None:
        new["o_bias"] = out_bias
    return new
