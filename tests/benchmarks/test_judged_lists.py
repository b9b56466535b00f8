"""Lists as long as judged ones: of what was counted, and the same density that the study foretells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bench_block_lists import density
from benchmarks.judged_lists import counts_at, random_lists
from benchmarks.quality.block_lists import extrapolated
from benchmarks.quality.key_blocks import BlockChoice

SIZE, JUDGED = 64, 128 * 64
CHOICE = BlockChoice("mass", 0.98, blocks=(SIZE, SIZE), window=2)


def judged(exponent: float) -> dict:
    """Two layers of three heads whose lists grow by that power, some heads' twice as long."""
    nq = JUDGED // SIZE
    grown = 0.5 * np.arange(1, nq + 1) ** exponent
    heads = np.array([1.0, 2.0, 1.0])[None, :, None] * np.array([1.0, 0.5])[:, None, None]
    return {"counts": (heads * grown).tolist(), "exponent": exponent}


@pytest.mark.parametrize("exponent", [0.0, 0.4, 0.9])
def test_lists_go_on_as_the_study_says(exponent):
    row, longer = judged(exponent), 4 * JUDGED
    counts = counts_at(row, longer, 6, SIZE)
    assert counts.shape == (2, 6, longer // SIZE)
    i = np.arange(1, longer // SIZE + 1)
    for layer, head, factor in [(0, 0, 1), (0, 1, 1), (0, 2, 2), (0, 5, 1), (1, 3, 2)]:
        np.testing.assert_allclose(
            counts[layer, head],
            np.minimum(np.ceil(factor * 0.5 * i**exponent * (0.5 if layer else 1)), i),
            atol=1,
        )
    foretold = extrapolated(np.array(row["counts"]).mean((0, 1)), (SIZE, SIZE))["extrapolated"]["fitted"]
    share = np.minimum(counts.mean((0, 1)), i).sum() / i.sum()
    assert share == pytest.approx(foretold[32_768], abs=0.5 / i.mean()), "counts are rounded up"


def test_a_shorter_prompt_has_the_first_lists():
    row = judged(0.5)
    np.testing.assert_array_equal(counts_at(row, 1024, 3, SIZE), counts_at(row, JUDGED, 3, SIZE)[..., :16])


def test_lists_hold_as_many_blocks_as_were_counted():
    tokens = 2048
    counts = jnp.asarray(counts_at(judged(0.6), tokens, 6, SIZE)[0])
    lists = random_lists(jax.random.key(0), counts, tokens, CHOICE)
    blocks, found = np.asarray(lists.blocks[0]), np.asarray(lists.counts[0])
    for head, i in [(0, 0), (1, 5), (2, 31), (5, 17)]:
        listed = blocks[head, i, : found[head, i]]
        near = {0, i, max(i - 1, 0)}
        assert found[head, i] == max(int(counts[head, i]), len(near))
        assert near <= set(listed.tolist()) <= set(range(i + 1))
        assert (np.diff(listed) > 0).all()
        assert listed[-1] == i
    assert density(lists, (SIZE, SIZE), tokens) == pytest.approx(found.mean(0).sum() / (33 * 16))
