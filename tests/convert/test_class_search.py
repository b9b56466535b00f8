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
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.layer_costs import rank_levels

CONFIG = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1] * 6, head_dim=64)
LENGTH = 1024


def size(plan) -> float:
    return plan.bytes(LENGTH)


def wander(seed: int, constrained: bool) -> list[ClassNumbers]:
    """Return a path from the largest numbers through random neighbours until none is left."""
    rng = np.random.default_rng(seed)
    path = [ClassNumbers.largest(CONFIG, constrained=constrained, block=512)]
    while steps := path[-1].list_neighbors(CONFIG, size, constrained=constrained):
        path.append(steps[str(rng.choice(sorted(steps)))])
    return path


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), constrained=st.booleans())
@pytest.mark.full
def test_steps_lead_to_smaller_plans_one_number_at_a_time(seed, constrained):
    path = wander(seed, constrained)
    sizes = [size(numbers.make_plan(CONFIG)) for numbers in path]
    assert all(a > b for a, b in itertools.pairwise(sizes))
    for before, after in itertools.pairwise(path):
        changed = [name for name, value in vars(before).items() if getattr(after, name) != value]
        assert len(changed) == 1
    if constrained:
        assert all(numbers.meets_constraints() for numbers in path)


def test_without_the_switch_constraints_are_broken():
    assert any(not numbers.meets_constraints() for numbers in wander(0, constrained=False))


FULL, LESS = LayerRanks(64, 64), LayerRanks(32, 48)


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"first": 0.75}, False),
        ({"first": 0.5}, True),
        ({"rest": LayerRanks(64, 48)}, False),
        ({"rest": LayerRanks(32, 64)}, False),
        ({"rest": LayerRanks(48, 32)}, False),
        ({"leaders": LayerRanks(64, 48)}, False),
    ],
)
def test_equation_6(change, holds):
    numbers = ClassNumbers(FULL, LESS, FULL, first=0.25, last=0.5, group=2)
    assert replace(numbers, **change).meets_constraints() == holds


def test_a_plan_says_its_numbers():
    numbers = ClassNumbers(FULL, LESS, LayerRanks(48, 48), 0.25, 0.75, group=2, window=128, sinks=4)
    plan = numbers.make_plan(CONFIG)
    assert plan.classes.leaders == (0, 2, 4)
    assert plan.classes.fraction == (0.25, 0.5, 0.75)
    assert plan.layers == (LayerRanks(48, 48), LESS) * 3
    assert plan.stored_ranks(1) == FULL
    assert (plan.window, plan.sinks, plan.classes.block) == (128, 4, 512)
    said = describe(CONFIG, Trial(plan, 0.5, 0.01, (0.0, 0.02), {}, 0.5))
    assert "25% to 75% of tokens important at (R, Z) = (64, 64), the rest at (32, 48), 3 leaders" in said


@pytest.mark.parametrize(("layers", "sizes"), [(1, (1,)), (2, (2,)), (6, (2, 4, 6)), (8, (2, 4, 8))])
def test_group_sizes(layers, sizes):
    assert list_group_sizes(replace(CONFIG, layers=CONFIG.layers[:1] * layers)) == sizes


def test_one_rank_is_no_classes():
    small = replace(CONFIG, head_dim=16)
    with pytest.raises(PlanError, match=r"constrained=True: .*head_dim=16 allows none"):
        ClassNumbers.largest(small, constrained=True, block=512)
    ClassNumbers.largest(small, constrained=False, block=512).make_plan(small)


def full_greedy(start, list_neighbors, size, increase, limit):
    """Descend greedily, with all neighbours measured at every step."""
    here = start
    while True:
        steps = [n for n in list_neighbors(here).values() if increase(n) <= limit]
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
        ranks = [r for pair in (numbers.important, numbers.rest, numbers.leaders) for r in (pair.qk, pair.v)]
        kept = [levels.index(r) / 3 for r in ranks]
        kept += [FRACTIONS.index(x) / 3 for x in (numbers.first, numbers.last)]
        return float(weights @ (1 - np.array(kept)) ** 3) + 1e-3 * numbers.group

    seen: list[ClassNumbers] = []

    def counted(numbers):
        return seen.append(numbers) or increase(numbers)

    start = ClassNumbers.largest(CONFIG, constrained=False, block=512)

    def list_neighbors(here):
        return here.list_neighbors(CONFIG, size, constrained=False)

    def area(numbers):
        return size(numbers.make_plan(CONFIG))

    found = descend(start, list_neighbors, area, counted, limit)
    want = full_greedy(start, list_neighbors, area, increase, limit)
    assert increase(found) <= limit
    assert len(set(seen)) < 70
    assert area(found) <= 1.1 * area(want)


def test_a_start_beyond_the_limit_is_where_it_ends():
    start = ClassNumbers.largest(CONFIG, constrained=True, block=512)
    assert descend(start, lambda _: {}, lambda _: 1.0, lambda _: 0.2, 0.1) is start
