"""Choices from labels, and densities from counts."""

import numpy as np
import pytest

from benchmarks.quality.block_lists import choice_of, densities, extrapolated
from benchmarks.quality.key_blocks import BlockChoice


def test_labels_are_choices():
    label = "means R=8 m=4 share=0.25 Q=64 P=32 sinks=2 w=3 worst"
    settings = {"coordinates": 8, "samples": 4, "sinks": 2, "window": 3, "worst": True, "blocks": (64, 32)}
    assert choice_of(label) == BlockChoice("share", 0.25, estimate="means", **settings)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="'best' says nothing"):
        choice_of("keys best")


def test_density_is_a_share_of_causal_blocks():
    """Two layers of one head: all blocks, and one block each. 4096 tokens see 32 · 33 / 2 blocks."""
    every = np.arange(1, 33)[None]
    found = densities(np.stack([every, np.ones_like(every)]), (128, 128))
    assert found["density_by_layer"] == [1, round(32 / 528, 4)]
    assert found["density"] == pytest.approx((528 + 32) / 2 / 528)
    assert found["density_by_length"] == {
        2048: pytest.approx((136 + 16) / 2 / 136),
        4096: found["density"],
    }
    assert found["blocks_by_query_block"][:2] == [1, 1.5]


def test_counts_are_extrapolated_by_the_power_that_fits():
    """Counts that grow as the root of the position."""
    i = np.arange(1, 33)
    found = extrapolated(3 * i**0.5, (128, 128))
    assert found["exponent"] == pytest.approx(0.5)
    i = np.arange(1, 257)
    listed = {"fitted": 3 * i**0.5, "constant": np.minimum(3 * i**0.5, 3 * 32**0.5)}
    for rule, counts in listed.items():
        density = np.minimum(counts, i).sum() / i.sum()
        assert found["extrapolated"][rule][32_768] == pytest.approx(density, rel=0.01), rule
