"""The attention layer: projections that come out compressed, and W_O that absorbs the way back."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.model.layers import Reduce, add_bias, param, whole
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.rotary import rope_and_basis, rope_frequencies, rotate
from zdc_jax.plan import LayerRanks


class Attention(nnx.Module):
    """W_Q, W_K, W_V, W_O of one layer, as folded by `zdc_jax.fold` (or unmodified).

    Where the basis of q and k acts is told by which weights are present:
    `q_rotation`/`k_rotation` [K, H, R]: after the rotary embedding (`post_rope`);
    `frequencies` [K, R/2]: weights hold chosen rotary pairs, interleaved (`pairs`);
    neither: inside W_Q and W_K (`folded`), or no basis at all.
    `q_scale`, `k_scale`, `v_scale` [K, H], where they are present, are those of a float8 exchange of prompts
    between devices (`zdc_jax.parallel.payload`).
    """

    def __init__(self, weights: Mapping[str, Array], config: ModelConfig):
        self.q, self.q_bias = nnx.Param(weights["q"]), param(weights, "q_bias")
        self.k, self.k_bias = nnx.Param(weights["k"]), param(weights, "k_bias")
        self.v, self.v_bias = nnx.Param(weights["v"]), param(weights, "v_bias")
        self.o, self.o_bias = nnx.Param(weights["o"]), param(weights, "o_bias")
        self.q_rotation = param(weights, "q_rotation")
        self.k_rotation, self.k_shift = param(weights, "k_rotation"), param(weights, "k_shift")
        self.frequencies = param(weights, "frequencies")
        self.q_scale, self.k_scale = param(weights, "q_scale"), param(weights, "k_scale")
        self.v_scale = param(weights, "v_scale")
        self.config = config

    def project(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B T N R"], Float[Array, "B T K R"], Float[Array, "B T K Z"]]:
        """q, k, v as attention and the cache see them."""
        q = add_bias(jnp.einsum("BTD,DNH->BTNH", x, self.q[...]), self.q_bias)
        k = add_bias(jnp.einsum("BTD,DKH->BTKH", x, self.k[...]), self.k_bias)
        v = add_bias(jnp.einsum("BTD,DKH->BTKH", x, self.v[...]), self.v_bias)
        if self.frequencies is not None:
            per_head = self.frequencies[...]
            per_query = jnp.repeat(per_head, q.shape[2] // k.shape[2], axis=0)
            q = rotate(q, positions, per_query, interleaved=True)
            return q, rotate(k, positions, per_head, interleaved=True), v
        if self.config.rope is None:
            return q, k, v
        angles = rope_frequencies(self.config.rope, self.config.head_dim)
        if self.q_rotation is not None and self.k_rotation is not None:
            shift = None if self.k_shift is None else self.k_shift[...]
            basis = self.q_rotation[...], self.k_rotation[...], shift
            return *rope_and_basis(q, k, positions, angles, *basis, implementation), v
        turned = jnp.asarray(angles, jnp.float32)
        q, k = (rotate(each, positions, turned, interleaved=False) for each in (q, k))
        return q, k, v

    def project_classes(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], first: int, less: LayerRanks
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """q of all tokens, k and v of the `first` tokens and of the others, which keep only `less` of them.

        Narrower rows come from products with fewer columns of the same weights (ZDC §5.2).
        """
        if first == x.shape[1]:
            q, k, v = self.project(x, positions, "xla")
            return q, (k, k[:, :0]), (v, v[:, :0])
        more, fewer = x[:, :first], x[:, first:]
        rest = self.narrowed(less)
        q, k, v = self.project(more, positions[:, :first], "xla")
        q_rest, _, _ = self.project(fewer, positions[:, first:], "xla")
        _, k_rest, v_rest = rest.project(fewer, positions[:, first:], "xla")
        return jnp.concatenate([q, q_rest], 1), (k, k_rest), (v, v_rest)

    def narrowed(self, ranks: LayerRanks) -> "Attention":
        """The same layer with only the first coordinates of q, k and v."""
        qk = ("k_rotation", "k_shift") if self.k_rotation is not None else ("q", "q_bias", "k", "k_bias")
        widths = dict.fromkeys(qk, ranks.qk) | {"v": ranks.v, "v_bias": ranks.v, "frequencies": ranks.qk // 2}
        names = (*widths, "q", "q_bias", "k", "k_bias", "o", "o_bias", "q_rotation")
        held = {name: getattr(self, name) for name in names}
        weights = {
            name: value[...][..., : widths.get(name)] for name, value in held.items() if value is not None
        }
        return Attention(weights, self.config)

    def output(self, o: Float[Array, "B T N Z"], reduce: Reduce = whole) -> Float[Array, "B T D"]:
        """W_O applied to the heads' outputs in the rotated basis."""
        return add_bias(reduce(jnp.einsum("BTNZ,NZD->BTD", o, self.o[...])), self.o_bias)
