"""Prompts read by lists of key blocks: attention is that of a mask, and pieces give what the whole gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality.block_caches import ListedBlocks, list_attention
from benchmarks.quality.key_blocks import BlockChoice, as_lists
from zdc_jax.cache.spec import Call
from zdc_jax.ops.xla import chosen_attention

B, K, N, H, S = 2, 2, 4, 16, 64
CALL = Call(H**-0.5)
CHOICE = BlockChoice("mass", 0.8, coordinates=8, samples=4, blocks=(16, 8))


def tokens(T: int = S) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.sampled
def test_attention_is_that_of_a_mask():
    """Random lists for queries that start anywhere; a list may be empty."""
    q, k, v = tokens()
    q, k, v, start = q[:, :40], k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.array([5, 24])
    listed = np.random.default_rng(1).random((B, K, 3, 8)) < 0.5
    listed[0, 0, 1] = False
    found = list_attention(q, k, v, as_lists(jnp.asarray(listed)), start, scale=CALL.scale, blocks=(16, 8))
    t = start[:, None] + jnp.arange(40)
    visible = jnp.repeat(jnp.repeat(listed, 16, axis=2)[:, :, :40], 8, axis=3)
    visible &= (jnp.arange(S) <= t[..., None])[:, None]
    for one, other in zip(found, chosen_attention(q, k, v, visible, scale=CALL.scale), strict=True):
        seen = np.asarray(one) > -1e30
        np.testing.assert_allclose(np.where(seen, one, 0), np.where(seen, other, 0), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [None, CHOICE])
@pytest.mark.sampled
def test_pieces_give_what_the_whole_gives(choice):
    """And the state tells how many blocks were listed."""
    spec = ListedBlocks(
        num_kv_heads=K, head_dim=H, dtype="float32", R=H, Z=H, choice=choice, blocks=CHOICE.blocks
    )
    attend = jax.jit(partial(spec.attend, aux=None, call=CALL))

    def run(pieces: list[int]):
        state, found, start = spec.create(B, S), [], 0
        for count in pieces:
            x = [each[:, start : start + count] for each in tokens()]
            positions = jnp.broadcast_to(jnp.arange(start, start + count), (B, count))
            done = attend(state, *x, positions, jnp.full(B, start + count))
            state, start = done.state, start + count
            found.append(np.asarray(done.o))
        return np.concatenate(found, 1), np.asarray(state.listed)

    (whole, listed), (pieces, of_pieces) = run([S]), run([32, 32])
    np.testing.assert_allclose(whole, pieces, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(listed, of_pieces)
    all_blocks = np.broadcast_to([2, 4, 6, 8], listed.shape)
    assert (listed == all_blocks).all() if choice is None else (listed < all_blocks).any()
