"""Kernel that stores the near tokens of a chunk; on a CPU, Pallas' interpreter runs it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import BlockMeans, Plane, RingSnapshots, put_near, put_near_refusal, round_tokens

K, N, COPIES = 2, 4, 3
STARTS, ENDS = np.array([0, 21, 37, 300]), np.array([9, 30, 37, 306])
ROWS, MARKS, SLOTS = np.array([2, 0, 7, 3]), np.array([4, 26, 37, 303]), np.array([1, 5, -1, 2])
"""A first chunk; one whose copy is not made; an empty one without a ring; one far from the sinks."""
JUNK = 99
"""Level and scale of slots without a token."""


class Case:
    """Chunks of four sequences, and where their near tokens belong, found by loops."""

    def __init__(self, *, sinks: int, window: int, widths: tuple[int, int], dtype=jnp.bfloat16):
        self.near, self.T, rng = {"sinks": sinks, "window": window}, 12, np.random.default_rng(window)
        self.slots = window + -(-sinks // 8) * 8
        shapes = [(len(STARTS), ENDS.max() + self.T, K, C) for C in widths]
        self.whole = [jnp.asarray(rng.normal(size=shape) * 3, dtype) for shape in shapes]
        self.read = round_tokens(self.whole, 8, interpret=jax.default_backend() != "gpu")

    def position(self, slot: int, length: int) -> int | None:
        """Return the position of the token in a slot of a ring of `length` tokens."""
        sinks, window = self.near["sinks"], self.near["window"]
        for position in range(length):
            is_sink, is_recent = position < sinks, position >= length - window
            if (is_sink or is_recent) and slot == (window + position if is_sink else position % window):
                return position
        return None

    def fill(self, plane: tuple[np.ndarray, np.ndarray], row: int, sequence: int, length: int, array: int):
        """Write the tokens of a sequence of `length` tokens to a ring."""
        for slot in range(self.slots):
            if (position := self.position(slot, length)) is not None:
                token = sequence, position
                plane[0][row, :, slot] = np.asarray(self.read[array].levels)[token]
                plane[1][row, :, slot] = np.asarray(self.read[array].reach)[token]

    def empty(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (
                np.full((count, K, self.slots, x.shape[3]), JUNK, np.uint8),
                np.full((count, K, self.slots), JUNK, np.uint8),
            )
            for x in self.whole
        ]

    def draw_means(self) -> BlockMeans:
        """Return means of fewer blocks than keys have."""
        values = 9 * np.random.default_rng(1).normal(size=(K, 4, self.whole[0].shape[3]))
        return BlockMeans(jnp.asarray(values, jnp.float32), jnp.arange(len(STARTS), dtype=jnp.int32))

    def check(self, *, copies: bool = True, shifted: bool = False, **options):
        before, kept, after, copied = (self.empty(n) for n in (N, COPIES, N, COPIES))
        for array in range(2):
            for b, row in enumerate(ROWS):
                if row < N:
                    self.fill(before[array], row, b, STARTS[b], array)
                    self.fill(after[array], row, b, STARTS[b], array)
                    self.fill(after[array], row, b, ENDS[b], array)
                if 0 <= SLOTS[b] < COPIES:
                    for part, ring in zip(copied[array], before[array], strict=True):
                        part[SLOTS[b]] = ring[row]
                    self.fill(copied[array], SLOTS[b], b, MARKS[b], array)
        planes = [[Plane(*map(jnp.asarray, each), 8) for each in group] for group in (before, kept)]
        taken = RingSnapshots(planes[1], jnp.asarray(MARKS), jnp.asarray(SLOTS)) if copies else None
        chunks = [
            jnp.stack([x[b, start : start + self.T] for b, start in enumerate(STARTS)]) for x in self.whole
        ]
        numbers = map(jnp.asarray, (ROWS, STARTS, ENDS))
        means = self.draw_means() if shifted else None
        found = put_near(chunks, planes[0], *numbers, snapshots=taken, means=means, **self.near, **options)
        for group, wanted in ((found.rings, after), (found.snapshots, copied if copies else [])):
            for plane, parts in zip(group, wanted, strict=True):
                for one, other in zip((plane.levels, plane.reach), parts, strict=True):
                    np.testing.assert_array_equal(one, other)
        self.check_rows(found.trailing, means)

    def check_rows(self, trailing, means):
        """Assert that rows and sinks have the values of near tokens, and that other rows are zeros.

        Keys gain the means. Rows without a token may then have any values.
        """
        sinks, window = self.near["sinks"], self.near["window"]
        np.testing.assert_array_equal(trailing.start, [0, 0, 0, 256 if window < 40 else 0])
        for array, (rows, of_sinks) in enumerate(
            ((trailing.k, trailing.sink_k), (trailing.v, trailing.sink_v))
        ):
            values, rows = np.asarray(self.read[array].values), np.asarray(rows)
            assert rows.dtype == self.whole[array].dtype
            for b, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
                if ROWS[b] >= N:
                    assert np.isfinite(rows[b].astype(np.float32)).all()
                    continue
                first = int(trailing.start[b])
                for row in range(rows.shape[2]):
                    position = first + row
                    near = position < end and (position >= start - window or position < sinks)
                    wanted = values[b, position] if near else np.zeros_like(values[b, 0])
                    if means is None or array == 1:
                        np.testing.assert_array_equal(rows[b, :, row], wanted, err_msg=f"{b} {position}")
                    elif near:
                        of_blocks = np.asarray(means.values)
                        gain = of_blocks[:, min(position // 64, 3)] - of_blocks[:, means.references[b]]
                        np.testing.assert_allclose(
                            np.float32(rows[b, :, row]), np.float32(wanted) + gain, rtol=0.01, atol=0.1
                        )
                for sink in range(min(sinks, end)):
                    np.testing.assert_array_equal(np.asarray(of_sinks)[b, :, sink], values[b, sink])


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.matrix
def test_near_tokens_are_stored_copied_and_listed(copies):
    Case(sinks=3, window=8, widths=(32, 16)).check(copies=copies, interpret=True)


def test_keys_regain_the_means_of_their_blocks():
    Case(sinks=3, window=8, widths=(48, 16)).check(shifted=True, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("sinks", "window"), [(4, 128), (0, 64), (1, 7)])
def test_keys_regain_the_means_of_their_blocks_on_the_device(sinks, window):
    Case(sinks=sinks, window=window, widths=(128, 96)).check(shifted=True)


@pytest.mark.full
@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (4, 50)])
def test_windows_of_other_lengths(sinks, window):
    Case(sinks=sinks, window=window, widths=(48, 32), dtype=jnp.float32).check(interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("sinks", "window"), [(4, 128), (0, 64), (3, 8), (1, 7)])
@pytest.mark.parametrize("copies", [True, False])
def test_near_tokens_on_the_device(sinks, window, copies):
    Case(sinks=sinks, window=window, widths=(128, 96)).check(copies=copies)


def test_refusals_name_the_argument():
    case = Case(sinks=3, window=8, widths=(32, 16))
    x = [each[:, :12] for each in case.whole]
    rings = [Plane(*map(jnp.asarray, each), 8) for each in case.empty(N)]
    row = jnp.asarray(ROWS)
    near = {"sinks": 3, "window": 8}
    assert put_near_refusal(x, rings, row, row, row, **near) is None
    said = put_near_refusal(x, rings, row, row, row, sinks=3, window=0)
    assert said == "sinks=3, window=0: a window, together with sinks, must be 1 to 16, the slots"
    half = [replace(ring, bits=4) for ring in rings]
    assert put_near_refusal(x, half, row, row, row, **near) == "rings[0] has 4 bits: must be 8"
    assert "x[0] has shape" in put_near_refusal(x[::-1], rings, row, row, row, **near)
    assert "must be a float dtype" in put_near_refusal(
        [each.astype(jnp.int32) for each in x], rings, row, row, row, **near
    )
