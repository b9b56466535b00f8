"""Reference of a `coded` payload in NumPy, in float64."""

import numpy as np

from kernels_pallas.quantized.encode import LONGER, reaches_tried
from zdc_jax.cache.codes.gaussian import gaussian_distortion, turn

REACHES = np.array([0.0, *[2.0 ** (e - 16) * (1 + m / 8) for e in range(32) for m in range(8)][1:-1]])
"""Scales of the codes 0 to 254."""


def emulated(x: np.ndarray, blocks: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return x [..., C] as it arrives: rotated by blocks, rounded to its nearest levels, and rotated back."""
    x = np.asarray(x, np.float64)
    width = x.shape[-1]
    x = np.concatenate([x, np.zeros((*x.shape[:-1], sum(size for size, _ in blocks) - width))], -1)
    found, start = [], 0
    for size, bits in blocks:
        matrix, longer = turn(size), LONGER.get(bits, 1.0)
        levels = _nearest(longer * x[..., start : start + size] @ matrix, bits) @ matrix.T
        found.append(levels / (longer * (1 - gaussian_distortion(bits))))
        start += size
    return np.concatenate(found, -1)[..., :width]


def _nearest(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to odd multiples of scale/2^bits, with the best scale of those that are tried."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32).view(np.int32)
    best, least = np.zeros_like(x), np.full((*x.shape[:-1], 1), np.inf)
    for code in reaches_tried(largest, bits, x.shape[-1]):
        half = np.maximum(REACHES[np.asarray(code)], 2.0**-40) / 2**bits
        level = half * np.clip(2 * np.floor(x / (2 * half)) + 1, 1 - 2**bits, 2**bits - 1)
        wrong = ((level - x) ** 2).sum(-1, keepdims=True)
        best, least = np.where(wrong < least, level, best), np.minimum(wrong, least)
    return best
