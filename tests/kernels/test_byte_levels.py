"""Levels as bytes, instruction by instruction, compared with the levels that were packed."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import plain_registers
import pytest

from kernels_pallas.quantized import byte_levels, warp_attention
from kernels_pallas.quantized.byte_levels import (
    BITS,
    factor_of,
    key_coordinates,
    key_share,
    key_words,
    value_words,
)
from zdc_jax.cache.codes.code import pack

THREADS = np.arange(plain_registers.THREADS)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for module in (byte_levels, warp_attention):
        monkeypatch.setattr(module, "r", plain_registers.PLAIN)


def shares(levels: np.ndarray, bits: int, thread: np.ndarray, count: int):
    """Load shares of `count` coordinates of the second of three equal rows, as words of each bit plane."""
    row = pack(jnp.asarray(levels), bits)
    memory = SimpleNamespace(content=jnp.tile(row, 3))
    row = plain_registers.Pointer(memory, jnp.full(THREADS.shape, row.size, jnp.int32))
    return warp_attention.load_share(row, levels.size, bits, jnp.asarray(thread, jnp.uint32), count)


def bytes_of(word) -> np.ndarray:
    return np.asarray(word).view(np.uint8).reshape(-1, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("C", [16, 32, 48, 64, 96, 112, 128, 256])
@pytest.mark.matrix
def test_words_of_a_key_have_its_coordinates(C, bits):
    levels = np.random.default_rng(bits).integers(0, 2**bits, C).astype(np.uint8)
    count = key_share(C, bits)
    assert C % count == 0
    quad = THREADS % (C // count)
    words, places = list(key_words(shares(levels, bits, quad, count), bits)), key_coordinates(count, bits)
    assert len(words) == len(places)
    there = places[places < count]
    np.testing.assert_array_equal(np.sort(there), np.arange(count))
    for word, of_word in zip(words, places, strict=True):
        inside = of_word < count
        expected = levels[(quad * count)[:, None] + np.where(inside, of_word, 0)] << 8 - bits
        np.testing.assert_array_equal(bytes_of(word)[:, inside], expected[:, inside])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("Z", [64, 128, 192, 256])
@pytest.mark.matrix
def test_words_of_values_have_four_keys(Z, bits):
    levels = np.random.default_rng(bits).integers(0, 2**bits, (4, Z)).astype(np.uint8)
    planes = list(zip(*(shares(of_key, bits, THREADS % 8, Z // 8) for of_key in levels), strict=True))
    found = value_words(planes, Z // 8, bits)
    for c, word in enumerate(found):
        expected = levels[:, THREADS % 8 * (Z // 8) + c].T
        np.testing.assert_array_equal(bytes_of(word), expected << factor_of(c, bits))
