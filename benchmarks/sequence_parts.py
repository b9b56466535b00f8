"""One layer's attention on a mesh, taken apart: exchange, far and near halves, near beside the exchange.

And what links and single devices take, from which a partition for KV-Runahead is searched.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.rivals.methods import ATTENTION, Method
from benchmarks.rivals.partition import Partition, in_eights
from benchmarks.rivals.partition_search import PieceCost, link_bandwidth, measured, searched
from benchmarks.rivals.runahead import RunaheadTransformer
from benchmarks.rivals.traffic import handed_bytes
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.parallel.attention import attend_near
from zdc_jax.parallel.exchange import gather_heads, gather_heads_and_lse, kv_copies, scatter_heads
from zdc_jax.parallel.far import FarKeys
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import NATIVE, Formats, Payload, scale_for
from zdc_jax.plan import CompressionPlan, LayerRanks

TOKENS, HEADS, HEADS_FIRST = P(None, SEQUENCE), P(None, None, SEQUENCE), P(None, SEQUENCE)
"""How [B, T, N, H] lies on the mesh, by token or by head, and how [B, N, T] and [B, N, T, H] lie by head."""


def seconds_each(f: Callable[..., Any], *args: Any, rounds: int = 5, steps: int = 5) -> list[float]:
    """Wall seconds of a call: means over `steps` dispatched without waiting, after one that compiles."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(steps):
            out = f(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / steps)
    return times


def link_rate(mesh: Mesh, nbytes: int) -> float:
    """Bytes a second that leave a device in a bare all-to-all of about `nbytes` on each; no relayout."""
    U = mesh.shape[SEQUENCE]
    exchange = partial(jax.lax.all_to_all, axis_name=SEQUENCE, split_axis=0, concat_axis=0)
    words = normal(mesh, P(SEQUENCE), (U * U, nbytes // U // 4), jnp.float32)
    times = seconds_each(_on(mesh, exchange, P(SEQUENCE), P(SEQUENCE)), words)
    return words.nbytes / U * (U - 1) / U / float(np.median(times))


def searched_partition(
    model: RunaheadTransformer, tokens: Array, layers: int, implementation: Implementation
) -> Partition:
    """Of prompts [1, T] over the model's devices, by a cost fitted to four pairs of pieces on the first.

    `layers` of the whole model, of which `model` may hold fewer.
    """
    length, (first, second) = tokens.shape[1], model.devices[:2]
    pair = RunaheadTransformer(model.networks[0], [first] * 2)
    eighths = [Partition((m * length // 8, n * length // 8)) for m, n in ((1, 1), (1, 4), (4, 4), (4, 2))]
    times = measured(pair, tokens, eighths, implementation=implementation, repeats=2)
    scale = layers / len(model.plan.layers)
    cost = PieceCost.fit({partition: scale * each for partition, each in times.items()})
    handed = lambda end: handed_bytes(model.plan, Partition((end, 1)), capacity=in_eights(length))[0]
    bandwidth = link_bandwidth(first, second)
    link = lambda end: scale * handed(end) / bandwidth
    return searched(length, len(model.devices), cost, layers=layers, link=link)


def normal(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, seed: int = 0) -> Array:
    """Random normal numbers, made where they lie."""
    return _normal(NamedSharding(mesh, spec), shape, dtype)(np.int32(seed))


@cache
def _normal(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Callable[[np.int32], Array]:
    """A jitted function of the seed, the same one for the same arrays: compiled once."""
    return jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype), out_shardings=sharding)


class Parts:
    """Times of one layer's attention and its parts, on random arrays that lie on the mesh as a layer's do.

    `length` T is a multiple of the devices along `sequence`, the only axis with several; all layers of `plan`
    are alike.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: CompressionPlan,
        mesh: Mesh,
        *,
        length: int,
        method: Method,
        implementation: Implementation,
        payload: Payload = "native",
    ):
        self.config, self.mesh, self.length, self.method = config, mesh, length, method
        self.ranks, self.spec = plan.layers[0], plan.layer_caches(config.dtype)[0]
        self.formats = NATIVE
        if payload == "float8":
            widths = (self.ranks.qk, self.ranks.qk, self.ranks.v)
            unit = (jnp.asarray(scale_for(np.ones((config.num_kv_heads, width)))) for width in widths)
            self.formats = Formats.float8(*(scale.astype(jnp.bfloat16) for scale in unit))
        self.keys = FarKeys(config.layers[0].score_scale(config.head_dim), *plan.near(0), implementation)

    def names(self) -> list[str]:
        """The parts that this method has."""
        near = not self.keys.are_all and self.method != "late_ulysses"
        exchange = self.method in ("ulysses", "late_ulysses")
        has = {
            "attention": True,
            "near": near,
            "exchange": exchange,
            "near_and_exchange": near and exchange,
            "far": self.method == "ulysses",
        }
        return [name for name in has if has[name]]

    def seconds(self, name: str) -> list[float]:
        """Wall seconds of one part, see `seconds_each`."""
        near, exchanged = (TOKENS, HEADS), (TOKENS, HEADS_FIRST, HEADS_FIRST)
        both = lambda *qkv: (self._near(*qkv), self._exchange(*qkv))
        programs: dict[str, tuple[Callable[..., Any], P, Any]] = {
            "attention": (self._attention, TOKENS, TOKENS),
            "near": (self._near, TOKENS, near),
            "exchange": (self._exchange, TOKENS, exchanged),
            "near_and_exchange": (both, TOKENS, (near, exchanged)),
            "far": (self._far, HEADS, (HEADS, HEADS_FIRST)),
        }
        f, in_spec, out_specs = programs[name]
        H, K = self.config.head_dim, self.config.num_kv_heads
        if name == "far":
            copies = kv_copies(K, self.mesh.shape[SEQUENCE])
            arrays = self._random(in_spec, K * copies, self.ranks.qk, self.ranks.v)
        else:
            arrays = self._random(in_spec, K, H, H)
        return seconds_each(_on(self.mesh, f, in_spec, out_specs), *arrays)

    def _attention(self, q: Array, k: Array, v: Array) -> Array:
        payload = {} if self.formats is NATIVE else {"formats": self.formats}
        options = {"spec": self.spec, "implementation": self.keys.implementation, **payload}
        return ATTENTION[self.method](q, k, v, scale=self.keys.scale, **options)[0]

    def _near(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return attend_near(q, k, v, self.keys)

    def _far(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        if self.keys.are_all:
            return self_attention(q, k, v, scale=self.keys.scale, implementation=self.keys.implementation)
        return self.keys.attend(q, k, v)

    def _exchange(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Both all-to-alls with their relayouts; numbers of q stand in for what attention would give."""
        H, late = self.config.head_dim, self.method == "late_ulysses"
        ranks = LayerRanks(H, H) if late else self.ranks
        first = q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v]
        sent = self.formats
        q, k, v = scatter_heads(first, SEQUENCE, (sent.q, sent.k, sent.v))
        o = jnp.tile(q, -(-ranks.v // ranks.qk))[..., : ranks.v]
        if self.keys.are_all or late:
            o = gather_heads(o, SEQUENCE, sent.o)
        else:
            lse = q[..., 0].swapaxes(1, 2).astype(jnp.float32)
            o, _ = gather_heads_and_lse(o, lse, SEQUENCE, sent.o, sent.lse)
        return o, k.swapaxes(1, 2), v.swapaxes(1, 2)

    def _random(self, spec: P, kv_heads: int, R: int, Z: int) -> tuple[Array, Array, Array]:
        shapes = [(self.config.num_heads, R), (kv_heads, R), (kv_heads, Z)]
        q, k, v = (
            normal(self.mesh, spec, (1, self.length, *shape), seed=seed) for seed, shape in enumerate(shapes)
        )
        return q, k, v


def _on(mesh: Mesh, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
