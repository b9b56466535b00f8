"""Simulation of plans of method `coded`: their bits are data, so that one compiled program serves all (ours).

Real arrays have a shape for each number of bits, and every shape needs a compilation, which takes most of the
time of a search. Here older (*far*) keys and values are rounded as a plan asks, and stored at full width.
What a plan asks are numbers among the weights of a layer. A branch for each precision would be compiled in
each layer, and a GPU would wait for the host to choose it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from kernels_pallas import merge_partial
from kernels_pallas.quantized.encode import LONGER, SMALLEST, reach_numbers
from kernels_pallas.quantized.short_scales import E5M3_BIAS, E5M3_SHIFT, NAN_CODE, from_e5m3
from zdc_jax.axes import Array
from zdc_jax.basis import Basis
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.near_far import NearFar, NearFarState
from zdc_jax.cache.specs.prefix_ring import put_tokens
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens, move_shift
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.fold import cast, prepared_layer
from zdc_jax.methods.coded import Settings
from zdc_jax.model.block import Block
from zdc_jax.model.embeddings import Embeddings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.cache_attention import slots_for
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import Precision, build_layer, precisions

DATA = "simulated"
"""Name of the parameter of an attention layer that says what its layer stores, int32 [2, 2, 4].

It has the parts (`_encode_part`) of keys, and those of values. A layer without parts drops its far tokens."""
CANDIDATES = 8
"""Most scales that `reaches_tried` tries."""


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
    """`CodedStore` at any precision; attention must have the parameter `DATA`."""

    @classmethod
    def of(cls, spec: CodedStore) -> "SimulatedStore":
        """Return the simulation of a store."""
        near: dict[str, Any] = {"sinks": spec.sinks, "window": spec.window, "near_code": spec.near_code}
        return cls(**spec.base_fields, R=spec.head_dim, Z=spec.head_dim, **near)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, SimulatedValues]:
        """Compute q, k and v, and round what the store keeps."""
        q, k, v = attention.project(x, positions, implementation)
        parts = getattr(attention, DATA)[...]
        far_k, far_v = round_to(parts[0], k.keys), round_to(parts[1], v)
        return q, k, SimulatedValues(v, far_k, far_v, jnp.full(positions.shape, parts.max() == 0))

    def create_far(self, batch: int, capacity: int) -> tuple[Array, Array]:
        return super().create_far(batch, slots_for(capacity))

    def write_far(self, state: NearFarState, new: NewTokens) -> tuple[Any, Any]:
        put = partial(put_tokens, positions=new.positions, end=new.end)
        return put(state.far[0], new.v.far_k), put(state.far[1], new.v.far_v)

    def write(self, state: NearFarState, new: NewTokens) -> NearFarState:
        far = self.write_far(state, new)
        return NearFarState(self.near.write(state.near, replace(new, v=new.v.v)), far)

    def attend(
        self, state: NearFarState, q: Float[Array, "B T N H"], new: NewTokens, aux: Any, call: Call
    ) -> Attended:
        new, call = move_shift(new, replace(call, end=new.end), self.capacity(state.far), up_to_end=False)
        far = self.write_far(state, new)
        far_o, far_lse = self.attend_far(far, q, new.positions, call)
        far_lse = jnp.where(new.v.is_cut[:, None], -jnp.inf, far_lse)
        near = self.near.attend(state.near, q, replace(new, v=new.v.v), None, call)
        o, lse = merge_partial([(near.o, near.lse), (far_o, far_lse)])
        return Attended(NearFarState(near.state, far), o, lse, aux)


def round_to(parts: Int[Array, "2 4"], x: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    """Return vectors as a store decodes them, with zeros for coordinates that it does not store.

    Each part is rounded as by `FittedIntegers`, whose numbers come from `_encode_part`.
    """
    coordinates, start, decoded = jnp.arange(x.shape[-1]), jnp.int32(0), jnp.zeros_like(x, jnp.float32)
    for end, half, offset, count in parts:
        inside = (coordinates >= start) & (coordinates < end)
        decoded += _round_part(jnp.where(inside, x, 0).astype(jnp.float32), inside, half, offset, count)
        start = end
    return decoded.astype(x.dtype)


def _round_part(x: Array, inside: Array, half: Array, offset: Array, count: Array) -> Array:
    """Return vectors rounded with the scale of least error; coordinates that are not `inside` become 0."""
    # As `lengthen` does; bits are data here, and follow from half the number of levels.
    x *= jnp.array([LONGER.get(bits, 1.0) for bits in range(9)])[32 - jax.lax.clz(half)]
    largest = jnp.abs(x).max(-1, keepdims=True)
    widest = (jax.lax.bitcast_convert_type(largest, jnp.int32) + offset >> E5M3_SHIFT) - E5M3_BIAS
    tried = jnp.arange(CANDIDATES).reshape(-1, *[1] * x.ndim)
    code = jnp.clip(widest - tried, 0, NAN_CODE - 1)

    def levels(code: Array) -> tuple[Array, Array, Array]:
        step = jnp.maximum(from_e5m3(code), SMALLEST) / half
        exact = jnp.abs(x) / step - 0.5
        return step, exact, jnp.minimum(jnp.round(exact), half - 1)

    step, exact, level = levels(code)
    error = jnp.where(inside, jnp.square(level - exact), 0).sum(-1, keepdims=True) * jnp.square(step)
    best = jnp.where(tried < count, error, jnp.inf).argmin(0)
    code = jnp.where(jnp.isfinite(largest), jnp.clip(widest - best, 0, NAN_CODE - 1), NAN_CODE)
    _, _, level = levels(code)
    size = (2 * level + 1) * (from_e5m3(code) / (2 * half))
    return jnp.where(inside, jnp.where(x < 0, -size, size), 0)


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
    """

    def __init__(self, checkpoint: Checkpoint, basis: Basis, dtype: str):
        self.checkpoint, self.config, self.basis = checkpoint, checkpoint.config, basis
        self.dtype = jnp.dtype(dtype)
        embeddings = jax.device_put(cast(checkpoint.embeddings(), self.dtype))
        self._embeddings = Embeddings(embeddings, self.config)
        self._shared: dict[int, Any] = {}  # Weights of a layer outside attention.
        self._attention: dict[Any, Any] = {}  # Attention of a layer in one form.

    def supports(self, plan: CompressionPlan) -> bool:
        """Return whether a plan can be simulated: near tokens, and no choice of the tokens to read."""
        return bool(plan.window) and all(
            isinstance(ranks.settings, Settings) and not ranks.settings.read
            for ranks in plan.layers
            if ranks.qk
        )

    def network(self, plan: CompressionPlan) -> Transformer:
        """Return the network that simulates a plan, which is bound to the model and the basis."""
        any_far = build_layer(*[Precision(self.config.head_dim, 8)] * 2)
        pairs = zip(plan.layers, self.config.layers, strict=True)
        layers = (ranks if ranks.qk or spec.window is not None else any_far for ranks, spec in pairs)
        specs = tuple(
            SimulatedStore.of(spec) if isinstance(spec, CodedStore) else spec
            for spec in replace(plan, layers=tuple(layers)).layer_caches(self.dtype.name)
        )
        blocks = [self._load_block(layer, plan) for layer in range(self.config.num_layers)]
        return _SimulatedTransformer(plan, self._embeddings, blocks, specs, self.config)

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
        setattr(block.attention, DATA, nnx.Param(jnp.asarray(_encode(plan.layers[layer]))))
        return block


def _encode(ranks: LayerRanks) -> Int[np.ndarray, "2 2 4"]:
    """Return the data of a layer: numbers of the index and of the other stored coordinates."""
    if not ranks.qk:
        return np.zeros((2, 2, 4), np.int32)
    parts = [
        (_encode_part(0, each.index, each.bits_index), _encode_part(each.index, each.rank, each.bits))
        for each in precisions(ranks)
    ]
    return np.array(parts, np.int32)


def _encode_part(start: int, end: int, bits: int) -> list[int]:
    """Return the numbers of coordinates start … end - 1.

    They are the end, half the number of levels, and what `reaches_tried` adds to the bits of the largest
    coordinate, and how many scales it tries. Without coordinates, the numbers of levels and scales are 1.
    """
    if start == end:
        return [end, 1, 0, 1]
    return [end, 2 ** (bits - 1), *reach_numbers(bits, end - start)]
