"""Transformer: cached = uncached, chunked = whole, ragged = one by one; arrays are physically smaller."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPT, TinyModel

from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.methods.coded import Settings
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import duplicate_single_token
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan, LayerRanks

LENGTHS = np.array([70, 33, 50])


@jax.jit
def extend(network, cache, tokens, end):
    return network.extend(cache, tokens, end)


def replay(network, tokens, pieces):
    """Return logits [B, T, V] of right-padded rows, after prefill in chunks and decoding token by token."""
    B, T = tokens.shape
    cache = network.new_cache(batch=B, capacity=96)
    logits = np.full((B, T, network.config.vocab_size), np.nan, np.float32)
    prompts, held = LENGTHS - 3, np.zeros(B, int)
    for width in [*pieces, *[1] * (T - sum(pieces) + 3)]:
        end = np.minimum(held + width, prompts if width > 1 else LENGTHS)
        columns = np.minimum(held[:, None] + np.arange(width), T - 1)
        piece = jnp.asarray(np.take_along_axis(tokens, columns, 1))
        hidden, cache = extend(network, cache, piece, jnp.asarray(end))
        found = np.asarray(network.embeddings.unembed(hidden))
        for row in range(B):
            logits[row, held[row] : end[row]] = found[row, : end[row] - held[row]]
        held = end
    return logits


@pytest.mark.parametrize("pieces", [(70,), (16, 48)])
@pytest.mark.full
def test_ranks_per_layer(tiny: TinyModel, pieces):
    ranks = (LayerRanks(16, 16), LayerRanks(16, 32), LayerRanks(32, 16))
    plan = CompressionPlan(ranks, tiny.config.num_kv_heads, 32, sinks=1, window=5)
    network = tiny.model(plan).network
    tokens = tiny.tokens(3, 70)
    whole = np.asarray(network(jnp.asarray(tokens)))
    cached = replay(network, tokens, pieces)
    for row, length in enumerate(LENGTHS):
        assert np.abs(cached[row, :length] - whole[row, :length]).max() <= 1e-5 * np.abs(whole).max()


@pytest.mark.matrix("llama")
def test_only_the_last_token_passes_the_end_of_the_last_layer(tiny: TinyModel):
    network, tokens, end = tiny.dense, jnp.asarray(tiny.tokens(3, 32)), jnp.array([32, 9, 20])
    cache = network.new_cache(batch=3, capacity=64)

    def compile_step(step):
        return jax.jit(step).lower(cache, tokens, end).compile()

    whole, last = map(compile_step, (network.extend, network.extend_last))
    (hidden, extended), (found, other) = (program(cache, tokens, end) for program in (whole, last))
    np.testing.assert_allclose(found, hidden[jnp.arange(3), end - 1], rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, extended, other)
    # Output projection and feed-forward of 31 of 32 tokens are left out, and little else is added.
    block = network.layers[-1]
    weights = sum(leaf.size for leaf in jax.tree.leaves((block.attention.o, block.mlp)) if leaf.ndim > 1)
    saved = whole.cost_analysis()["flops"] - last.cost_analysis()["flops"]
    assert saved == pytest.approx(2 * weights * 3 * 31, rel=0.05)


def test_arrays_from_a_checkpoint_are_put_on_the_device(tiny_opt: TinyModel):
    # A NumPy array cannot be indexed inside `jax.lax.map`, as the K-means route does.
    host = jax.tree.map(np.asarray, (tiny_opt.embeddings, tiny_opt.layers))
    network = Transformer(tiny_opt.config, CompressionPlan.full(tiny_opt.config), *host)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(network))


@pytest.mark.matrix
def test_prefill_is_one_chunk(tiny: TinyModel):
    network = tiny.model(CompressionPlan.uniform(tiny.config, qk=16, v=16, window=8, sinks=2)).network
    tokens, end = jnp.asarray(tiny.tokens(2, 40)), jnp.array([40, 17])
    last, cache = network.prefill(tokens, end, capacity=48)
    hidden, extended = extend(network, network.new_cache(batch=2, capacity=48), tokens, end)
    np.testing.assert_allclose(last, hidden[jnp.arange(2), end - 1], atol=1e-5)
    assert cache.lengths.tolist() == extended.lengths.tolist() == [40, 17]


def test_refusals_of_a_network_on_one_device_and_on_a_mesh(tiny: TinyModel):
    network = tiny.model(CompressionPlan.full(tiny.config)).network
    tokens, end = jnp.asarray(tiny.tokens(1, 8)), jnp.array([8])
    with pytest.raises(NotImplementedError, match="compile_prefill: needs a network on a mesh"):
        network.compile_prefill(tokens, end, capacity=8)
    with pytest.raises(NotImplementedError, match="read_prompt: runs on one device, not on a mesh"):
        network.on_mesh(MeshConfig().create()).read_prompt(tokens, end, capacity=8)


@pytest.mark.full
def test_a_row_does_not_see_its_batch(tiny: TinyModel):
    plan = CompressionPlan.uniform(tiny.config, qk=16, v=16, window=8, sinks=2)
    network = tiny.model(plan).network
    tokens = jnp.asarray(tiny.tokens(3, 40))
    together = network(tokens)
    alone = jnp.concatenate([network(row[None]) for row in tokens])
    np.testing.assert_allclose(together, alone, atol=1e-5 * float(jnp.abs(alone).max()))


def test_arrays_without_a_window_are_smaller(tiny: TinyModel):
    network = tiny.model(CompressionPlan.uniform(tiny.config, qk=16, v=16)).network
    D, N, K = 64, tiny.config.num_heads, tiny.config.num_kv_heads
    for attention in (layer.attention for layer in network.layers):
        assert attention.v[...].shape == (D, K, 16)
        assert attention.o[...].shape == (N, 16, D)
        if not tiny.config.is_rotary:
            assert attention.q[...].shape == (D, N, 16)
            assert attention.k[...].shape == (D, K, 16)
            assert attention.q_rotation is None
        else:
            assert attention.q_rotation[...].shape == (K, 32, 16)


def test_folded_at_full_rank_is_the_same_program(tiny_opt: TinyModel):
    rotated = tiny_opt.model(CompressionPlan.full(tiny_opt.config)).network
    tokens = jnp.asarray(tiny_opt.tokens(1, 16))

    def program(network):
        return str(jax.make_jaxpr(lambda n, t: n(t))(network, tokens))

    assert program(rotated) == program(tiny_opt.dense)


def test_a_mean_that_values_leave_out_needs_no_bits():
    # Values have a common part that is much larger than what differs.
    tiny = TinyModel(OPT)
    for layer in tiny.layers:
        layer["attention"]["v_bias"] += 20
    full = CompressionPlan.full(OPT)
    tiny.dense = Transformer(OPT, full, tiny.embeddings, tiny.layers)
    settings = Settings(bits_k=8, bits_v=3, index=0, read=0)
    plan = CompressionPlan.uniform(OPT, qk=OPT.head_dim, v=OPT.head_dim, window=8, sinks=2)
    layers = tuple(replace(ranks, settings=settings) for ranks in plan.layers)
    plan = replace(plan, method="coded", settings=settings, layers=layers)
    tokens = tiny.tokens(2, 48)
    expected = window_nll(tiny.dense, tokens)

    def lose(center: bool) -> float:
        network = tiny.model(plan, tiny.basis(center=center)).network
        return np.abs(window_nll(network, tokens) - expected).max()

    assert lose(center=True) < lose(center=False) / 3


@pytest.mark.parametrize("kind", ["balanced", "stacked", "pairs"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.matrix
def test_full_rank_in_another_basis_is_the_same_model(tiny: TinyModel, kind, center):
    if kind == "pairs" and not tiny.config.is_rotary:
        pytest.skip("pairs are for rotary models")
    basis = tiny.basis(qk=kind, vo="balanced", center=center)
    plan = CompressionPlan.full(tiny.config)
    rotated = tiny.model(plan, basis).network
    tokens = jnp.asarray(tiny.tokens(2, 48))
    expected, out = np.asarray(tiny.dense(tokens)), np.asarray(rotated(tokens))
    condition = max(basis.qk_condition.max(), basis.vo_condition.max())
    assert np.abs(out - expected).max() <= 32 * 1.2e-7 * condition * np.abs(expected).max()

    def cached_keys(network):
        cache = network.new_cache(batch=2, capacity=48)
        _, cache = network.extend(cache, tokens, jnp.array([48, 48]))
        return np.asarray(cache.layers[0].k)

    assert np.abs(cached_keys(rotated) - cached_keys(tiny.dense)).max() > 0.1


@pytest.mark.full
def test_truncation_costs_what_was_truncated(tiny: TinyModel):
    # With fewer coordinates the error grows; a window reduces it.
    tokens = jnp.asarray(tiny.tokens(2, 64))
    expected = np.asarray(tiny.dense(tokens))
    basis = tiny.basis()

    def error(**plan):
        network = tiny.model(CompressionPlan.uniform(tiny.config, **plan), basis).network
        return np.abs(np.asarray(network(tokens)) - expected).mean()

    assert error(qk=16, v=16) > error(qk=16, v=16, window=32) > error(qk=32, v=32, window=32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_single_token_has_the_product_of_one_of_many(dtype):
    # The error is at most half a unit of the dtype, as with a second token.
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((2, 1, 96), (96, 4, 32)))
    exact = np.einsum("BTD,DNH->BTNH", *(np.asarray(each, np.float64) for each in (x, weight)))
    for rows in (x, x[:1]):
        got = np.asarray(jnp.einsum("BTD,DNH->BTNH", duplicate_single_token(rows), weight), np.float64)
        expected = exact if len(rows) == 2 else exact[[0] * len(got)]
        step = float(jnp.finfo(dtype).eps) * np.abs(expected) / 2
        assert len(got) == (1 if len(rows) == 1 and dtype == "float32" else 2)
        assert (np.abs(got - expected) <= 1.02 * step + 1e-5).all()
