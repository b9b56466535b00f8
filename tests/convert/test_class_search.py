"""Plans of token classes by the paper's numbers: their neighbours, Eq. 6, and the descent."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from conftest import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.search.class_search import FRACTIONS, ClassNumbers, descend, list_group_sizes
from convert.search.search import describe
from convert.search.trials import Trial
from zdc_jax.errors import PlanError
from zdc_jax.methods.token_classes import Settings
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.layer_costs import rank_levels

CONFIG = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1] * 6, head_dim=64)
LENGTH = 1024


def size(plan) -> float:
    return plan.bytes(LENGTH)


def size_of(numbers: ClassNumbers) -> float:
    return size(numbers.make_plan(CONFIG))


def wander(seed: int) -> list[ClassNumbers]:
    """Return a path from the largest numbers through random neighbours until none is left."""
    rng = np.random.default_rng(seed)
    path = [ClassNumbers.largest(CONFIG, 512)]
    while steps := path[-1].list_neighbors(CONFIG):
        path.append(steps[str(rng.choice(sorted(steps)))])
    return path


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
@pytest.mark.full
def test_steps_change_one_number_at_a_time(seed):
    path = wander(seed)
    assert size_of(path[-1]) < 0.5 * size_of(path[0])
    for before, after in itertools.pairwise(path):
        one, other = ({**vars(each), **vars(each.settings), "settings": None} for each in (before, after))
        assert len([name for name, value in one.items() if other[name] != value]) == 1
    assert all(numbers.meets_constraints() for numbers in path)


FULL = LayerRanks(64, 64)
NUMBERS = ClassNumbers(FULL, FULL, Settings(group=2, first=0.25, last=0.5, rest_qk=32, rest_v=48))


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"first": 0.75}, False),
        ({"first": 0.5}, True),
        ({"rest_qk": 64}, False),
        ({"rest_v": 64}, False),
        ({"rest_qk": 48, "rest_v": 32}, False),
    ],
)
def test_equation_6(change, holds):
    numbers = replace(NUMBERS, settings=replace(NUMBERS.settings, **change))
    assert numbers.meets_constraints() == holds
    assert not replace(numbers, leaders=LayerRanks(64, 48)).meets_constraints()


def test_a_plan_says_its_numbers():
    plan = replace(NUMBERS, leaders=LayerRanks(48, 48), window=128).make_plan(CONFIG)
    shares = [spec.blocks.share for spec in plan.layer_caches("float32")]
    assert shares == [0.25, 0.25, 0.375, 0.375, 0.5, 0.5]
    assert plan.layers == (LayerRanks(48, 48), FULL) * 3
    assert (plan.window, plan.sinks) == (128, 4)
    said = describe(CONFIG, Trial(plan, 0.5, 0.01, (0.0, 0.02), {}, 0.5))
    assert "group=2, first=0.25, last=0.5, rest_qk=32, rest_v=48, block=512" in said


@pytest.mark.parametrize(("layers", "sizes"), [(1, (1,)), (2, (2,)), (6, (2, 4, 6)), (8, (2, 4, 8))])
def test_group_sizes(layers, sizes):
    assert list_group_sizes(replace(CONFIG, layers=CONFIG.layers[:1] * layers)) == sizes


def test_one_rank_is_no_classes():
    small = replace(CONFIG, head_dim=16)
    with pytest.raises(PlanError, match="head_dim=16 allows no smaller rank"):
        ClassNumbers.largest(small, 512)


def full_greedy(start, list_neighbors, size, increase, limit):
    """Descend greedily, with all neighbours measured at every step."""
    here = start
    while True:
        smaller = [n for n in list_neighbors(here).values() if size(n) < size(here)]
        steps = [n for n in smaller if increase(n) <= limit]
        if not steps:
            return here

        def price(n, here=here):
            return (increase(n) - increase(here)) / (size(here) - size(n))

        here = min(steps, key=price)


@pytest.mark.parametrize("limit", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.matrix
def test_the_descent_is_the_greedy_one_in_a_fraction_of_the_trials(seed, limit):
    # Prices rise along the path, as for convex losses of each number.
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.2, 1, 8)
    levels = rank_levels(64)

    def increase(numbers):
        important, leaders, rest = numbers.important, numbers.leaders, numbers.settings
        ranks = [important.qk, important.v, rest.rest_qk, rest.rest_v, leaders.qk, leaders.v]
        kept = [levels.index(r) / 3 for r in ranks]
        kept += [FRACTIONS.index(x) / 3 for x in (rest.first, rest.last)]
        return float(weights @ (1 - np.array(kept)) ** 3) + 1e-3 * rest.group

    seen: list[ClassNumbers] = []

    def counted(numbers):
        return seen.append(numbers) or increase(numbers)

    start = ClassNumbers.largest(CONFIG, 512)

    def list_neighbors(here):
        return here.list_neighbors(CONFIG)

    found = descend(start, list_neighbors, size_of, counted, limit)
    want = full_greedy(start, list_neighbors, size_of, increase, limit)
    assert increase(found) <= limit
    assert len(set(seen)) < 70
    assert size_of(found) <= 1.15 * size_of(want)


def test_a_start_beyond_the_limit_is_where_it_ends():
    start = ClassNumbers.largest(CONFIG, 512)
    assert descend(start, lambda _: {}, lambda _: 1.0, lambda _: 0.2, 0.1) is start
