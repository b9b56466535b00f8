"""Cases of attention to quantized keys and values, and interpretation of its kernel."""

from contextlib import contextmanager

import compiled_codes
import interpreting
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import plain_registers
import pytest
from merged_parts import coded_attention
from pages import Pool

from kernels_pallas import Plane
from kernels_pallas.quantized import attention as coded_decode
from kernels_pallas.quantized import (
    byte_levels,
    key_blocks,
    warp_attention,
    warp_layout,
    warp_outputs,
    warp_queries,
)
from kernels_pallas.quantized.warp_layout import LARGEST_QUERY
from zdc_jax.cache.codes.fitted_integers import FittedIntegers

SCALE = 0.2


def shape(*dims, dtype=jnp.uint8):
    return jax.ShapeDtypeStruct(dims, dtype)


def planes_like(kinds, *tokens) -> list[Plane]:
    return [Plane(shape(*tokens, C * bits // 8), shape(*tokens), bits) for C, bits in kinds]


def coded(x: np.ndarray, bits: int) -> Plane:
    levels, reach = compiled_codes.encode(FittedIntegers(bits), jnp.asarray(x, jnp.float32)[..., None, :])
    return Plane(levels[..., 0, :], reach[..., 0, 0], bits)


def read(plane: Plane) -> np.ndarray:
    """Dequantize a plane to float64 exactly: a level is an odd number and a scale has four bits."""
    arrays = plane.levels[..., None, :], plane.reach[..., None, None]
    found = compiled_codes.decode(FittedIntegers(plane.bits), arrays, plane.width)
    return np.asarray(found, np.float64)[..., 0, :]


class Case:
    """Random queries, keys and values of one shape, and float64 attention to them.

    `gains` are by block. `blocks` are those of listed `slots`, by default of 64 slots each.
    """

    def __init__(self, keys, values, heads, S: int, seed: int = 0, length: float = 1.0):
        rng, (N, K), B = np.random.default_rng(seed), heads, 3

        def draw(C):
            return rng.normal(size=(B, K, S, C)) * np.exp(rng.normal(size=(B, K, S, 1)) / 3)

        self.q = jnp.asarray(length * rng.normal(size=(B, N, sum(C for C, _ in keys))), jnp.bfloat16)
        self.keys = [coded(draw(C), bits) for C, bits in keys]
        self.values = coded(draw(values[0]), values[1])
        self.begin, self.end = np.array([0, 70, 9]), np.array([S, 150, 9])
        self.slots: np.ndarray | None = None
        self.gains: np.ndarray | None = None
        self.blocks: np.ndarray | None = None

    def gain(self) -> None:
        """Let scores gain random numbers that decide most of attention, by block."""
        rng, (B, N, _), S = np.random.default_rng(7), self.q.shape, self.values.reach.shape[2]
        self.gains = np.float32(4 * rng.normal(size=(B, N, S // 64)))

    def choose(self, n: int, seed: int = 0) -> None:
        """Choose n slots of each KV head in random order, some of them invalid or outside of the span."""
        rng, (B, K, S) = np.random.default_rng(seed), self.values.reach.shape
        self.slots = np.stack([rng.permutation(S + 20)[:n] - 3 for _ in range(B * K)]).reshape(B, K, n)

    def run(self, page: int = 0, **options):
        """Run the kernel on rows, or on pages of a pool."""
        planes = [*self.keys, self.values]
        if page:
            pool = Pool(planes, self.begin, self.end, page)
            planes, options["block_table"] = pool.planes, pool.table
        o, lse = coded_attention(
            self.q,
            planes[:-1],
            planes[-1],
            *map(jnp.asarray, (self.begin, self.end)),
            scale=SCALE,
            slots=None if self.slots is None else jnp.asarray(self.slots),
            gains=None if self.gains is None else jnp.asarray(self.gains),
            **options,
        )
        return np.asarray(o, np.float64), np.asarray(lse, np.float64)

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        q = np.asarray(self.q, np.float64)
        k, v = np.concatenate([read(plane) for plane in self.keys], -1), read(self.values)
        (B, N, _), G = q.shape, q.shape[1] // k.shape[1]
        o, lse = np.zeros((B, N, v.shape[-1])), np.full((B, N), -np.inf)
        for b, n in np.ndindex(B, N):
            seen = np.arange(self.begin[b], self.end[b])
            if self.slots is not None:
                seen = np.intersect1d(seen, self.slots[b, n // G])
            if len(seen):
                scores = SCALE * k[b, n // G, seen] @ q[b, n] + self._gains_of(b, n, n // G, seen)
                lse[b, n] = np.logaddexp.reduce(scores)
                o[b, n] = np.exp(scores - lse[b, n]) @ v[b, n // G, seen]
        return o, lse

    def _gains_of(self, b: int, n: int, kv: int, seen: np.ndarray) -> np.ndarray | float:
        if self.gains is None:
            return 0.0
        if self.slots is None or self.blocks is None:
            return self.gains[b, n, seen // 64]
        block = dict(zip(self.slots[b, kv], self.blocks[b, kv], strict=True))
        return self.gains[b, n, [block[slot] for slot in seen]]

    def check(self, **options) -> None:
        """Run the kernel, and assert that heads are exact."""
        self.compare(*self.run(**options))

    def compare(self, o: np.ndarray, lse: np.ndarray) -> None:
        """Assert that heads are exact up to rounding of outputs to bfloat16 and of queries to 15 bits."""
        true_o, true_lse = self.truth()
        error = np.linalg.norm(o - true_o, axis=-1)
        assert (error <= 0.004 * np.linalg.norm(true_o, axis=-1)).all(), error.max()
        np.testing.assert_allclose(lse, true_lse, atol=2e-5 + 4 * self.deviation(), rtol=2e-6)

    def deviation(self) -> float:
        """Return the largest standard deviation of a score after rounding of queries."""
        found, begin = 0.0, 0
        for plane in self.keys:
            of_plane = np.asarray(self.q, np.float64)[..., begin : begin + plane.width]
            step, begin = np.abs(of_plane).max() / LARGEST_QUERY, begin + plane.width
            found += (step * SCALE * np.linalg.norm(read(plane), axis=-1).max()) ** 2 / 12
        return found**0.5

    def check_pages(self, page: int, **options) -> None:
        """Assert that pages give the same bits as rows."""
        for paged, whole in zip(self.run(page, **options), self.run(**options), strict=True):
            np.testing.assert_array_equal(paged, whole)


@contextmanager
def interpreted_with_registers(*others):
    """Interpret the kernel, with registers in jax.numpy, and other kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (byte_levels, warp_layout, warp_queries, warp_attention, warp_outputs, key_blocks):
            patch.setattr(module, "r", plain_registers.PLAIN)
        patch.setattr(key_blocks, "inline", plain_registers.inline)
        patch.setattr(
            key_blocks, "wait_for_all", plgpu.commit_smem
        )  # This is such a barrier for the interpreter.
        with interpreting.all_interpreted(
            (coded_decode, "coded_parts", {"inline": plain_registers.inline}), *others
        ):
            yield
