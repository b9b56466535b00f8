"""A token of one row, compiled for an H200: products with weights read those once, and write no terms."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compiled import device
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.bench_coded_models import coded_plan
from benchmarks.bench_generate import LLAMA_2_7B, build
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.plan import CompressionPlan

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
CONFIG = replace(LLAMA_2_7B, layers=LLAMA_2_7B.layers[:2], num_kv_heads=8, vocab_size=512)
TOKENS = 8192
LONG = 512
"""Terms that one thread may add up."""


PLANS = {
    "dense": CompressionPlan.full(CONFIG),
    "ranks": CompressionPlan.uniform(CONFIG, qk=64, v=96, sinks=4, window=128),
    "coded": coded_plan(CONFIG, "whole", TOKENS),
}


@pytest.mark.aot
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("name", PLANS)
def test_products_with_weights_are_no_sums(name):
    """XLA makes a product of one row a sum: its terms go through memory, or a thread adds them up alone."""
    step = compiled_step(PLANS[name])
    of_keys = 2 * CONFIG.embed_dim * CONFIG.num_kv_heads * CONFIG.head_dim
    assert step.memory_analysis().temp_size_in_bytes < of_keys / 2
    assert lonely_sums(step.as_text()) == []


def compiled_step(plan: CompressionPlan) -> jax.stages.Compiled:
    """A step of one row."""
    specs = plan.layer_caches("bfloat16")

    def network():
        made = build("post_rope", CONFIG)
        made.plan = plan
        return made

    def cache():
        states = tuple(spec.create(1, TOKENS) for spec in specs)
        return KVCache(states, jnp.zeros(1, jnp.int32), specs, TOKENS)

    def step(network, cache, token):
        hidden, cache = network.extend(cache, token, cache.lengths + 1, "pallas")
        return hidden, cache

    sharding = jax.sharding.SingleDeviceSharding(device())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    shapes = [*map(jax.eval_shape, (network, cache)), jax.ShapeDtypeStruct((1, 1), jnp.int32)]
    leaves, tree = jax.tree.flatten(shapes)
    program = jax.jit(lambda leaves: step(*jax.tree.unflatten(tree, leaves)))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = program.trace([placed(leaf) for leaf in leaves])
        return traced.lower(lowering_platforms=("cuda",)).compile()


def lonely_sums(text: str) -> list[str]:
    """Reductions over more than `LONG` numbers inside of a loop or a concatenation: a thread does each."""
    found = []
    for name, body in re.findall(r"\n%(\S+) \([^\n]*\{\n(.*?)\n\}", text, re.DOTALL):
        shapes = dict(re.findall(r"%(\S+) = \w+\[([\d,]*)\]", body))
        kind = re.search(rf"kind=(\w+), calls=%{re.escape(name)}[,\s]", text)
        for line in body.splitlines():
            match = re.search(r"= \S+ reduce\(%([^,)]+),.*?dimensions=\{([\d,]+)\}", line)
            if match is None or kind is None:
                continue
            sizes = shapes[match[1]].split(",")
            terms = math.prod(int(sizes[int(axis)]) for axis in match[2].split(","))
            if terms > LONG and (kind[1] == "kLoop" or "concatenate(" in body):
                found.append(line.strip())
    return found
