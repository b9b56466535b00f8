"""Attention layer: projections of queries, keys and values, and the output projection."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.model.layers import Reduce, add_bias, param, rms_norm, skip_reduction
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.new_keys import Latents, NewKeys, Turn
from zdc_jax.ops.rotary import layer_frequencies, rotate
from zdc_jax.ops.shift import ShiftedQueries, without_mean

_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_NORMS = ("q_norm", "k_norm")
_BASIS = ("q_rotation", "k_rotation", "k_mean", "k_block_means", "frequencies", "k_latent")
_SCALES = ("q_scale", "k_scale", "v_scale")


class Attention(nnx.Module):
    """Projections W_Q, W_K, W_V and W_O of one layer, unmodified or folded by `zdc_jax.fold`.

    The optional weights say where a calibrated basis acts:

    - `q_rotation`, `k_rotation` [K, H, R]: after norm and rotary embedding (`post_rope`).
    - `frequencies` [K, R/2]: the weights hold selected rotary pairs, interleaved (`pairs`).
    - `k_mean` [K, H]: the shift of rotary layers, m of `zdc_jax.ops.shift`, which new keys leave out.
    - `k_block_means` [K, blocks, C]: what stored keys of each block left out (`means_of_blocks`).
    - `k_latent` [K, H, R]: not in attention; `project_latent` computes latents of the keys before the rotary
      embedding.
    - none of these: inside W_Q and W_K (`folded`), or there is no basis.

    `q_scale`, `k_scale` and `v_scale` [K, H] are the scales of a float8 exchange of prompts between devices
    (`zdc_jax.parallel.payload`).

    Raises:
      ValueError: `weights` has a name that no attention layer knows.
    """

    q_bias: nnx.Param | None
    k_bias: nnx.Param | None
    v_bias: nnx.Param | None
    o_bias: nnx.Param | None
    q_norm: nnx.Param | None
    k_norm: nnx.Param | None
    q_rotation: nnx.Param | None
    k_rotation: nnx.Param | None
    k_mean: nnx.Param | None
    k_block_means: nnx.Param | None
    frequencies: nnx.Param | None
    k_latent: nnx.Param | None
    q_scale: nnx.Param | None
    k_scale: nnx.Param | None
    v_scale: nnx.Param | None

    def __init__(self, weights: Mapping[str, Array], config: ModelConfig, spec: LayerSpec):
        optional = (*_BIASES, *_NORMS, *_BASIS, *_SCALES)
        if unknown := weights.keys() - {"q", "k", "v", "o", *optional}:
            raise ValueError(
                f"weights={sorted(unknown)}: not weights of an attention layer; "
                f"allowed are q, k, v, o and {', '.join(optional)}"
            )
        self.q, self.k = nnx.Param(weights["q"]), nnx.Param(weights["k"])
        self.v, self.o = nnx.Param(weights["v"]), nnx.Param(weights["o"])
        for name in optional:
            setattr(self, name, param(weights, name))
        # Keep only this layer's spec: equal layers then have equal hashes and share one compiled program.
        self.config, self.spec = replace(config, layers=(spec,)), spec

    @property
    def scale(self) -> float:
        """Factor on the scores; it follows the original head dimension, whatever rank is kept."""
        return self.spec.score_scale(self.config.head_dim)

    def project(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N R"], NewKeys, Float[Array, "B T K Z"]]:
        """Return q, k and v in the form that attention and the cache expect."""
        q, k, v = self.project_unrotated(x, positions)
        return *k.rotate(q, implementation), v

    def project_unrotated(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N _"], NewKeys, Float[Array, "B T K Z"]]:
        """Return q, k and v with rotary embedding and basis left to the cache (`post_rope`).

        Layers with another basis return the same as `project`.
        """
        q, k, v = self._project_raw(x, positions)
        shift = None
        if self.k_mean is not None:
            means = None if self.k_block_means is None else self.k_block_means[...]
            shift = ShiftedQueries(q, positions, self.k_mean[...], self._rope_frequencies(), means)
        if self.frequencies is not None:
            per_head = self.frequencies[...]
            per_query = jnp.repeat(per_head, q.shape[2] // k.shape[2], axis=0)
            q = rotate(q, positions, per_query, interleaved=True)
            return q, NewKeys(rotate(k, positions, per_head, interleaved=True)), v
        if self.q_rotation is not None and self.k_rotation is not None:
            basis = self.q_rotation[...], self.k_rotation[...]
            return q, NewKeys(k, Turn(positions, self._rope_frequencies(), *basis), shift), v
        if self.spec.rope is not None:
            frequencies = jnp.asarray(self._rope_frequencies(), jnp.float32)
            q, k = (rotate(x, positions, frequencies, interleaved=False) for x in (q, k))
        return q, NewKeys(k, shift=shift), v

    def project_latent(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N H"], NewKeys, Float[Array, "B T K Z"]]:
        """Return `project` with the latents of the keys; the layer must have `k_latent`."""
        assert self.k_latent is not None
        q, k, v = self.project(x, positions, implementation)
        factor = self.k_latent[...]
        latents = jnp.einsum("BTKH,KHR->BTKR", self.before_rope(k.keys, positions), factor)
        frequencies = jnp.asarray(self._rope_frequencies(), jnp.float32)
        return q, k._replace(latents=Latents(latents, factor, frequencies)), v

    def before_rope(
        self, k: Float[Array, "B T K H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T K H"]:
        """Undo the rotary embedding of keys. The layer must not apply a basis to them."""
        if self.spec.rope is None:
            return k
        return rotate(k, -positions, jnp.asarray(self._rope_frequencies(), jnp.float32), interleaved=False)

    def project_exact_keys(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T K H"]:
        """Return keys after bias, norm and rotary embedding in float32, without a basis.

        In bfloat16, keys with a bias of 400 are even numbers.
        """
        k = einsum_f32("BTD,DKH->BTKH", x, self.k[...])
        if self.k_bias is not None:
            k += self.k_bias[...].astype(jnp.float32)
        k = self._normalize(k, self.k_norm)
        if self.spec.rope is None:
            return k
        return rotate(k, positions, jnp.asarray(self._rope_frequencies(), jnp.float32), interleaved=False)

    def attend(
        self,
        q: Float[Array, "B T N R"],
        k: NewKeys,
        v: Float[Array, "B T K Z"],
    ) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
        """Attend within whole sequences as the checkpoint defines it, ignoring the plan.

        Returns:
          The output, and the log-sum-exp of the scaled scores.
        """
        options: dict[str, Any] = {"block_scores": k.block_scores(q.shape[1], self.scale)}
        if self.spec.window is not None:
            options |= {"qk_rank": 0, "v_rank": 0, "window": self.spec.window}
        return self_attention(q, k.keys, v, scale=self.scale, **options)

    def _project_raw(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K Z"]]:
        """Return q, k and v after bias and norm, before rotary embedding and basis.

        Keys leave their mean out before they are rounded: in bfloat16 a mean of 400 would round them to even
        numbers.
        """
        if x.shape[1] == 1 and self._joins_heads:
            return self._project_token(x, positions)
        q = self._normalize(add_bias(self._multiply(x, self.q[...]), self.q_bias), self.q_norm)
        k = self._normalize(self._project_keys(x), self.k_norm)
        if self.k_mean is not None:
            k = without_mean(k, positions, self.k_mean[...], self._rope_frequencies()).astype(x.dtype)
        return q, k, add_bias(self._multiply(x, self.v[...]), self.v_bias)

    @property
    def _joins_heads(self) -> bool:
        """Whether the cache may read all heads as one array: they have equal widths and no norms."""
        widths = {each.shape[2] for each in (self.q, self.k, self.v)}
        return self.q_rotation is not None and self.q_norm is self.k_norm is None and len(widths) == 1

    def _project_token(
        self, x: Float[Array, "B 1 D"], positions: Int[Array, "B 1"]
    ) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 K H"], Float[Array, "B 1 K H"]]:
        """Return `_project_raw` of single tokens as slices of one array of all heads.

        The kernel that stores a token reads all heads in one array (`join_heads`), and takes this one as it
        is. If queries, keys and values were joined after their biases, XLA would compute them one after
        another.
        """
        weights, biases = (self.q, self.k, self.v), (self.q_bias, self.k_bias, self.v_bias)
        heads = jnp.concatenate([einsum_f32("BTD,DNH->BTNH", x, each[...]) for each in weights], axis=2)
        if any(bias is not None for bias in biases):
            heads += jnp.concatenate(
                [
                    jnp.zeros(each.shape[1:]) if bias is None else bias[...]
                    for each, bias in zip(weights, biases, strict=True)
                ]
            )
        N, K = self.q.shape[1], self.k.shape[1]
        if self.k_mean is not None:
            mean = jnp.pad(self.k_mean[...], ((N, K), (0, 0)))
            heads = without_mean(heads, positions, mean, self._rope_frequencies())
        q, k, v = jnp.split(heads.astype(x.dtype), [N, N + K], axis=2)
        return q, k, v

    def _multiply(self, x: Float[Array, "B T D"], weights: Float[Array, "D N H"]) -> Float[Array, "B T N H"]:
        """Return a projection of queries or values.

        XLA merges products of equal dtypes. That of keys has float32 if keys leave their mean out. For a
        single token the others follow it, so that all three are one product.
        """
        if self.k_mean is None or x.shape[1] > 1:
            return jnp.einsum("BTD,DNH->BTNH", x, weights)
        return einsum_f32("BTD,DNH->BTNH", x, weights).astype(x.dtype)

    def _project_keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K H"]:
        """Return keys after the bias, in float32 if they will leave their mean out."""
        if self.k_mean is None:
            return add_bias(jnp.einsum("BTD,DKH->BTKH", x, self.k[...]), self.k_bias)
        k = einsum_f32("BTD,DKH->BTKH", x, self.k[...])
        return k if self.k_bias is None else k + self.k_bias[...].astype(jnp.float32)

    def _normalize(self, x: Array, norm: nnx.Param | None) -> Array:
        config = self.config
        return x if norm is None else rms_norm(x, norm[...], config.norm_eps, config.norm_offset)

    def _rope_frequencies(self) -> np.ndarray:
        return layer_frequencies(self.spec, self.config)

    def output(self, o: Float[Array, "B T N Z"], reduce: Reduce = skip_reduction) -> Float[Array, "B T D"]:
        """Apply W_O to the outputs of the heads, which are in the rotated basis."""
        return add_bias(reduce(jnp.einsum("BTNZ,NZD->BTD", o, self.o[...])), self.o_bias)
