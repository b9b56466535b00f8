"""Tiles: one arithmetic for every token, in any chunks and in any batch."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax import methods
from zdc_jax.model.tiles import TILE, by_tiles
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1])
TOKENS = 40


def extend_in(network: Transformer, tokens: np.ndarray, widths: list[int]) -> np.ndarray:
    """Return the logits of the first sequence after chunks of these widths."""
    cache, begin, parts = network.new_cache(batch=len(tokens), capacity=TOKENS), 0, []
    for width in widths:
        chunk = jnp.asarray(tokens[:, begin : begin + width])
        hidden, cache = network.extend(cache, chunk, cache.lengths + width)
        parts.append(np.asarray(network.embeddings.unembed(hidden[0])))
        begin += width
    return np.concatenate(parts)


@pytest.mark.full
def test_logits_do_not_depend_on_chunks_or_other_sequences():
    tiny = TinyModel(CONFIG)
    settings = methods.settings_from_json("coded", {"bits_k": 3, "bits_v": 3, "bits_near": 8})
    plan = CompressionPlan.uniform(CONFIG, qk=32, v=32, sinks=2, window=8)
    plan = replace(plan, rotated=False, method="coded", settings=settings)
    network = Transformer(CONFIG, plan, tiny.embeddings, tiny.layers, reproducible=True)
    tokens = tiny.tokens(2, TOKENS)
    whole = extend_in(network, tokens[:1], [TOKENS])
    np.testing.assert_array_equal(extend_in(network, tokens, [TOKENS - 1, 1]), whole)
    plain = Transformer(CONFIG, plan, tiny.embeddings, tiny.layers)
    np.testing.assert_allclose(plain(jnp.asarray(tokens[:1]))[0], whole, atol=0.05)


def test_tiles_cover_all_tokens():
    x = np.arange(2 * (TILE + 3) * 5, dtype=np.float32).reshape(2, TILE + 3, 5)
    found = by_tiles(lambda tile: {"twice": 2 * tile, "first": tile[..., 0]}, jnp.asarray(x))
    np.testing.assert_array_equal(found["twice"], 2 * x)
    np.testing.assert_array_equal(found["first"], x[..., 0])
