"""Lists of key blocks, beside the same by brute force in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality.key_blocks import (
    FILLER,
    BlockChoice,
    as_lists,
    best_blocks,
    block_lists,
    blocks_of_mass,
    estimated_mass,
    kernel_mass,
)

B, K, G, H, T, S = 2, 2, 3, 8, 24, 52
START, END = np.array([0, 25], np.int32), np.array([17, 49], np.int32)
SCALE = H**-0.5
MASS = BlockChoice("mass", 0.9, coordinates=4, samples=3, blocks=(8, 4), sinks=1, window=2)
CHOICES = {
    "mass": MASS,
    "mean keys": replace(MASS, estimate="means"),
    "worst query": replace(MASS, worst=True),
    "all of all": replace(MASS, coordinates=H, samples=8),
    "more samples than queries": replace(MASS, samples=11),
    "a share": replace(MASS, rule="share", amount=0.5),
    "a count": replace(MASS, rule="count", amount=5),
    "recent ones": replace(MASS, rule="share", amount=0.5, estimate="recent"),
    "blocks of one size": replace(MASS, blocks=(8, 8), window=1),
    "no sinks": replace(MASS, sinks=0, amount=0.5),
}
lists_of = jax.jit(block_lists, static_argnames=("scale", "choice"))
by_number, by_share = jax.jit(best_blocks), jax.jit(blocks_of_mass)


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32) * 2

    return draw(B, T, K * G, H), draw(B, K, S, H)


def positions(b: int, i: int, choice: BlockChoice) -> np.ndarray:
    """Of the real queries of a block."""
    first = START[b] + i * choice.blocks[0]
    return np.arange(first, min(first + choice.blocks[0], START[b] + T, END[b]))


def mass_of(q: np.ndarray, k: np.ndarray, b: int, h: int, i: int, choice: BlockChoice) -> np.ndarray:
    """One row of `estimated_mass`, a query and a key at a time."""
    P, R, t = choice.blocks[1], choice.coordinates, positions(b, i, choice)
    found = []
    for s in range(choice.samples):
        at = max(t[0] + (s + 1) * len(t) // choice.samples - 1, t[0])
        for g in range(G):
            mass = np.zeros(-(-S // P))
            query = q[b, at - START[b], h * G + g, :R].astype(float)
            if choice.estimate == "means":
                for j in range(at // P + 1):
                    whole = np.zeros((P, R))
                    whole[: len(k[b, h, j * P : (j + 1) * P])] = k[b, h, j * P : (j + 1) * P, :R]
                    mass[j] = np.exp(SCALE * query @ whole.mean(0))
            else:
                for j in range(at + 1):
                    mass[j // P] += np.exp(SCALE * query @ k[b, h, j, :R].astype(float))
            found.append(mass / mass.sum())
    return np.max(found, 0) if choice.worst else np.mean(found, 0)


def list_of(mass: np.ndarray, b: int, i: int, choice: BlockChoice) -> list[int]:
    """Blocks taken one by one."""
    P, t = choice.blocks[1], positions(b, i, choice)
    visible = list(range(t[-1] // P + 1))
    taken = [j for j in visible if j < choice.sinks or j > t[0] // P - choice.window]
    if choice.estimate == "recent":
        mass = np.arange(len(mass), dtype=float)
    for j in sorted(visible, key=lambda j: (-mass[j], j)):
        match choice.rule:
            case "mass":
                full = mass[taken].sum() >= choice.amount * mass[visible].sum()
            case "share":
                full = len(taken) >= choice.amount * len(visible)
            case _:
                full = len(taken) >= choice.amount
        if not full and j not in taken:
            taken.append(j)
    return sorted(taken)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_lists_are_those_of_brute_force(choice):
    """Rows of different starts and lengths, blocks cut off by the end, blocks past it."""
    q, k = rows()
    found = lists_of(q, k, START, END, scale=SCALE, choice=choice)
    nq = -(-T // choice.blocks[0])
    assert found.blocks.shape == (B, K, nq, -(-S // choice.blocks[1]))
    for b, h, i in np.ndindex(B, K, nq):
        own, count = np.asarray(found.blocks[b, h, i]), int(found.counts[b, h, i])
        if not len(positions(b, i, choice)):
            assert count == 0
        else:
            expected = list_of(mass_of(q, k, b, h, i, choice), b, i, choice)
            assert own[:count].tolist() == expected, (b, h, i)
        assert (own[count:] == FILLER).all()


@pytest.mark.parametrize("name", ["mass", "mean keys", "worst query", "all of all"])
def test_the_estimate_is_that_of_brute_force(name):
    q, k = rows(1)
    choice = CHOICES[name]
    given = map(jnp.asarray, (q, k, START, END))
    found = np.asarray(estimated_mass(*given, scale=SCALE, choice=choice))
    for b, h, i in np.ndindex(*found.shape[:3]):
        if len(positions(b, i, choice)):
            np.testing.assert_allclose(found[b, h, i], mass_of(q, k, b, h, i, choice), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.sampled
def test_the_kernel_gives_the_same_estimate(heads):
    """Rows of different starts and lengths; what no query of a block may see is nothing."""
    rng = np.random.default_rng(3)

    def draw(*shape):
        return jnp.asarray(2 * rng.normal(size=shape), jnp.bfloat16)

    q, k, start = draw(B, 300, K * heads, 40), draw(B, K, 640, 40), jnp.array([0, 130])
    choice = BlockChoice("mass", 0.9, coordinates=32, samples=8, blocks=(128, 64))
    given = q, k, start, jnp.array([200, 430])
    expected = np.array(estimated_mass(*given, scale=0.1, choice=choice))
    expected[0, :, 2] = 0  # A block past the end.
    found = kernel_mass(*given, scale=0.1, choice=choice, interpret=True)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-5)


def test_what_lies_past_the_end_plays_no_part():
    """Keys behind the last token, and queries of padding."""
    q, k = rows(2)
    real_k = np.arange(S) < END[:, None]
    real_q = START[:, None] + np.arange(T) < END[:, None]
    other_q = np.where(real_q[:, :, None, None], q, 99.0).astype(np.float32)
    other_k = np.where(real_k[:, None, :, None], k, np.nan).astype(np.float32)
    one, other = (lists_of(*x, START, END, scale=SCALE, choice=MASS) for x in ((q, k), (other_q, other_k)))
    np.testing.assert_array_equal(one.blocks, other.blocks)


@settings(max_examples=40, deadline=None)
@given(
    mass=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=9, max_size=9),
    always=st.lists(st.booleans(), min_size=9, max_size=9),
    seen=st.integers(1, 9),
    count=st.integers(0, 10),
)
def test_equal_blocks_are_taken_by_position(mass, always, seen, count):
    """By number and by mass; what is always in counts, too."""
    visible = np.arange(9) < seen
    always = np.array(always) & visible

    def place(x):
        return jnp.asarray(x)[None, None, None]

    order = sorted(range(seen), key=lambda j: (not always[j], -mass[j], j))
    given = place(np.array(mass, np.float32)), place(visible), place(always)
    by_count = np.asarray(by_number(*given, jnp.int32(count)))[0, 0, 0]
    assert set(np.flatnonzero(by_count)) == set(order[: max(count, always.sum())])
    by_mass = np.asarray(by_share(*given, 0.5))[0, 0, 0]
    needed = next(n for n in range(seen + 1) if sum(mass[j] for j in order[:n]) >= 0.5 * sum(mass[:seen]))
    assert set(np.flatnonzero(by_mass)) == set(order[: max(needed, always.sum())])


def test_lists_ascend_and_end_in_fillers():
    listed = jnp.array([[[[True, False, True, True], [False] * 4]]])
    blocks, counts = as_lists(listed)
    assert blocks.tolist() == [[[[0, 2, 3, FILLER], [FILLER] * 4]]]
    assert counts.tolist() == [[[3, 0]]]


def test_query_heads_of_a_kv_head_share_a_list():
    """What one query head wants is in the list of its KV head, and of no other."""
    q = np.zeros((1, 8, 2 * G, H), np.float32)
    k = np.zeros((1, 2, 40, H), np.float32)
    k[:, :, 12:16, 0] = 9
    q[:, :, 1, 0] = 9
    choice = replace(MASS, rule="count", amount=5, worst=True)
    found = lists_of(q, k, np.array([32]), np.array([40]), scale=SCALE, choice=choice)
    assert found.blocks[0, 0, 0, :5].tolist() == [0, 3, 7, 8, 9]
    # To the other head all blocks are equal.
    assert found.blocks[0, 1, 0, :5].tolist() == [0, 1, 7, 8, 9]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rule", "best"),
        ("estimate", "all"),
        ("amount", 0.0),
        ("amount", 1.5),
        ("coordinates", 0),
        ("samples", 0),
        ("sinks", -1),
        ("window", 0),
        ("blocks", (0, 64)),
    ],
)
def test_impossible_choices_are_refused(setting, value):
    with pytest.raises(ValueError, match=setting):
        replace(MASS, **{setting: value})


def test_a_count_is_whole():
    with pytest.raises(ValueError, match="amount"):
        replace(MASS, rule="count", amount=2.5)
