"""Quantized far tokens in host memory, from which decoding fetches the tokens that it reads (after OmniKV).

The index and the ring of near tokens stay on the device. The keys and values of all heads of one token in a
layer are contiguous in pinned host memory. For each choice, the host's processor gathers the tokens and sends
them to the device. No token is evicted. Hao et al. 2025 (OmniKV: Dynamic Context Selection for Efficient
Long-Context LLMs) place their cache in this way; the format is ours.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jaxtyping import Float, Int, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import Coded, coded_shapes, encode_tokens
from zdc_jax.cache.specs.choosing import FarTokens, take_slots
from zdc_jax.cache.specs.coded_choosing import CodedChoosing, put_coded
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.spec import Call, NewTokens
from zdc_jax.errors import CacheMemoryError, PlanError
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.cache_attention import slots_for
from zdc_jax.ops.new_keys import NewKeys

HOST_MEMORY = "pinned_host"
"""Memory kind of the store."""
ON_HOST = "keys and values lie on the host"
"""Reason why kernels do not read the store."""
Space = jax.memory.Space
UNROLLED = 8
"""Largest batch whose tokens are written by separate copies; larger batches use a loop."""

_to_host = partial(jax.device_put, device=Space.Host)
_to_device = partial(jax.device_put, device=Space.Device)


@dataclass(frozen=True, kw_only=True)
class HostedChoosing(CodedChoosing):
    """`CodedChoosing` whose keys and values are in host memory, uint8 [B, S + 1, K, bytes of a token].

    The `k` of `FarTokens` stores keys and values, and its `v` is empty. The last slot absorbs tokens that are
    not to be stored. Decoded tokens fetch what they read. Chunks of prompts fetch the whole layer and run on
    XLA. A new cache is created on the device and then moved. In both cases the device needs temporary room
    for a layer, which byte counts do not include.

    Raises:
      PlanError: the arrays of a code are not bytes; see also `CodedChoosing`.
    """

    clauses = CodedChoosing.clauses - {"pages"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(leaf.dtype != jnp.uint8 for leaf in jax.tree.leaves(self._shapes)):
            raise PlanError(
                f"key_code={self.key_code}, value_code={self.value_code}: host memory stores bytes; "
                "choose codes whose arrays are all uint8"
            )

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        """Create an empty store in host memory.

        Raises:
          CacheMemoryError: the device has no pinned host memory.
        """
        check_host_memory()
        capacity = slots_for(capacity)
        index = super().create_far(batch, 1).index  # Only the shapes for one token are needed.
        index = jax.tree.map(
            lambda leaf: jnp.zeros((*leaf.shape[:2], capacity, leaf.shape[3]), leaf.dtype), index
        )
        return FarTokens(_host_zeros((batch, capacity + 1, self.num_kv_heads, self._width)), (), index)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Array]:
        """Compute q, k and v in stored form, since no kernel writes to host memory."""
        return attention.project(x, positions, implementation)

    def write_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        return self._put_keys_and_values(self._put_index(state.far, new), new)

    def far_step(
        self, state: NearFarState, q: Array, new: NewTokens, call: Call, aux: Any
    ) -> tuple[FarTokens, Float[Array, "B T N Z"], Float[Array, "B N T"], Any]:
        """Write the new tokens and attend to the far tokens; a decoded token reads before it writes.

        Tokens that are read are older than the window, so that the order affects only the time. Layers that
        reuse a choice can fetch their tokens early, without waiting for their own new keys.
        """
        if q.shape[1] > 1 or not self.window:
            return super().far_step(state, q, new, call, aux)
        far = self._put_index(state.far, new)
        o, lse, aux = self.far_part(far, q, new.k, new.positions, call, aux)
        # Without the barrier, XLA copies the whole store to read from it.
        store, o = jax.lax.optimization_barrier((far.k, o))
        return self._put_keys_and_values(far._replace(k=store), new), o, lse, aux

    def _put_index(self, far: FarTokens, new: NewTokens) -> FarTokens:
        first = new.k.keys[..., : self.index]
        index = put_coded(far.index, self.index_code, first, positions=new.positions, end=new.end)
        return far._replace(index=index)

    def _put_keys_and_values(self, far: FarTokens, new: NewTokens) -> FarTokens:
        k, v = new.k.keys, new.v
        parts = (self.key_code, k[..., self.index : self.R]), (self.value_code, v[..., : self.Z])
        leaves = [leaf for code, x in parts for leaf in jax.tree.leaves(encode_tokens(code, x))]
        return far._replace(k=put_tokens(far.k, jnp.concatenate(leaves, axis=-1), new.positions, new.end))

    def _read_refusal(self, far: FarTokens, q: Array, slots: Any) -> str:
        """Return why kernels cannot read the store."""
        return ON_HOST

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        """Gather the tokens on the host and decode them on the device."""
        tokens, take = self._split(fetched(far.k, slots)), partial(take_slots, slots=slots)
        return super().all_rows(tokens._replace(index=jax.tree.map(take, far.index)))

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """Send the whole layer to the device and decode it there."""
        tokens = _to_device(far.k)[:, :-1].swapaxes(1, 2)
        return super().all_rows(self._split(tokens)._replace(index=far.index))

    def capacity(self, far: FarTokens) -> int:
        return far.k.shape[1] - 1

    def host_bytes(self, capacity: int, batch: int = 1) -> int:
        return batch * (slots_for(capacity) + 1) * self.num_kv_heads * self._width

    @property
    def _shapes(self) -> tuple[Coded, Coded]:
        """Shapes of one token's quantized keys and values, with leaves [1, _]."""
        keys, values = (self.key_code, self.R - self.index), (self.value_code, self.Z)
        return coded_shapes(*keys, self.dtype), coded_shapes(*values, self.dtype)

    @property
    def _width(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes))

    def _split(self, tokens: UInt8[Array, "B K n C"]) -> FarTokens:
        """Split the bytes of tokens into the trees that the codes decode."""
        leaves, tree = jax.tree.flatten(self._shapes)
        ends = [sum(leaf.size for leaf in leaves[: i + 1]) for i in range(len(leaves) - 1)]
        return FarTokens(*jax.tree.unflatten(tree, jnp.split(tokens, ends, axis=-1)))


def check_host_memory() -> None:
    """Raise `CacheMemoryError` if the first device has no pinned host memory."""
    device = jax.local_devices()[0]
    if HOST_MEMORY not in (kinds := [memory.kind for memory in device.addressable_memories()]):
        raise CacheMemoryError(
            f"memory='host': {device} has no {HOST_MEMORY!r} memory, only {kinds}; use memory='device'"
        )


@partial(jax.jit, static_argnums=0)
def _host_zeros(shape: tuple[int, ...]) -> UInt8[Array, "..."]:
    return _to_host(jnp.zeros(shape, jnp.uint8))


def fetched(store: UInt8[Array, "B S K C"], slots: Int[Array, "B K n"]) -> UInt8[Array, "B K n C"]:
    """Fetch the bytes of these slots to the device, and send nothing else."""
    B, S, K, C = store.shape
    flat = (jnp.arange(B)[:, None, None] * S + slots) * K + jnp.arange(K)[:, None]
    gather = compute_on(
        lambda store, rows: store.reshape(-1, C)[rows],
        compute_type="device_host",
        out_memory_spaces=Space.Host,
    )
    return _to_device(gather(store, _to_host(flat.reshape(-1)))).reshape(*slots.shape, C)


def put_tokens(
    store: UInt8[Array, "B S K C"],
    x: UInt8[Array, "B T K C"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
) -> UInt8[Array, "B S K C"]:
    """Write the tokens at `positions` below `end` into `store`; the last slot absorbs all others."""
    (B, T), S = positions.shape, store.shape[1] - 1
    start = positions[:, 0]
    if T == 1:
        slot = jnp.where(start < end, start, S)

        def put(row: Array | int, store: Array) -> Array:
            return _copy_to_host(store, jax.lax.dynamic_slice_in_dim(x, row, 1), row, slot[row])
    else:
        width = min(T, S)
        first = jnp.clip(start, 0, S - width)

        def put(row: Array | int, store: Array) -> Array:
            # A chunk whose padding would extend past the last slot is shifted until it fits.
            source = first[row] + jnp.arange(width) - start[row]
            at = first[row] + jnp.arange(width)
            kept = (source >= 0) & (source < T) & (at < end[row])
            old = _to_device(
                jax.lax.dynamic_slice(store, (row, first[row], 0, 0), (1, width, *store.shape[2:]))
            )
            old, store = jax.lax.optimization_barrier((old, store))
            new = x[row, jnp.clip(source, 0, T - 1)][None]
            return _copy_to_host(store, jnp.where(kept[None, :, None, None], new, old), row, first[row])

    if B <= UNROLLED:
        for row in range(B):
            store = put(row, store)
        return store
    return jax.lax.fori_loop(0, B, put, store)


def _copy_to_host(store: Array, x: UInt8[Array, "1 T K C"], row: Array | int, slot: Array) -> Array:
    return jax.lax.dynamic_update_slice(store, _to_host(x), (row, slot, 0, 0))
