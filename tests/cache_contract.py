"""Contract of every cache method: one entry per method here, and tests for each clause that it declares.

The tests call layers as the model does, but without norms and feed-forward, so that caches also see zero or
huge inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax import methods
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.specs.spec import Call, Clause, LayerCacheSpec, NewTokens
from zdc_jax.config import ModelConfig
from zdc_jax.model.attention import Attention
from zdc_jax.plan import CompressionPlan, LayerRanks

BLOCK = 8
"""Positions of a block of token classes. For all methods, chunks begin at multiples of it."""
ROWS, PIECE, CAPACITY = 3, 3 * BLOCK, 6 * BLOCK
"""Batch size, tokens of a chunk and capacity of all tests.

Each call has a chunk or a single token per sequence. Few shapes save compile time.
"""
SHORT_LLAMA, SHORT_OPT = (replace(config, layers=config.layers[:2]) for config in (LLAMA, OPT))
SLIDING = replace(SHORT_LLAMA, layers=(LLAMA.layers[0], replace(LLAMA.layers[0], window=12)))


def uniform(config: ModelConfig, **ranks: int) -> CompressionPlan:
    return CompressionPlan.uniform(config, **ranks)


def method(config: ModelConfig, name: str, settings: dict | None = None, **ranks: int) -> CompressionPlan:
    """Return a plan of a method, with all coordinates unless ranks are named."""
    H = config.head_dim
    plan = uniform(config, **({"qk": H, "v": H} | ranks))
    return replace(plan, method=name, settings=methods.settings_from_json(name, settings or {}))


def shifted(config: ModelConfig, name: str, settings: dict | None = None, **ranks: int) -> CompressionPlan:
    """Return `method` with keys that leave out their mean."""
    return method(config, name, settings, **ranks).with_shift([True] * config.num_layers)


def coded_by_layer(config: ModelConfig, memory: str) -> CompressionPlan:
    """Return a plan with a layer that reads all, one that chooses pages, and one that follows its choice.

    memory: where the last layer stores far tokens.
    """
    everything = {"read": 0, "index": 8, "bits_index": 5}
    follower = {"page": 4, "index": 0, "memory": memory, "bits_near": 8}
    H, rows = config.head_dim, (everything, CODED | {"page": 4}, CODED | follower)
    own = (methods.settings_from_json("coded", row) for row in rows)
    layers = tuple(LayerRanks(H, 16, settings=settings) for settings in own)
    return replace(method(config, "coded", **NEAR), layers=layers)


NEAR = {"window": 8, "sinks": 2}
EVICTING = {"kept": 8, "block": BLOCK}
"""Settings of methods that evict: of 38 tokens that are far in the end, 8 remain."""
QUEST, LOKI = {"read": 12, "page": 4}, {"read": 12, "index": 8}
DUO = {"heads": [[1], []]}
CLASSES = {"first": 0.4, "last": 0.4, "block": BLOCK}
CODED = {"index": 8, "read": 12, "bits_k": 3, "bits_v": 4, "bits_index": 4}
METHODS: dict[str, tuple[ModelConfig, Callable[..., CompressionPlan]]] = {
    "plain": (SHORT_OPT, partial(uniform, qk=32, v=32)),
    "truncated": (SHORT_OPT, partial(uniform, qk=16, v=16)),
    "prefix ring": (SHORT_LLAMA, partial(uniform, qk=16, v=16, window=8, sinks=2)),
    "sinks alone": (SHORT_LLAMA, partial(uniform, qk=16, v=32, sinks=3)),
    "window alone": (SHORT_OPT, partial(uniform, qk=0, v=0, window=20, sinks=2)),
    "window past the end": (SHORT_LLAMA, partial(uniform, qk=16, v=16, window=300, sinks=2)),
    "sliding layer": (SLIDING, partial(uniform, qk=32, v=32)),
    "sliding layer under a plan": (SLIDING, partial(uniform, qk=16, v=16, window=8, sinks=2)),
    "StreamingLLM": (SHORT_LLAMA, partial(method, name="window", window=8, sinks=2)),
    "fp8": (SHORT_LLAMA, partial(method, name="fp8")),
    "int8 of a rank and window": (SHORT_OPT, partial(method, name="int8", qk=16, v=16, window=8, sinks=2)),
    "h2o of a rank": (SHORT_LLAMA, partial(method, name="h2o", settings=EVICTING, qk=16, v=16, **NEAR)),
    "knorm of a rank alone": (SHORT_OPT, partial(method, name="knorm", settings=EVICTING, qk=16, v=16)),
    "snapkv": (SHORT_LLAMA, partial(method, name="snapkv", settings=EVICTING | {"observed": 5}, **NEAR)),
    "tova": (SHORT_OPT, partial(method, name="tova", settings=EVICTING, **NEAR)),
    "quest of a rank": (SHORT_OPT, partial(method, name="quest", settings=QUEST, qk=16, v=16, window=8)),
    "loki": (SHORT_LLAMA, partial(method, name="loki", settings=LOKI, window=8, sinks=2)),
    "coded": (SHORT_LLAMA, partial(method, name="coded", settings=CODED, qk=16, **NEAR)),
    "coded on the host": (
        SHORT_LLAMA,
        partial(method, name="coded", settings=CODED | {"memory": "host"}, qk=16, **NEAR),
    ),
    "coded, near tokens too": (
        SHORT_LLAMA,
        partial(method, name="coded", settings=CODED | {"read": 0, "bits_near": 8}, qk=16, **NEAR),
    ),
    "coded, shifted": (
        SHORT_LLAMA,
        partial(shifted, name="coded", settings=CODED | {"read": 0, "bits_near": 8}, qk=16, **NEAR),
    ),
    "choosing, shifted": (SHORT_LLAMA, partial(shifted, name="coded", settings=CODED, **NEAR)),
    "prefix ring, shifted": (SHORT_LLAMA, partial(shifted, name="zdc", qk=16, v=16, **NEAR)),
    "kivi, shifted": (
        SHORT_LLAMA,
        partial(shifted, name="kivi", settings={"bits": 3, "group": 16}, window=20),
    ),
    "coded by layer": (OPT, partial(coded_by_layer, memory="device")),
    "coded by layer, on the host": (OPT, partial(coded_by_layer, memory="host")),
    "duo of a rank": (SHORT_OPT, partial(method, name="duo", settings=DUO, qk=16, v=16, window=8)),
    "palu": (SHORT_LLAMA, partial(method, name="palu", qk=16, v=16, window=8, sinks=2)),
    "palu without a window": (SHORT_LLAMA, partial(method, name="palu", qk=16, v=16)),
    "kivi of a rank": (
        SHORT_OPT,
        partial(method, name="kivi", settings={"bits": 3, "group": 16}, qk=16, v=16, window=20),
    ),
    "turboquant of a rank and window": (
        SHORT_OPT,
        partial(
            method, name="turboquant", settings={"bits_k": 3, "bits_v": 2}, qk=16, v=16, window=8, sinks=2
        ),
    ),
    "oscar": (SHORT_LLAMA, partial(method, name="oscar", settings={"group": 16}, **NEAR)),
    "oscar of a rank, shifted": (
        SHORT_LLAMA,
        partial(shifted, name="oscar", settings={"bits": 3}, qk=16, v=16, window=20),
    ),
    "oscar without a window": (SHORT_OPT, partial(method, name="oscar")),
    "oscar_free, shifted": (
        SHORT_LLAMA,
        partial(shifted, name="oscar_free", settings={"group": 16}, window=20, sinks=2),
    ),
    "gear of a rank": (
        SHORT_OPT,
        partial(method, name="gear", settings={"bits": 2, "group": 16}, qk=16, v=16, window=20),
    ),
    "token classes": (SHORT_LLAMA, partial(method, name="token_classes", settings=CLASSES)),
    "token classes and window": (
        SHORT_LLAMA,
        partial(method, name="token_classes", settings=CLASSES, **NEAR),
    ),
}


FAST = (
    "plain",
    "window alone",
    "sliding layer under a plan",
    "h2o of a rank",
    "quest of a rank",
    "coded, near tokens too",
    "kivi of a rank",
    "oscar",
)
"""Entries that together reach every line; `make test` runs these, `make test-all` runs all."""


class Stack(NamedTuple):
    """Attention layers, their cache specs, and the plan that they follow."""

    layers: tuple[Attention, ...]
    specs: tuple[LayerCacheSpec, ...]
    plan: CompressionPlan
    width: int
    table: np.ndarray | None = None

    def in_pages(self, page: int, table: np.ndarray) -> "Stack":
        """Return the same layers with tokens in pages of this size; table [ROWS, CAPACITY / page]."""
        paged = partial(Paged.of, page=page, pages=2 * table.size)
        return self._replace(specs=tuple(map(paged, self.specs)), table=table)

    @property
    def attempts(self) -> int:
        """Number of inputs that a test may try.

        Methods that round or choose have thresholds. In one input of twelve, a value is so close to a
        threshold that the processor's order of summation decides. If something is wrong, all inputs show it.
        """
        return 1 if self.plan.method == "zdc" else 3

    def declares(self, clause: Clause) -> None:
        """Skip a test of a clause that a layer's method does not declare."""
        if not all(clause in spec.clauses for spec in self.specs):
            pytest.skip(f"the method does not declare the clause {clause!r}")

    def inputs(self, seed: int = 0) -> np.ndarray:
        """Return random hidden states [ROWS, CAPACITY, D]."""
        return np.random.default_rng(seed).normal(size=(ROWS, CAPACITY, self.width)).astype(np.float32)

    def whole(self, x: np.ndarray) -> np.ndarray:
        """Run the layers on whole sequences, without a cache."""
        x, aux = jnp.asarray(x), None
        for layer, spec in zip(self.layers, self.specs, strict=True):
            x, aux = _whole(layer, spec, x, aux)
        return np.asarray(x)

    def create(self) -> list:
        return [spec.create(ROWS, CAPACITY) for spec in self.specs]

    def extend(
        self, states: list, x: np.ndarray, held: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray, list]:
        """Append the next new[b] tokens of x [B, S, D] to the held[b] tokens of sequence b.

        Returns outputs and extended states.
        """
        T = PIECE if max(new) > 1 else 1
        piece = np.zeros((len(x), T, x.shape[2]), np.float32)
        for row, (start, count) in enumerate(zip(held, new, strict=True)):
            piece[row, :count] = x[row, start : start + count]
        positions, end = jnp.asarray(held[:, None] + np.arange(T)), jnp.asarray(held + new)
        y, aux, longer = jnp.asarray(piece), None, []
        for layer, spec, state in zip(self.layers, self.specs, states, strict=True):
            y, aux, state = _extend(layer, spec, state, y, aux, positions, end, self.table)
            longer.append(state)
        return np.asarray(y), longer

    def run(self, x: np.ndarray, schedule: list[list[int]]) -> np.ndarray:
        """Run a schedule and return outputs [B, S, D], NaN where none are computed.

        schedule: one entry per call, with the number of tokens of each sequence.
        """
        states = self.create()
        held, found = np.zeros(len(x), int), np.full(x.shape, np.nan, np.float32)
        for new in schedule:
            y, states = self.extend(states, x, held, np.array(new))
            for row, count in enumerate(new):
                found[row, held[row] : held[row] + count] = y[row, :count]
            held = held + np.array(new)
        return found


@partial(jax.jit, static_argnames="spec")
def _extend(layer, spec, state, x, aux, positions, end, table):
    q, k, v = spec.project(layer, x, positions, None)
    done = spec.attend(state, q, NewTokens(k, v, positions, end), aux, Call(layer.scale, table=table))
    return x + layer.output(done.o), done.aux, done.state


@partial(jax.jit, static_argnames="spec")
def _whole(layer, spec, x, aux):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q, k, v = spec.project(layer, x, positions, None)
    new = NewTokens(k, v, positions, jnp.full(len(x), x.shape[1]))
    done = spec.attend_whole(q, new, aux, Call(layer.scale))
    return x + layer.output(done.o), done.aux


@cache
def stack(name: str) -> Stack:
    config, plan_of = METHODS[name]
    plan = plan_of(config)
    network = TinyModel(config).model(plan).network
    layers = tuple(block.attention for block in network.layers)
    return Stack(layers, plan.layer_caches("float32"), plan, config.embed_dim)


def specs_of(name: str) -> tuple[LayerCacheSpec, ...]:
    config, plan_of = METHODS[name]
    return plan_of(config).layer_caches("float32")


def is_aligned(specs: tuple[LayerCacheSpec, ...]) -> bool:
    """Return whether chunks must begin with a block."""
    return any(spec.alignment > 1 for spec in specs)
