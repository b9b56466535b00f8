"""Simulation of plans of method `coded`: their bits are data, so that one compiled program serves all (ours).

Real arrays have a shape for each number of bits, and every shape needs a compilation, which takes most of the
time of a search. Here older (*far*) keys and values are rounded as a plan asks, and stored at full width. The
rounding is one branch of a `jax.lax.switch`, chosen by numbers among the weights of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from kernels_pallas import merge_partial
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.codes import decode_tokens, encode_tokens
from zdc_jax.cache.fitted_integers import FittedIntegers
from zdc_jax.cache.near_far import NearFar, NearFarState
from zdc_jax.cache.prefix_ring import put_tokens
from zdc_jax.cache.spec import Attended, Call, LayerCacheSpec, move_shift
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.fold import cast, prepared_layer
from zdc_jax.methods.coded import Settings
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.stored import slots_for
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import Precision, build_layer, precisions

DATA = "simulated"
"""Name of the parameter of an attention layer that says what its layer stores, int32 [3].

Its numbers are the precisions of keys and of values, as indices into `SimulatedStore`, and whether the layer
drops its far tokens."""


class SimulatedValues(NamedTuple):
    """Values of new tokens, and what the far store keeps of these tokens.

    Attributes:
      v: values, [B, T, K, H].
      far_k, far_v: keys and values as the store decodes them, [B, T, K, H].
      is_cut: whether the layer drops its far tokens, [B, T].
    """

    v: Float[Array, "B T K H"]
    far_k: Float[Array, "B T K H"]
    far_v: Float[Array, "B T K H"]
    is_cut: Bool[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class SimulatedStore(NearFar):
    """`CodedStore` at any of several precisions; attention must have the parameter `DATA`.

    Attributes:
      keys: precisions of keys.
      values: precisions of values.
    """

    keys: tuple[Precision, ...]
    values: tuple[Precision, ...]

    @classmethod
    def of(
        cls, spec: CodedStore, keys: tuple[Precision, ...], values: tuple[Precision, ...]
    ) -> "SimulatedStore":
        """Return the simulation of a store at all of these precisions."""
        return cls(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            R=spec.head_dim,
            Z=spec.head_dim,
            sinks=spec.sinks,
            window=spec.window,
            near_code=spec.near_code,
            keys=keys,
            values=values,
        )

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, NewKeys, SimulatedValues]:
        """Compute q, k and v, and round what the store keeps."""
        q, k, v = attention.project(x, positions, implementation)
        key, value, is_cut = getattr(attention, DATA)[...]
        far_k = jax.lax.switch(key, [partial(round_to, each) for each in self.keys], k.keys)
        far_v = jax.lax.switch(value, [partial(round_to, each) for each in self.values], v)
        return q, k, SimulatedValues(v, far_k, far_v, jnp.full(positions.shape, is_cut > 0))

    def create_far(self, batch: int, capacity: int) -> tuple[Array, Array]:
        shape = batch, self.num_kv_heads, slots_for(capacity), self.head_dim
        return jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)

    def capacity(self, far: tuple[Array, Array]) -> int:
        return far[0].shape[2]

    def write_far(
        self, state: NearFarState, k: NewKeys, v: Any, positions: Array, end: Array
    ) -> tuple[Any, Any]:
        put = partial(put_tokens, positions=positions, end=end)
        return put(state.far[0], v.far_k), put(state.far[1], v.far_v)

    def attend_far(
        self, far: tuple[Array, Array], q: Array, positions: Array, call: Call
    ) -> tuple[Array, Array]:
        return self.attend_rows(q, *far, positions, call)

    def write(self, state: NearFarState, k: NewKeys, v: Any, positions: Array, end: Array) -> NearFarState:
        far = self.write_far(state, k, v, positions, end)
        return NearFarState(self.near.write(state.near, k, v.v, positions, end), far)

    def attend(
        self,
        state: NearFarState,
        q: Float[Array, "B T N H"],
        k: NewKeys,
        v: Any,
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: Any,
        call: Call,
    ) -> Attended:
        k, call = move_shift(k, replace(call, end=end), self.capacity(state.far))
        far = self.write_far(state, k, v, positions, end)
        far_o, far_lse = self.attend_far(far, q, positions, call)
        far_lse = jnp.where(v.is_cut[:, None], -jnp.inf, far_lse)
        near = self.near.attend(state.near, q, k, v.v, positions, end, None, call)
        o, lse = merge_partial([(near.o, near.lse), (far_o, far_lse)])
        return Attended(NearFarState(near.state, far), o, lse, aux)


def round_to(precision: Precision, x: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    """Return vectors as a store of this precision decodes them, with zeros for what it does not store."""
    ends = (precision.index, precision.rank) if precision.index else (precision.rank,)
    bits = (precision.bits_index, precision.bits) if precision.index else (precision.bits,)
    parts, start = [], 0
    for end, each in zip(ends, bits, strict=True):
        code, part = FittedIntegers(each), x[..., start:end]
        parts.append(decode_tokens(code, encode_tokens(code, part), end - start).astype(x.dtype))
        start = end
    return jnp.concatenate([*parts, jnp.zeros_like(x[..., start:])], axis=-1)


class _SimulatedTransformer(Transformer):
    """A network of given blocks, whose caches are simulated by `specs`."""

    def __init__(
        self,
        plan: CompressionPlan,
        embeddings: Embeddings,
        blocks: Sequence[Block],
        specs: tuple[LayerCacheSpec, ...],
        config: ModelConfig,
    ):
        self.config, self.plan, self.embeddings = config, plan, embeddings
        self.layers, self.specs = nnx.List(blocks), specs

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        return self.specs


class Simulation:
    """Networks that simulate plans of method `coded` on one model. They share weights and programs.

    The weights of a layer depend on its plan only through the rotations and the shift of its coordinates.
    Attention weights are kept once for each of these forms.

    Args:
      checkpoint: converted folder.
      basis: calibrated basis.
      dtype: dtype to run in.
      keys: precisions of keys that plans may have.
      values: precisions of values that plans may have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        basis: Basis,
        dtype: str,
        keys: tuple[Precision, ...],
        values: tuple[Precision, ...],
    ):
        self.checkpoint, self.config, self.basis = checkpoint, checkpoint.config, basis
        self.dtype = jnp.dtype(dtype)
        self.keys, self.values = keys, values
        embeddings = jax.device_put(cast(checkpoint.embeddings(), self.dtype))
        self._embeddings = Embeddings(embeddings, self.config)
        self._shared: dict[int, Any] = {}  # Weights of a layer outside attention.
        self._attention: dict[Any, Any] = {}  # Attention of a layer in one form.

    def supports(self, plan: CompressionPlan) -> bool:
        """Return whether a plan can be simulated: near tokens, and no choice of the tokens to read."""
        far = [ranks for ranks in plan.layers if ranks.qk]
        return bool(plan.window) and all(
            isinstance(ranks.settings, Settings)
            and not ranks.settings.read
            and precisions(ranks)[0] in self.keys
            and precisions(ranks)[1] in self.values
            for ranks in far
        )

    def network(self, plan: CompressionPlan) -> Transformer:
        """Return the network that simulates a plan, which is bound to the model and the basis."""
        highest = build_layer(self.keys[-1], self.values[-1])
        layers = (
            ranks if ranks.qk or self._slides(layer) else highest for layer, ranks in enumerate(plan.layers)
        )
        specs = tuple(
            SimulatedStore.of(spec, self.keys, self.values) if isinstance(spec, CodedStore) else spec
            for spec in replace(plan, layers=tuple(layers)).layer_caches(self.dtype.name)
        )
        blocks = [self._load_block(layer, plan) for layer in range(self.config.num_layers)]
        return _SimulatedTransformer(plan, self._embeddings, blocks, specs, self.config)

    def _slides(self, layer: int) -> bool:
        return self.config.layers[layer].window is not None

    def _load_block(self, layer: int, plan: CompressionPlan) -> Block:
        """Return a layer with the weights of a plan in their form, and what the plan stores as data."""
        form = layer, plan.rotations(layer), plan.layers[layer].shift
        if form not in self._attention:
            weights = self.checkpoint.layer(layer)
            folded = prepared_layer(layer, weights, self.config, plan, self.basis, self.dtype)
            self._attention[form] = jax.device_put(folded.pop("attention"))
            if layer not in self._shared:
                self._shared[layer] = jax.device_put(folded)
        weights = {**self._shared[layer], "attention": self._attention[form]}
        block = Block(weights, self.config, self.config.layers[layer])
        setattr(block.attention, DATA, nnx.Param(self._encode(plan.layers[layer])))
        return block

    def _encode(self, ranks: LayerRanks) -> Int[Array, "3"]:
        """Return the data of a layer."""
        if not ranks.qk:
            return jnp.array([0, 0, 1], jnp.int32)
        key, value = precisions(ranks)
        return jnp.array([self.keys.index(key), self.values.index(value), 0], jnp.int32)
