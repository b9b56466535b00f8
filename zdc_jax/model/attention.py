"""The attention layer: projections that come out compressed, and W_O that absorbs the way back."""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.model.layers import Reduce, add_bias, param, rms_norm, unreduced
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.ops.latent import LatentKeys
from zdc_jax.ops.rotary import UnturnedKeys, rope_and_basis, rope_frequencies, rotate

_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_NORMS = ("q_norm", "k_norm")
_BASIS = ("q_rotation", "k_rotation", "k_shift", "frequencies", "k_latent")
_SCALES = ("q_scale", "k_scale", "v_scale")


class Attention(nnx.Module):
    """W_Q, W_K, W_V, W_O of one layer, as folded by `zdc_jax.fold` (or unmodified).

    Where the basis of q and k acts is told by which weights are present:
    `q_rotation`/`k_rotation` [K, H, R]: after norm and rotary embedding (`post_rope`);
    `frequencies` [K, R/2]: weights hold chosen rotary pairs, interleaved (`pairs`);
    `k_latent` [K, H, R]: none acts, and `project_latent` gives latents of keys before the rotary embedding;
    neither: inside W_Q and W_K (`folded`), or no basis at all.
    `q_scale`, `k_scale`, `v_scale` [K, H], where they are present, are those of a float8 exchange of prompts
    between devices (`zdc_jax.parallel.payload`).

    Raises:
      ValueError: a weight that no attention layer has.
    """

    q_bias: nnx.Param | None
    k_bias: nnx.Param | None
    v_bias: nnx.Param | None
    o_bias: nnx.Param | None
    q_norm: nnx.Param | None
    k_norm: nnx.Param | None
    q_rotation: nnx.Param | None
    k_rotation: nnx.Param | None
    k_shift: nnx.Param | None
    frequencies: nnx.Param | None
    k_latent: nnx.Param | None
    q_scale: nnx.Param | None
    k_scale: nnx.Param | None
    v_scale: nnx.Param | None

    def __init__(self, weights: Mapping[str, Array], config: ModelConfig, spec: LayerSpec):
        optional = (*_BIASES, *_NORMS, *_BASIS, *_SCALES)
        if unknown := weights.keys() - {"q", "k", "v", "o", *optional}:
            raise ValueError(f"attention has no use for the weights {sorted(unknown)}")
        self.q, self.k = nnx.Param(weights["q"]), nnx.Param(weights["k"])
        self.v, self.o = nnx.Param(weights["v"]), nnx.Param(weights["o"])
        for name in optional:
            setattr(self, name, param(weights, name))
        # Of this layer alone: layers alike are to be equal, and compiled programs are looked up by the hash.
        self.config, self.spec = replace(config, layers=(spec,)), spec

    @property
    def scale(self) -> float:
        """Factor on the scores; of the original head dim, whatever is kept of it."""
        return self.spec.score_scale(self.config.head_dim)

    def project(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N R"], Float[Array, "B T K R"], Float[Array, "B T K Z"]]:
        """q, k, v as attention and the cache see them."""
        q, k, v = self._products(x)
        if self.frequencies is not None:
            per_head = self.frequencies[...]
            per_query = jnp.repeat(per_head, q.shape[2] // k.shape[2], axis=0)
            q = rotate(q, positions, per_query, interleaved=True)
            return q, rotate(k, positions, per_head, interleaved=True), v
        if (basis := self._basis()) is not None:
            return *rope_and_basis(q, k, positions, self._angles(), *basis, implementation), v
        if self.spec.rope is not None:
            rotated = jnp.asarray(self._angles(), jnp.float32)
            q, k = (rotate(each, positions, rotated, interleaved=False) for each in (q, k))
        return q, k, v

    def project_unturned(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N H"], UnturnedKeys | Float[Array, "B T K R"], Float[Array, "B T K Z"]]:
        """`project` that leaves q and k as the weights give them where the basis acts behind the rotary
        embedding (`post_rope`), for a cache that turns them itself; elsewhere `project`."""
        if (basis := self._basis()) is None:
            return self.project(x, positions, implementation)
        q, k, v = self._products(x)
        return q, UnturnedKeys(k, positions, self._angles(), *basis), v

    def project_latent(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N H"], LatentKeys, Float[Array, "B T K Z"]]:
        """`project` of a layer that has `k_latent`."""
        assert self.k_latent is not None
        q, k, v = self.project(x, positions, implementation)
        factor = self.k_latent[...]
        latents = jnp.einsum("BTKH,KHR->BTKR", self.before_rope(k, positions), factor)
        return q, LatentKeys(k, latents, factor, jnp.asarray(self._angles(), jnp.float32)), v

    def before_rope(
        self, k: Float[Array, "B T K H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T K H"]:
        """Keys of a layer whose basis does not act, turned back."""
        if self.spec.rope is None:
            return k
        return rotate(k, -positions, jnp.asarray(self._angles(), jnp.float32), interleaved=False)

    def attend(
        self,
        q: Float[Array, "B T N R"],
        k: Float[Array, "B T K R"] | LatentKeys,
        v: Float[Array, "B T K Z"],
    ) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
        """Attention of whole sequences as the checkpoint means it, no plan; and its log-sum-exp."""
        if isinstance(k, LatentKeys):
            k = k.keys
        if self.spec.window is None:
            return self_attention(q, k, v, scale=self.scale)
        return self_attention(q, k, v, scale=self.scale, qk_rank=0, v_rank=0, window=self.spec.window)

    def _products(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K Z"]]:
        """q, k and v before anything turns them."""
        q = self._normed(add_bias(jnp.einsum("BTD,DNH->BTNH", x, self.q[...]), self.q_bias), self.q_norm)
        k = self._normed(add_bias(jnp.einsum("BTD,DKH->BTKH", x, self.k[...]), self.k_bias), self.k_norm)
        return q, k, add_bias(jnp.einsum("BTD,DKH->BTKH", x, self.v[...]), self.v_bias)

    def _basis(self) -> tuple[Array, Array, Array | None] | None:
        """What acts behind the rotary embedding: of queries, of keys, and what is added to keys."""
        if self.q_rotation is None or self.k_rotation is None:
            return None
        shift = None if self.k_shift is None else self.k_shift[...]
        return self.q_rotation[...], self.k_rotation[...], shift

    def _normed(self, x: Array, norm: nnx.Param | None) -> Array:
        config = self.config
        return x if norm is None else rms_norm(x, norm[...], config.norm_eps, config.norm_offset)

    def _angles(self) -> np.ndarray:
        """Of each rotary pair, float64 [H/2]; zeros turn nothing."""
        if self.spec.rope is None:
            return np.zeros(self.config.head_dim // 2)
        return rope_frequencies(self.spec.rope, self.config.head_dim, self.config.max_positions)

    def project_classes(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        first: int,
        less: tuple[int, int],
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """q of all tokens, k and v of the `first` tokens and of the others, which keep only R, Z = `less`.

        Narrower rows come from products with fewer columns of the same weights (ZDC §5.2).
        """
        if first == x.shape[1]:
            q, k, v = self.project(x, positions, "xla")
            return q, (k, k[:, :0]), (v, v[:, :0])
        more, fewer = x[:, :first], x[:, first:]
        rest = self.narrowed(*less)
        q, k, v = self.project(more, positions[:, :first], "xla")
        q_rest, _, _ = self.project(fewer, positions[:, first:], "xla")
        _, k_rest, v_rest = rest.project(fewer, positions[:, first:], "xla")
        return jnp.concatenate([q, q_rest], 1), (k, k_rest), (v, v_rest)

    def narrowed(self, R: int, Z: int) -> "Attention":
        """The same layer with only the first coordinates of q, k and v."""
        rotations = ("q_rotation", "k_rotation", "k_shift")
        qk = rotations if self.k_rotation is not None else ("q", "q_bias", "k", "k_bias")
        widths = dict.fromkeys(qk, R) | {"v": Z, "v_bias": Z, "frequencies": R // 2}
        names = ("q", "k", "v", "o", *_BIASES, *_NORMS, *_BASIS)
        held = {name: getattr(self, name) for name in names}
        weights = {
            name: value[...][..., : widths.get(name)] for name, value in held.items() if value is not None
        }
        return Attention(weights, self.config, self.spec)

    def output(self, o: Float[Array, "B T N Z"], reduce: Reduce = unreduced) -> Float[Array, "B T D"]:
        """W_O applied to the heads' outputs in the rotated basis."""
        return add_bias(reduce(jnp.einsum("BTNZ,NZD->BTD", o, self.o[...])), self.o_bias)
