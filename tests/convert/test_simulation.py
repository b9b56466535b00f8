"""Simulated plans against the same plans with arrays of their size, and the knapsack against brute force."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import calibrated_folder

from convert.search.coded_search import CodedBooks
from convert.search.knapsack import MOST_KINDS, choose_kinds, knapsack_path
from convert.search.simulation import Simulation
from convert.search.trials import TrialBook
from zdc_jax.evaluation.perplexity import token_nll
from zdc_jax.evaluation.questions import Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.model import run_layer
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.coded_costs import coded_levels, coded_plan
from zdc_jax.planning.layer_costs import LayerCosts, Precision, build_layer, precisions

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return calibrated_folder(tmp_path_factory.mktemp("simulation"), CONTEXT) / "model"


def draw_windows() -> np.ndarray:
    return np.random.default_rng(1).integers(3, 96, (2, CONTEXT)).astype(np.int32)


def draw_documents() -> list[TaskDocument]:
    rng = np.random.default_rng(5)

    def tokens(count):
        return rng.integers(3, 96, count).astype(np.int32)

    return [TaskDocument(tokens(96), {"recall": (Question(tokens(8), np.arange(8) >= 4),)}) for _ in range(2)]


@pytest.mark.parametrize(
    "layers",
    [
        lambda keys, values: [build_layer(keys[0], values[0]), LayerRanks(0, 0)],
        lambda keys, values: [build_layer(keys[1], values[1]), build_layer(keys[0], values[0])],
    ],
    ids=["a layer dropped", "two kinds"],
)
@pytest.mark.full
def test_a_simulated_plan_is_the_real_one(folder, layers):
    # Windows and questions agree to float32, whatever the bits, and also where far tokens are dropped.
    options = {"windows": draw_windows(), "documents": draw_documents()}
    real = TrialBook(folder, **options)
    keys, values = (Precision(64, 2, 16, 4), Precision(80, 6)), (Precision(80, 3), Precision(80, 8))
    simulation = Simulation(real.checkpoint, real.basis, "float32")
    simulated = TrialBook(folder, **options, simulation=simulation)
    plan = real.bind(coded_plan(real.config, layers(keys, values), 32))
    assert simulation.supports(plan)
    one, other = simulated.measure(plan), real.measure(plan)
    assert one.increase == pytest.approx(other.increase, abs=2e-6)
    assert one.kl == pytest.approx(other.kl, abs=2e-6)
    assert one.kl > 1e-4
    recalled = simulated._measure(plan).logs["recall"], real._measure(plan).logs["recall"]
    np.testing.assert_allclose(*recalled, atol=2e-5)


@pytest.mark.full
def test_all_plans_share_one_program(folder):
    books = CodedBooks.open(folder, draw_windows(), [], dtype=None, batch=1, journal=None)
    keys, values = coded_levels(books.simulated.config.head_dim)
    compiled = []
    for key, value in ((keys[0], values[0]), (keys[3], values[1]), (keys[-1], values[-1])):
        books.simulated.measure(coded_plan(books.simulated.config, [build_layer(key, value)] * 2, 32))
        compiled.append(run_layer.run_whole_layer._cache_size())
    assert len({*compiled}) == 1


@pytest.mark.full
def test_other_plans_have_real_arrays(folder):
    books = CodedBooks.open(folder, draw_windows(), [], dtype=None, batch=1, journal=None)
    book = books.simulated
    keys, values = coded_levels(book.config.head_dim)
    simulation = Simulation(book.checkpoint, book.basis, "float32")
    layers = [build_layer(keys[3], values[1])] * 2
    plan = book.bind(coded_plan(book.config, layers, 32))
    chosen = replace(layers[0], settings=replace(layers[0].settings, read=16))
    others = (
        replace(plan, layers=(chosen, layers[1])),
        replace(plan, window=0, sinks=0),
    )
    assert [simulation.supports(other) for other in others] == [False] * 2
    want = token_nll(books.open_real()._make_network(others[0]), book.windows)
    np.testing.assert_array_equal(token_nll(book._make_network(others[0]), book.windows), want)


@pytest.mark.full
def test_a_journal_tells_simulated_from_real(folder, tmp_path):
    options = {"dtype": None, "batch": 1, "journal": tmp_path / "journal.jsonl"}
    books = CodedBooks.open(folder, draw_windows(), [], **options)
    keys, values = coded_levels(books.simulated.config.head_dim)
    plan = coded_plan(books.simulated.config, [build_layer(keys[3], values[1])] * 2, 32)
    trial = books.simulated.measure(plan)
    again = CodedBooks.open(folder, draw_windows(), [], **options)
    assert again.simulated.trials == [trial]
    assert again.open_real().trials == []


@pytest.mark.parametrize("seed", range(3))
def test_few_kinds_are_chosen_at_little_cost(seed):
    cost = np.random.default_rng(seed).uniform(size=(5, 6))
    best = min(cost[:, list(kinds)].min(1).sum() for kinds in itertools.combinations(range(6), 2))
    choice = choose_kinds(cost, 2)
    assert len(np.unique(choice)) <= 2
    assert best <= cost[np.arange(5), choice].sum() <= 1.2 * best
    np.testing.assert_array_equal(choose_kinds(cost, 6), cost.argmin(1))


def test_the_path_is_the_lower_hull_of_every_plan():
    # With few layers, the number of kinds limits nothing, and no plan lies below the path.
    rng = np.random.default_rng(0)
    keys, values = ((Precision(64, bits) for bits in each) for each in ((2, 3, 8), (2, 8)))
    keys, values = tuple(keys), tuple(values)

    def draw(levels):
        return np.stack([np.sort(rng.exponential(size=len(levels)))[::-1] for _ in range(3)])

    costs = LayerCosts(keys, values, draw(keys), draw(values), np.full(3, np.inf))
    layers = [build_layer(key, value) for key, value in itertools.product(keys, values)]

    def measure(plan):
        size = sum(sum(precision.size for precision in precisions(ranks)) for ranks in plan)
        return size, sum(costs.of(layer, ranks) for layer, ranks in enumerate(plan))

    path = [measure(plan) for plan in knapsack_path(costs, [True] * 3)]
    assert all(a[0] > b[0] and a[1] <= b[1] for a, b in itertools.pairwise(path))
    sizes, nats = zip(*path[::-1], strict=True)
    for plan in itertools.product(layers, repeat=3):
        size, cost = measure(plan)
        assert cost >= np.interp(size, sizes, nats) - 0.02 * (nats[0] - nats[-1])
    assert (sizes[0], sizes[-1]) == (3 * 34, 3 * 130)


def test_a_path_has_few_kinds_and_leaves_sliding_layers_alone():
    rng = np.random.default_rng(1)
    keys, values = coded_levels(128)

    def draw(levels):
        return np.stack([np.sort(rng.exponential(size=len(levels)))[::-1] for _ in range(20)])

    costs = LayerCosts(keys, values, draw(keys), draw(values), np.full(20, np.inf)).monotone()
    stores = [layer % 4 != 0 for layer in range(20)]
    path = knapsack_path(costs, stores)
    assert len(path) > 20
    highest = build_layer(keys[-1], values[-1])
    for plan in path:
        far = [ranks for ranks, each in zip(plan, stores, strict=True) if each]
        assert len({*far}) <= MOST_KINDS
        assert {ranks for ranks, each in zip(plan, stores, strict=True) if not each} == {highest}
