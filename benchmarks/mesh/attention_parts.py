"""One layer's attention on a mesh in parts: exchange, recent and older tokens, and their overlap.

The module also checks numerics at the timed length, and measures links and single devices for the partition
search of KV-Runahead.
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

from benchmarks.mesh.rivals.exchanges import zigzag_order
from benchmarks.mesh.rivals.methods import ZIGZAG, Method, attention_of, handed_bytes
from benchmarks.mesh.rivals.partition import ChunkCost, Partition, in_eights, searched
from benchmarks.mesh.rivals.runahead import RunaheadTransformer, link_bandwidth, measure_partitions
from zdc_jax.axes import Array
from zdc_jax.config import ModelConfig
from zdc_jax.ops.attention import Implementation, self_attention
from zdc_jax.parallel.attention import attend_to_fetched, fetch_near
from zdc_jax.parallel.exchange import gather_head_groups, kv_copies, scatter_head_groups
from zdc_jax.parallel.far import FarKeys, near_set
from zdc_jax.parallel.mesh import SEQUENCE, whole_on
from zdc_jax.parallel.payload import NATIVE, Formats, Payload, scale_for
from zdc_jax.plan import CompressionPlan, LayerRanks


def exact_rows(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    ranks: LayerRanks,
    near: tuple[int, int],
) -> np.ndarray:
    """Return o [S, n, H] in float64 of queries [S, n, H] at `positions` [S] that share one KV head.

    Args:
      k: keys of all tokens in order, [T, H].
      v: values of all tokens in order, [T, H].
      scale: factor on the scores.
      ranks: coordinates of older keys and values; the others count as zero.
      near: sinks and window, whose keys count with all H coordinates.
    """
    k, v = k.astype(np.float64), v.astype(np.float64)
    (sinks, window), (R, Z) = near, (ranks.qk, ranks.v)
    t, j = positions[:, None], np.arange(len(k))[None]
    is_near = (j < sinks) | (j > t - window)
    o = np.zeros(q.shape)
    for head in range(q.shape[1]):
        rows = q[:, head].astype(np.float64)
        far_scores = rows[:, :R] @ k[:, :R].T
        scores = np.where(is_near, far_scores + rows[:, R:] @ k[:, R:].T, far_scores) * scale
        scores = np.where(j <= t, scores, -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        o[:, head, :Z] = p @ v[:, :Z]
        o[:, head, Z:] = np.where(is_near, p, 0) @ v[:, Z:]
    return o


TOKENS, HEADS, HEADS_FIRST = P(None, SEQUENCE), P(None, None, SEQUENCE), P(None, SEQUENCE)
"""Layouts of [B, T, N, H] by token and by head, and of [B, N, T] and [B, N, T, H] by head."""


SAMPLED = 16
"""Rows of each device whose numerics are compared: the first, the last, and others evenly between."""
TOLERANCE: dict[Payload, float] = {"native": 0.005, "float8": 0.08, "coded": 0.25}
"""Largest relative error of a head, at any length.

bf16 rounds three times: probabilities, the result, and partial results that are merged. That gives at most
  0.31 % on a CPU, so a head that is off by 1 % fails. Normal numbers lose 2.6 % in e4m3 and about 10 % in 4
  bits. Values and outputs add as much each, and scores add twice as much in square. On a CPU the sum is up to
  5.7 % and 17 %.
"""


def seconds_each(f: Callable[..., Any], *args: Any, rounds: int = 5, steps: int = 5) -> list[float]:
    """Return wall seconds of a call, each a mean over `steps` calls dispatched without waiting."""
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
    """Return bytes a second that leave a device in a bare all-to-all of about `nbytes` on each device."""
    U = mesh.shape[SEQUENCE]
    exchange = partial(jax.lax.all_to_all, axis_name=SEQUENCE, split_axis=0, concat_axis=0)
    words = normal(mesh, P(SEQUENCE), (U * U, nbytes // U // 4), jnp.float32)
    times = seconds_each(_on(mesh, exchange, P(SEQUENCE), P(SEQUENCE)), words)
    return words.nbytes / U * (U - 1) / U / float(np.median(times))


def searched_partition(
    model: RunaheadTransformer, tokens: Array, layers: int, implementation: Implementation
) -> Partition:
    """Search a partition of prompts [1, T] over the model's devices.

    The cost is fitted to four pairs of chunks on the first device.

    Args:
      layers: layers of the whole model; `model` may have fewer.
    """
    length, (first, second) = tokens.shape[1], model.devices[:2]
    pair = RunaheadTransformer(model.networks[0], [first] * 2)
    eighths = [Partition((m * length // 8, n * length // 8)) for m, n in ((1, 1), (1, 4), (4, 4), (4, 2))]
    times = measure_partitions(pair, tokens, eighths, implementation=implementation, repeats=2)
    scale = layers / len(model.plan.layers)
    cost = ChunkCost.fit({partition: scale * each for partition, each in times.items()})

    def handed(end):
        return handed_bytes(model.plan, Partition((end, 1)), capacity=in_eights(length))[0]

    bandwidth = link_bandwidth(first, second)

    def link(end):
        return scale * handed(end) / bandwidth

    return searched(length, len(model.devices), cost, layers=layers, link=link)


def normal(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, seed: int = 0) -> Array:
    """Return random normal numbers, made on the devices that store them."""
    return _normal(NamedSharding(mesh, spec), shape, dtype)(np.int32(seed))


@cache
def _normal(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Callable[[np.int32], Array]:
    """Return a jitted function of the seed; cached, so that equal arrays compile once."""
    return jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype), out_shardings=sharding)


class AttentionParts:
    """Times of one layer's attention and its parts, on random arrays in the layout of a layer.

    The length T is a multiple of the devices along `sequence`, the only axis with several devices. All layers
    of `plan` are alike.
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
        self.near, self.payload = plan.near(0), payload
        self.formats = _formats(payload, config.num_kv_heads, self.ranks)
        of_plan, near = near_set(self.spec, self.formats, (config.head_dim,) * 2, length)
        scale = config.layers[0].score_scale(config.head_dim)
        self.keys = FarKeys(scale, *near, implementation, self.formats, of_plan)

    def names(self) -> list[str]:
        """Return the parts that this method has."""
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
        """Return wall seconds of one part, see `seconds_each`."""
        near, exchanged = (TOKENS, HEADS), (TOKENS, HEADS_FIRST, HEADS_FIRST)

        def both(*qkv):
            return (self._near(*qkv), self._exchange(*qkv))

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

    def numerics(self) -> dict[str, float]:
        """Return relative errors of attention against float64, in `SAMPLED` rows of each device.

        The arrays are those that `seconds` times. `row` is the largest error of one row of one head, ‖got -
        exact‖ / ‖exact‖. `head` is the largest root mean square of a head over its rows, so that short rows
        count as much as long ones.

        Raises:
          ArithmeticError: the error of a head exceeds the payload's `TOLERANCE`.
        """
        U, K, H = self.mesh.shape[SEQUENCE], self.config.num_kv_heads, self.config.head_dim
        t, n = self.length // U, self.config.num_heads // K
        own = np.unique(np.linspace(0, t - 1, SAMPLED).round().astype(int))
        rows = (np.arange(U)[:, None] * t + own).ravel()
        order = zigzag_order(self.length, U) if self.method in ZIGZAG else np.arange(self.length)
        on_each = partial(jax.jit, out_shardings=whole_on(self.mesh))
        sampled = on_each(lambda x: x[0, rows])
        of_head = on_each(lambda x, head: jax.lax.dynamic_index_in_dim(x[0], head, 1, keepdims=False))
        q, k, v = self._random(TOKENS, K, H, H)
        o = _on(self.mesh, self._attention, TOKENS, TOKENS)(q, k, v)
        sampled_q, got = (np.asarray(sampled(x), np.float64) for x in (q, o))
        del q, o
        in_order = np.argsort(order)
        errors = np.zeros((self.config.num_heads, len(rows)))
        for head in range(K):
            its_k, its_v = (np.asarray(of_head(x, np.int32(head)))[in_order] for x in (k, v))
            queries = slice(head * n, (head + 1) * n)
            exact = exact_rows(
                sampled_q[:, queries],
                its_k,
                its_v,
                order[rows],
                scale=self.keys.scale,
                ranks=self.ranks,
                near=self.near,
            )
            off = np.linalg.norm(got[:, queries] - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
            errors[queries] = off.T
        by_head = np.sqrt((errors**2).mean(1))
        worst_errors = {"head": float(by_head.max()), "row": float(errors.max())}
        if not worst_errors["head"] <= (allowed := TOLERANCE[self.payload]):  # NaN fails too.
            worst = int(np.argmax(by_head))
            raise ArithmeticError(
                f"head {worst} is off by {worst_errors['head']:.3%}; {allowed:.1%} is allowed"
            )
        return worst_errors

    def _attention(self, q: Array, k: Array, v: Array) -> Array:
        payload = {} if self.formats is NATIVE else {"formats": self.formats}
        options = {"spec": self.spec, "implementation": self.keys.implementation, **payload}
        return attention_of(self.method)(q, k, v, scale=self.keys.scale, **options)[0]

    def _near(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        if not self.keys.of_plan:
            q, k, v = q[..., : self.ranks.qk], k[..., : self.ranks.qk], v[..., : self.ranks.v]
        return attend_to_fetched(q, fetch_near(k, v, self.keys), self.keys)

    def _far(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        if self.keys.are_all:
            return self_attention(q, k, v, scale=self.keys.scale, implementation=self.keys.implementation)
        return self.keys.attend(q, k, v)

    def _exchange(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Run both all-to-alls with their relayouts; values of q stand in for the output of attention."""
        H, late = self.config.head_dim, self.method == "late_ulysses"
        ranks = LayerRanks(H, H) if late else self.ranks
        first = q[..., : ranks.qk], k[..., : ranks.qk], v[..., : ranks.v]
        sent = self.formats
        ((q, k, v),) = scatter_head_groups(first, SEQUENCE, (sent.q, sent.k, sent.v))
        o = jnp.tile(q, -(-ranks.v // ranks.qk))[..., : ranks.v]
        lse = None if self.keys.are_all or late else q[..., 0].swapaxes(1, 2).astype(jnp.float32)
        o, _ = gather_head_groups([(o, lse)], SEQUENCE, sent.o, sent.lse)
        return o, k.swapaxes(1, 2), v.swapaxes(1, 2)

    def _random(self, spec: P, kv_heads: int, R: int, Z: int) -> tuple[Array, Array, Array]:
        shapes = [(self.config.num_heads, R), (kv_heads, R), (kv_heads, Z)]
        q, k, v = (
            normal(self.mesh, spec, (1, self.length, *shape), seed=seed) for seed, shape in enumerate(shapes)
        )
        return q, k, v


def _formats(payload: Payload, kv_heads: int, ranks: LayerRanks) -> Formats:
    """Return the formats of a payload for normal numbers."""
    if payload == "native":
        return NATIVE
    if payload == "coded":
        return Formats.coded(ranks.qk, ranks.v)
    unit = (scale_for(np.ones((kv_heads, width))) for width in (ranks.qk, ranks.qk, ranks.v))
    return Formats.float8(*(jnp.asarray(scale, jnp.bfloat16) for scale in unit))


def _on(mesh: Mesh, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
