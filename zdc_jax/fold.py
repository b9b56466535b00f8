"""Folding of a calibrated basis into attention weights, and slicing to the ranks of a plan (ZDC §4.1–4.2).

All linear algebra is float64; `prepared_layers` rounds once to the dtype of the model. The basis of q and k
has one of three placements:

- `folded` (no rotary embedding): the basis is multiplied into W_Q and W_K. Exact, no cost at run time.
- `post_rope` (rotary layers, layers with norms of q and k): a general basis commutes neither with the rotary
  embedding nor with the norms. It is applied after them: q' = RoPE(q) A_Q[:, :R].
- `pairs` (rotary layers): the basis only reorders rotary pairs, which commutes. W_Q and W_K are permuted.

The basis of v and o is always multiplied into W_V and W_O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.cache.codes.gaussian import turn as orthogonal_turn
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.errors import CalibrationError
from zdc_jax.ops.rotary import layer_frequencies, rope_frequencies
from zdc_jax.ops.shift import damping, means_of_blocks
from zdc_jax.parallel.payload import Payload, scale_weights
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planned_layers import Rotations

Placement = Literal["folded", "post_rope", "pairs"]
"""Placement of the basis of q and k."""

_FOLDED = frozenset({"q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"})
"""Attention weights that `fold_attention` can fold."""


def prepared_layers(layers: Iterable[Any], *options: Any) -> Iterator[dict[str, Any]]:
    """Yield the result of `prepared_layer` with these options for each layer."""
    return (prepared_layer(index, layer, *options) for index, layer in enumerate(layers))


def prepared_layer(
    index: int,
    layer: dict[str, Any],
    config: ModelConfig,
    plan: CompressionPlan,
    basis: Basis | None,
    dtype: jnp.dtype,
    payload: Payload = "native",
) -> dict[str, Any]:
    """Fold a layer into the basis, slice it to the plan's ranks and round it to `dtype`.

    Args:
      index: index of the layer.
      layer: unmodified parameters of the layer.
      config: architecture of the model.
      plan: plan that defines the ranks.
      basis: basis to fold in. With None, weights are only folded as far as the method rotates coordinates.
      dtype: dtype of the result.
      payload: `float8` adds the scales that this exchange format needs.

    Returns:
      parameters of the layer, a nested dict of numpy arrays.
    """
    attention, mean = layer["attention"], None
    if plan.layers[index].shift:
        mean = mean_of_bias(attention, config, index) if basis is None else _stored_shift(basis, index)
    if basis is None and any(plan.rotations(index)):
        basis = Basis.identity(config.num_layers, config.num_kv_heads, config.head_dim)
    if basis is not None:
        attention = fold_attention(
            attention,
            config,
            basis,
            index,
            plan.layers[index],
            full_width=any(plan.near(index)),
            latent_keys=plan.settings.latent_keys,
            rotations=plan.rotations(index),
            mean=mean,
        )
        if payload == "float8":
            attention |= scale_weights(basis, index)
    elif mean is not None:
        attention = _leave_out(attention, config, index, mean)
    if "k_mean" in attention and plan.settings.reads_whole_keys:
        frequencies, basis_of_keys = (
            layer_frequencies(config.layers[index], config),
            attention.get("k_rotation"),
        )
        means = means_of_blocks(attention["k_mean"], frequencies, config.max_positions, basis_of_keys)
        attention = attention if means is None else {**attention, "k_block_means": means}
    return cast({**layer, "attention": attention}, dtype)


_ROTATIONS = ("q_rotation", "k_rotation")


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Round a nested dict of arrays to the dtype of the model.

    Rotary frequencies and means of keys are rounded to float32, and so is the bias of keys that leave out
    their mean: it may be hundreds of times larger than what remains. The rotations of a bfloat16 model are
    rounded to float16: in bfloat16 those of q and k would not be inverse to each other, which would change
    every score.
    """
    precise = {"frequencies", "k_mean", "k_block_means"} | ({"k_bias"} if "k_mean" in tree else set())

    def choose_dtype(name: str) -> Any:
        if name in _ROTATIONS and dtype == jnp.bfloat16:
            return np.float16
        return np.float32 if name in precise else dtype

    return {
        name: cast(value, dtype)
        if isinstance(value, dict)
        else np.asarray(value).astype(choose_dtype(name), copy=False)
        for name, value in tree.items()
    }


def placement(spec: LayerSpec, basis: Basis) -> Placement:
    """Return the placement of a basis in a layer.

    Raises:
      CalibrationError: `qk_kind="pairs"` for a layer with norms of q and k, whose weights it cannot reorder.
    """
    if basis.qk_kind == "pairs" and spec.qk_norm:
        raise CalibrationError(
            "qk_kind='pairs' does not support models with norms of q and k; calibrate with qk='balanced'"
        )
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
    mean: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the attention parameters of one layer in the coordinates of the basis, sliced to its ranks.

    Args:
      weights: unmodified parameters (`zdc_jax.model.params`, attention).
      config: architecture of the model.
      basis: basis to fold in.
      layer: index of the layer.
      ranks: coordinates to store.
      full_width: whether to keep all H coordinates; for plans with recent tokens.
      latent_keys: whether to leave q and k unmodified, and to add `k_latent` [K, H, R] if R > 0.
      rotations: sizes of blocks of leading coordinates, of k (and q) and of v. Each block is rotated by
        `zdc_jax.cache.codes.gaussian.turn`.
      mean: m of `zdc_jax.ops.shift`, which keys leave out, [K, H]; None keeps keys whole.

    Returns:
      float64 arrays q [D, N, R], k [D, K, R], v [D, K, Z], o [N, Z, D] and their biases. Some placements add
      `q_rotation`, `k_rotation`, and `k_mean` with a `mean`, or `frequencies`. Centered values add `o_bias`
      to models without one.

    Raises:
      ValueError: an attention weight is unknown and would be lost.
      CalibrationError: `placement` raises it; `latent_keys` with a basis without `k_latent`; rotations of
        keys with `qk_kind="pairs"`.
    """
    if unknown := weights.keys() - _FOLDED:
        raise ValueError(f"layer {layer}: folding does not support the attention weights {sorted(unknown)}")
    R, Z = (config.head_dim,) * 2 if full_width else (ranks.qk, ranks.v)
    old = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    key_sizes, value_sizes = rotations
    values = _fold_vo(old, config, basis, layer, _rotation_matrix(value_sizes, Z))
    old_qk = {name: x for name, x in old.items() if name[0] in "qk"}
    if latent_keys:
        return old_qk | _latent_keys(basis, layer, ranks.qk) | values
    if key_sizes and placement(config.layers[layer], basis) == "pairs":
        raise CalibrationError(
            "qk_kind='pairs' does not support the rotations of quantized keys; calibrate with qk='balanced'"
        )
    return _fold_qk(old_qk, config, basis, layer, _rotation_matrix(key_sizes, R), mean) | values


def _rotation_matrix(sizes: Sequence[int], width: int) -> np.ndarray:
    """Return the orthogonal matrix [width, width] that rotates blocks of these sizes and keeps the rest."""
    matrix, start = np.eye(width), 0
    for size in sizes:
        block = slice(start, start + size)
        matrix[block, block] = orthogonal_turn(size)
        start += size
    return matrix


def _fold_qk(
    old: Mapping[str, np.ndarray],
    config: ModelConfig,
    basis: Basis,
    layer: int,
    rotation: np.ndarray,
    mean: np.ndarray | None,
) -> dict[str, np.ndarray]:
    R = len(rotation)
    k_map = basis.k_map[layer, :, :, :R] @ rotation
    q_map = basis.q_map[layer, :, :, :R] @ rotation
    spec = config.layers[layer]
    where = placement(spec, basis)
    if where == "post_rope":
        new = {**old, "q_rotation": q_map, "k_rotation": k_map}
        return new if mean is None else new | {"k_mean": mean}
    group_map = np.repeat(q_map, config.group_size, axis=0)
    new = {
        name: np.einsum("...NH,NHR->...NR", x, group_map if name[0] == "q" else k_map)
        for name, x in old.items()
    }
    if where == "pairs":
        assert spec.rope is not None
        assert basis.pairs is not None
        angles = rope_frequencies(spec.rope, config.head_dim, config.max_positions)
        new["frequencies"] = angles[basis.pairs[layer, :, : R // 2]]
    elif mean is not None:
        # Without a rotary embedding all keys lose the same vector, which attention does not see.
        new["k_bias"] = new.get("k_bias", 0) - np.einsum("KH,KHR->KR", mean, k_map)
    return new


def mean_of_bias(weights: Mapping[str, np.ndarray], config: ModelConfig, layer: int) -> np.ndarray | None:
    """Return m of `zdc_jax.ops.shift` from the bias of a layer's keys, [K, H]; it needs no calibration.

    It is None for layers without such a bias, or with a norm after it.
    """
    spec = config.layers[layer]
    if "k_bias" not in weights or spec.qk_norm:
        return None
    return np.asarray(weights["k_bias"], np.float64) * np.tile(damping(layer_frequencies(spec, config)), 2)


def _stored_shift(basis: Basis, layer: int) -> np.ndarray:
    assert basis.key_shift is not None  # `load` checks this.
    return basis.key_shift[layer]


def _leave_out(
    weights: Mapping[str, np.ndarray], config: ModelConfig, layer: int, mean: np.ndarray
) -> dict[str, np.ndarray]:
    """Return attention parameters without a basis whose keys leave out their mean."""
    if config.layers[layer].rope is not None:
        return {**weights, "k_mean": mean}
    # Without a rotary embedding all keys lose the same vector, which attention does not see.
    return {**weights, "k_bias": np.asarray(weights["k_bias"], np.float64) - mean}


def _latent_keys(basis: Basis, layer: int, R: int) -> dict[str, np.ndarray]:
    if basis.k_latent is None:
        raise CalibrationError(
            "the basis has no k_latent (coordinates of keys before the rotary embedding); "
            "run `zdc calibrate MODEL TEXT --overwrite` without K-means"
        )
    return {"k_latent": basis.k_latent[layer, :, :, :R]} if R else {}


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
        # Attention weights sum to one, so the mean of the values adds a constant to the output.
        mean_output = np.einsum("KH,KGHD->D", mean, grouped)
        out_bias = mean_output if out_bias is None else out_bias + mean_output
    if bias is not None:
        new["v_bias"] = np.einsum("KH,KHZ->KZ", bias, v_map)
    if out_bias is not None:
        new["o_bias"] = out_bias
    return new
