"""Prompts that are read exactly and compressed afterwards."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, OPT, TinyModel

from zdc_jax.plan import CompressionPlan

LENGTHS = np.array([40, 23])


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, LLAMA.vocab_size, (2, 40)).astype(np.int32)


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("method", ["zdc", "int8", "palu"])
@pytest.mark.matrix("palu-opt")
def test_a_prompt_sees_itself_as_the_unmodified_model_does(config, method):
    # The plan costs nothing within the prompt.
    plan = CompressionPlan.uniform(config, qk=16, v=16, window=8, sinks=2)
    network = TinyModel(config).model(replace(plan, method=method, settings=None)).network
    exact = TinyModel(config).model(CompressionPlan.full(config)).network
    end = jnp.asarray(LENGTHS)
    hidden, cache = network.read_prompt(jnp.asarray(tokens()), end, capacity=48)
    expected = np.asarray(exact.hidden(jnp.asarray(tokens())))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(hidden[row, :length], expected[row, :length], atol=1e-4, rtol=1e-4)
    assert cache.lengths.tolist() == LENGTHS.tolist()
    assert cache.bytes() == network.plan.bytes(48, 2, "float32")


@pytest.mark.full
def test_what_is_left_is_the_cache_that_pieces_leave():
    # At full rank, both ways of reading give the same cache, and so the same next tokens.
    network = TinyModel(LLAMA).model(CompressionPlan.full(LLAMA)).network
    end, piece = jnp.asarray(LENGTHS), jnp.asarray(tokens())
    _, exact = network.read_prompt(piece, end, capacity=48)
    _, cached = network.extend(network.new_cache(batch=2, capacity=48), piece, end)
    new = jnp.asarray(tokens()[:, :3])
    found, _ = network.extend(exact, new, end + 3)
    expected, _ = network.extend(cached, new, end + 3)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
