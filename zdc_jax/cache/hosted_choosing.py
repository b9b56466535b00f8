"""Coded far tokens in the host's memory, of which decoding fetches those that it reads (after OmniKV).

The index stays on the device, and the ring of near tokens. All that one token keeps in a layer beside them,
keys and values of all heads, stands together in pinned host memory. What an index chooses is gathered there
by the host's processor and sent; nothing is dropped. (Hao et al. 2025, OmniKV: Dynamic Context Selection for
Efficient Long-Context LLMs, keep their cache so; the format is ours.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jaxtyping import Float, Int, UInt8

from zdc_jax.axes import Array
from zdc_jax.cache.choosing import FarTokens
from zdc_jax.cache.coded_choosing import CodedChoosing, put_coded
from zdc_jax.cache.codes import Coded, coded_shapes, encode_tokens
from zdc_jax.cache.near_far import NearFarState
from zdc_jax.cache.spec import Call
from zdc_jax.errors import CacheMemoryError, PlanError
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.stored import slots_for

HOST_MEMORY = "pinned_host"
ON_HOST = "keys and values lie on the host"
Space = jax.memory.Space
UNROLLED = 8
"""Rows whose tokens are written by copies of their own; more take a loop."""

_to_host = partial(jax.device_put, device=Space.Host)
_to_device = partial(jax.device_put, device=Space.Device)


@dataclass(frozen=True, kw_only=True)
class HostedChoosing(CodedChoosing):
    """`CodedChoosing` whose keys and values lie in host memory, uint8 [B, S + 1, K, bytes of a token].

    They are `k` of `FarTokens`; `v` is empty. The last slot takes what is not to be kept. Decoded tokens
    fetch what they read. Pieces of prompts fetch the whole layer, and attend to it on XLA. A new cache is
    made by way of the device. In both a layer must find room there for a time, which is not counted. The
    codes' arrays are bytes.

    Raises:
      PlanError: codes whose arrays are not bytes, or what `CodedChoosing` refuses.
    """

    clauses = CodedChoosing.clauses - {"pages"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(leaf.dtype != jnp.uint8 for leaf in jax.tree.leaves(self._forms)):
            raise PlanError(f"{self.key_code} and {self.value_code} must give bytes, to be kept on the host")

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        """`NearFar.create_far`.

        Raises:
          CacheMemoryError: the device has no pinned host memory.
        """
        check_host_memory()
        capacity = slots_for(capacity)
        index = super().create_far(batch, 1).index  # Of one token: only its form is wanted.
        index = jax.tree.map(
            lambda leaf: jnp.zeros((*leaf.shape[:2], capacity, leaf.shape[3]), leaf.dtype), index
        )
        return FarTokens(_host_zeros((batch, capacity + 1, self.num_kv_heads, self._width)), (), index)

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None, aux: Any
    ) -> tuple[Array, Array, Array]:
        """`LayerCacheSpec.project`: no kernel writes to the host."""
        return attention.project(x, positions, implementation)

    def write_far(self, state: NearFarState, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        return self._stored(self._indexed(state.far, k, positions, end), k, v, positions, end)

    def far_step(
        self,
        state: NearFarState,
        q: Array,
        k: Any,
        v: Array,
        positions: Array,
        end: Array,
        call: Call,
        aux: Any,
    ) -> tuple[FarTokens, Float[Array, "B T N Z"], Float[Array, "B N T"], Any]:
        """`NearFar.far_step`, which for a decoded token reads the host before it writes there.

        What is read is older than the window, so that the order changes nothing but time: layers that follow
        a choice need not wait for their own keys, and are fetched for ahead.
        """
        if positions.shape[1] > 1 or not self.window:
            return super().far_step(state, q, k, v, positions, end, call, aux)
        far = self._indexed(state.far, k, positions, end)
        o, lse, aux = self.far_part(far, q, k, positions, call, aux)
        # Else XLA keeps a copy of the whole store to read from.
        store, o = jax.lax.optimization_barrier((far.k, o))
        return self._stored(far._replace(k=store), k, v, positions, end), o, lse, aux

    def _indexed(self, far: FarTokens, k: Array, positions: Array, end: Array) -> FarTokens:
        index = put_coded(far.index, self.index_code, k[..., : self.index], positions=positions, end=end)
        return far._replace(index=index)

    def _stored(self, far: FarTokens, k: Array, v: Array, positions: Array, end: Array) -> FarTokens:
        parts = (self.key_code, k[..., self.index : self.R]), (self.value_code, v[..., : self.Z])
        leaves = [leaf for code, x in parts for leaf in jax.tree.leaves(encode_tokens(code, x))]
        return far._replace(k=put_tokens(far.k, jnp.concatenate(leaves, axis=-1), positions, end))

    def _read_refusal(self, far: FarTokens, q: Array, slots: Any) -> str:
        """Kernels cannot reach what is on the host."""
        return ON_HOST

    def rows(self, far: FarTokens, slots: Int[Array, "B K n"]) -> tuple[Array, Array]:
        """`Choosing.rows`: the host gathers, the device decodes."""

        def take(leaf):
            return jnp.take_along_axis(leaf, slots[..., None], axis=2)

        held = self._split(fetched(far.k, slots))
        return super().all_rows(held._replace(index=jax.tree.map(take, far.index)))

    def all_rows(self, far: FarTokens) -> tuple[Float[Array, "B K S R"], Float[Array, "B K S Z"]]:
        """`Choosing.all_rows`: the whole layer is sent."""
        held = _to_device(far.k)[:, :-1].swapaxes(1, 2)
        return super().all_rows(self._split(held)._replace(index=far.index))

    def capacity(self, far: FarTokens) -> int:
        return far.k.shape[1] - 1

    def host_bytes(self, capacity: int, batch: int = 1) -> int:
        return batch * (slots_for(capacity) + 1) * self.num_kv_heads * self._width

    @property
    def _forms(self) -> tuple[Coded, Coded]:
        """Shapes of what the codes make of one token's keys and values, leaves [1, _]."""
        keys, values = (self.key_code, self.R - self.index), (self.value_code, self.Z)
        return coded_shapes(*keys, self.dtype), coded_shapes(*values, self.dtype)

    @property
    def _width(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._forms))

    def _split(self, held: UInt8[Array, "B K n C"]) -> FarTokens:
        """Bytes of tokens as the trees that the codes decode."""
        leaves, tree = jax.tree.flatten(self._forms)
        ends = [sum(leaf.size for leaf in leaves[: i + 1]) for i in range(len(leaves) - 1)]
        return FarTokens(*jax.tree.unflatten(tree, jnp.split(held, ends, axis=-1)))


def check_host_memory() -> None:
    """Raises `CacheMemoryError` where a device has no pinned memory on its host."""
    device = jax.local_devices()[0]
    if HOST_MEMORY not in (kinds := [memory.kind for memory in device.addressable_memories()]):
        raise CacheMemoryError(f"memory='host': {device} has no {HOST_MEMORY!r} memory, only {kinds}")


@partial(jax.jit, static_argnums=0)
def _host_zeros(shape: tuple[int, ...]) -> UInt8[Array, "..."]:
    return _to_host(jnp.zeros(shape, jnp.uint8))


def fetched(store: UInt8[Array, "B S K C"], slots: Int[Array, "B K n"]) -> UInt8[Array, "B K n C"]:
    """The bytes of these slots, on the device; nothing else is sent."""
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
    """`store` with the tokens at `positions` below `end`; the slot past the last takes others."""
    (B, T), S = positions.shape, store.shape[1] - 1
    start = positions[:, 0]
    if T == 1:
        slot = jnp.where(start < end, start, S)

        def put(row: Array | int, store: Array) -> Array:
            return _copied(store, jax.lax.dynamic_slice_in_dim(x, row, 1), row, slot[row])
    else:
        width = min(T, S)
        first = jnp.clip(start, 0, S - width)

        def put(row: Array | int, store: Array) -> Array:
            # A piece whose padding would reach past the end is moved to where it fits.
            source = first[row] + jnp.arange(width) - start[row]
            at = first[row] + jnp.arange(width)
            kept = (source >= 0) & (source < T) & (at < end[row])
            old = _to_device(
                jax.lax.dynamic_slice(store, (row, first[row], 0, 0), (1, width, *store.shape[2:]))
            )
            old, store = jax.lax.optimization_barrier((old, store))
            new = x[row, jnp.clip(source, 0, T - 1)][None]
            return _copied(store, jnp.where(kept[None, :, None, None], new, old), row, first[row])

    if B <= UNROLLED:
        for row in range(B):
            store = put(row, store)
        return store
    return jax.lax.fori_loop(0, B, put, store)


def _copied(store: Array, x: UInt8[Array, "1 T K C"], row: Array | int, slot: Array) -> Array:
    return jax.lax.dynamic_update_slice(store, _to_host(x), (row, slot, 0, 0))
