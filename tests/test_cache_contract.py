"""Every cache method under the contract of `cache_contract`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_contract import BLOCK, CAPACITY, FAST, METHODS, PIECE, ROWS, Stack, is_aligned, specs_of, stack

WHOLE = [[PIECE] * ROWS] * 2
"""Schedule of all tokens in two chunks."""
RAGGED = [[24, 8, 16], [8, 24, 16], [1, 1, 1], [0, 1, 1], [1, 0, 1]]
"""Schedule in which rows begin and end with blocks, then add single tokens to some rows at a time."""
ANYWHERE = [[24, 3, 17], [0, 23, 1], [5, 20, 24], [1, 0, 1]]
"""Schedule in which rows begin and end anywhere, for methods that support it."""
PAGE = 16
"""Tokens of a page: a multiple of any method's block."""
MATRIX = pytest.mark.matrix(*FAST)
"""Selects the same methods for all tests, so that each program compiles once."""
ALIGNED = [name for name in METHODS if is_aligned(specs_of(name))]


@pytest.fixture(scope="module", params=METHODS)
def it(request) -> Stack:
    """Return a method. Tests of one method run together, since they share compiled programs."""
    return stack(request.param)


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Assert equality where `expected` is not NaN, within a few float32 roundings of the largest."""
    there = ~np.isnan(expected)
    assert there.any()
    error = np.abs(found - expected)[there].max()
    assert error <= tolerance * np.abs(expected[there]).max(), error


def of_inputs(seed: int) -> Callable[[Callable[[Stack, np.ndarray], None]], Callable[[Stack], None]]:
    """Run a test on a method's inputs of that seed, and on others while it fails; see `Stack.attempts`."""

    def on_inputs(test: Callable[[Stack, np.ndarray], None]) -> Callable[[Stack], None]:
        def tried(it: Stack) -> None:
            for attempt in range(1, it.attempts + 1):
                try:
                    test(it, it.inputs(seed + 100 * (attempt - 1)))
                    return
                except AssertionError:
                    if attempt == it.attempts:
                        raise

        tried.__name__, tried.__doc__ = test.__name__, test.__doc__
        return tried

    return on_inputs


@MATRIX
@of_inputs(seed=2)
def test_cached_is_uncached(it, x):
    assert_same(it.run(x, WHOLE), it.whole(x))


@MATRIX
@of_inputs(seed=0)
def test_chunked_is_whole(it, x):
    it.declares("chunked")
    assert_same(it.run(x, [[BLOCK] * ROWS, [16] * ROWS, [BLOCK] * ROWS, [16] * ROWS]), it.run(x, WHOLE))


@MATRIX
@of_inputs(seed=1)
def test_a_ragged_row_is_what_it_is_alone(it, x):
    # Alone means that all other rows are empty.
    it.declares("ragged")
    for schedule in [RAGGED] if is_aligned(it.specs) else [RAGGED, ANYWHERE]:
        together = it.run(x, schedule)
        for row in range(ROWS):
            only = [[count * (other == row) for other, count in enumerate(new)] for new in schedule]
            alone = it.run(x, [new for new in only if any(new)])
            assert_same(together[row], alone[row])


@pytest.mark.parametrize("name", ALIGNED)
@MATRIX
def test_a_piece_that_begins_elsewhere_gives_nan_in_its_row_alone(name):
    it = stack(name)
    found = it.run(it.inputs(), [[24, 3, 16], [8, 8, 8]])
    assert np.isnan(found[1, 3:11]).all()
    assert np.isfinite(found[0, :32]).all()
    assert np.isfinite(found[2, :24]).all()


@MATRIX
@of_inputs(seed=2)
def test_a_row_does_not_depend_on_which_it_is(it, x):
    it.declares("order")
    turned = [2, 0, 1]
    schedule = [[new[row] for row in turned] for new in RAGGED]
    # The last bit may differ: some processors sum a product's rows in another order by place.
    assert_same(it.run(x[turned], schedule), it.run(x, RAGGED)[turned])


@MATRIX
def test_bytes_are_those_of_the_arrays(it):
    arrays, lengths = jax.tree.leaves(it.create()), ROWS * np.dtype(np.int32).itemsize
    fixed = sum(spec.fixed_bytes for spec in it.specs)
    assert it.plan.bytes(CAPACITY, ROWS, "float32") == sum(x.nbytes for x in arrays) + lengths + fixed
    one = it.plan.bytes(CAPACITY, 1, "float32") - fixed
    assert it.plan.bytes(CAPACITY, ROWS, "float32") == ROWS * one + fixed


@MATRIX
@of_inputs(seed=3)
def test_a_released_row_serves_the_next_request_as_a_new_one(it, x):
    it.declares("reuse")
    y, none = it.inputs(seed=4), np.zeros(ROWS, int)
    _, states = it.extend(it.create(), x, none, np.array([24, 24, 24]))
    _, states = it.extend(states, x, np.full(ROWS, 24), np.array([24, 8, 16]))
    released = jnp.array([False, True, False])
    states = [spec.release(state, released) for spec, state in zip(it.specs, states, strict=True)]
    first, states = it.extend(states, y, np.array([47, 0, 40]), np.array([0, 16, 0]))
    second, _ = it.extend(states, y, np.array([47, 16, 40]), np.array([0, 1, 0]))
    expected = it.run(y, [[0, 16, 0], [0, 1, 0]])[1]
    assert_same(first[1, :16], expected[:16])
    assert_same(second[1, :1], expected[16:17])


@MATRIX
@of_inputs(seed=5)
def test_rows_in_pages_are_rows(it, x):
    # Pages of all rows share one pool in random order. Entries for positions not reached are arbitrary.
    it.declares("pages")
    pages = CAPACITY // PAGE
    table = np.random.default_rng(0).permutation(2 * ROWS * pages)[: ROWS * pages].reshape(ROWS, pages)
    paged = it.in_pages(PAGE, table)
    for schedule in (RAGGED, ANYWHERE):
        # Stores that are padded to kernels' sizes have other sums of zeros.
        assert_same(paged.run(x, schedule), it.run(x, schedule))


@MATRIX
@of_inputs(seed=9)
def test_a_cache_can_be_filled_to_the_last_slot(it, x):
    # A chunk's padding may also reach past the end.
    found = it.run(x, [[24, 24, 24], [16, 16, 16], [8, 7, 8], [0, 1, 0]])
    whole = it.whole(x)
    assert_same(found[0], whole[0])
    assert_same(found[2], whole[2])
    assert_same(found[1, :40], whole[1, :40])
    assert np.isfinite(found).all()


@MATRIX
@of_inputs(seed=6)
def test_zeros_and_one_huge_outlier(it, x):
    # Tokens of zeros and one that is a thousand times larger need no special treatment.
    x[0, :24], x[1, 5], x[2, 30] = 0, 0, 1000 * x[2, 30]
    found = it.run(x, WHOLE)
    assert np.isfinite(found).all()
    # Scores with the outlier are so large that their rounding alone changes weights by thousandths.
    assert_same(found, it.whole(x), 1e-4)
