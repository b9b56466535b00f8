"""A network computes the same with a cache whose layers share arrays, to the last bit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.model.models import LLAMA_2_7B, build
from zdc_jax import methods
from zdc_jax.cache.paging.paged import Paged
from zdc_jax.cache.tails import TailArrays
from zdc_jax.engine.layout import Layout
from zdc_jax.model.mixed_batch import Place, extend_together
from zdc_jax.plan import CompressionPlan

SMALL = {"embed_dim": 256, "ffn_dim": 512, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 512}
CONFIG = replace(LLAMA_2_7B, layers=LLAMA_2_7B.layers[:3], **SMALL)
ROWS, PAGE, LONGEST, CHUNK = 4, 128, 512, 256


def make_network():
    settings = methods.named("coded").Settings(index=0, read=0, bits_near=8)
    plan = CompressionPlan.uniform(CONFIG, qk=128, v=128, sinks=4, window=64)
    layers = tuple(replace(ranks, settings=settings) for ranks in plan.layers)
    return build(CONFIG, replace(plan, method="coded", settings=settings, layers=layers), rotated=True)


def run(network, *, join: bool):
    """Read chunks of two sequences, each with tokens of others, then single tokens; return all results."""
    given = {"rows": ROWS, "longest": LONGEST, "page": PAGE, "cache_tokens": ROWS * LONGEST, "reuse": True}
    layout = Layout.of(network.layer_caches, **given)
    cache = network.new_cache(batch=ROWS, capacity=layout.capacity, specs=layout.specs, join=join)
    assert join == bool(cache.places)
    pages = np.random.default_rng(0).permutation(layout.pages).astype(np.int32)
    cache = replace(cache, table=jnp.asarray(pages.reshape(ROWS, -1)))
    tails, rng, results = TailArrays.empty(cache, 4, in_place=True), np.random.default_rng(1), []
    extend = jax.jit(partial(extend_together, longest=CHUNK))
    lengths = np.zeros(ROWS, np.int32)
    for row in (2, 0, 2, 3):
        count, begin = CHUNK - 8 * row, lengths[row]
        # The second entry is empty: outside the batch.
        numbers = [row, ROWS], [begin, 0], [begin + count, 0], [PAGE, 0], [row, -1]
        place = Place(*(jnp.array(each, jnp.int32) for each in numbers))
        tokens = jnp.asarray(rng.integers(0, 512, CHUNK), jnp.int32)
        decodes = (lengths > 0) & (np.arange(ROWS) != row)
        lengths = lengths + decodes
        result = extend(
            network, cache, place, tokens, tokens[:ROWS], jnp.asarray(lengths, jnp.int32), tails=tails
        )
        lengths = lengths + count * (np.arange(ROWS) == row)  # JAX may still read the array above.
        cache, tails = result.cache, result.tails
        results += [network.finish(result.half)[0, :count], result.ends[:1], result.tokens[decodes]]
    for _ in range(3):
        tokens = jnp.asarray(rng.integers(0, 512, (ROWS, 1)), jnp.int32)
        hidden, cache = network.extend(cache, tokens, cache.lengths + (cache.lengths > 0))
        results.append(hidden[lengths > 0])
    stored = []
    for index, spec in enumerate(layout.specs):
        view = cache.of_layer(index)
        page, row = int(view.table[0, 0]) - pages[0], 0 if view.first is None else int(view.first)
        leaves = zip(jax.tree.leaves(view.state), spec.pooled(view.state), strict=True)
        stored += [leaf[page:][: layout.pages] if pool else leaf[row:][:ROWS] for leaf, pool in leaves]
    return results, stored, jax.tree.leaves(tails)


def check() -> None:
    network = make_network()
    for one, other in zip(run(network, join=True), run(network, join=False), strict=True):
        for found, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.gpu
def test_on_kernels():
    check()


@pytest.mark.full
def test_on_xla(monkeypatch):
    monkeypatch.setattr(Paged, "count_sharing", lambda self, layers, batch, capacity: min(2, layers))
    check()
