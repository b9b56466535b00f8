"""Search for plans of method `coded`: against brute force where costs add up, and whole on a tiny model."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import CONFIGS, calibrated_folder
from hf_variants import write_variant

from convert.cli.main import main
from convert.conversion import convert
from convert.search.coded_search import (
    CHOICES,
    SHORTEST_WINDOW,
    Choice,
    CodedSearch,
    choices_for,
    choosing,
    coded_levels,
)
from convert.search.search import SearchOptions, describe
from convert.search.trials import Trial, TrialBook
from zdc_jax import CompressionPlan, load
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import LayerRanks, allowed_ranks
from zdc_jax.planning.layer_costs import Grade, LayerCosts

LAYERS, H, TOKENS = 3, 64, 4096
KEYS = ((64, 2), (64, 3), (48, 4), (64, 4), (64, 8))
VALUES = ((64, 2), (64, 3), (64, 4), (64, 8))
DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497, 8: 4.12e-5}
"""Of a unit Gaussian in the best levels (Max 1960; Jayant and Noll 1984)."""
CHOICE_COSTS = (0.001, 0.02, 0.1, 0.2, 0.5, 1.5)
EVERY = [(k, v) for k in KEYS for v in VALUES]


def token_bytes(keys: tuple[int, int], values: tuple[int, int]) -> float:
    """Bytes of a far token and head by hand: levels, and two scales of two bytes."""
    return (keys[0] * keys[1] + values[0] * values[1]) / 8 + 4


class FakeBook:
    """Measures by a formula: costs of grades and of choices add up over layers, windows cost nothing.

    More bits cost as much less as they err less.
    """

    windows = np.zeros((1, TOKENS), np.int32)

    def __init__(self, seed: int, layers=CONFIGS["llama"].layers[:1] * LAYERS):
        rng = np.random.default_rng(seed)
        self.config = replace(CONFIGS["llama"], layers=layers, head_dim=H)

        def fall(grades):
            most = rng.uniform(0.2, 1)
            by_bits = {
                bits: most * (error - DISTORTION[8]) / DISTORTION[2] for bits, error in DISTORTION.items()
            }
            return {
                (rank, bits): by_bits[bits] + (rng.uniform(0, 0.5) if rank < H else 0)
                for rank, bits in grades
            }

        self.scale = rng.lognormal(0, 1, len(layers))
        self.keys, self.values = [fall(KEYS) for _ in layers], [fall(VALUES) for _ in layers]
        self.measured = 0

    def cost(self, layer, ranks):
        """Nats."""
        if ranks.qk == 0:
            return 0.0 if ranks.window else 2.5 * self.scale[layer]
        codes = ranks.settings
        cost = self.keys[layer][ranks.qk, codes.bits_k] + self.values[layer][ranks.v, codes.bits_v]
        if codes.read:
            assert codes.bits_index == max(codes.bits_k, 4)
            cost += CHOICE_COSTS[CHOICES.index(Choice(codes.index, codes.read))]
        return self.scale[layer] * cost

    def share(self, plan):
        return plan.bytes(TOKENS) / CompressionPlan.full(self.config).bytes(TOKENS)

    def read_share(self, plan):
        return plan.bytes_read(TOKENS) / CompressionPlan.full(self.config).bytes_read(TOKENS)

    def measure(self, plan):
        self.measured += 1
        nats = sum(self.cost(layer, ranks) for layer, ranks in enumerate(plan.layers))
        return Trial(plan, self.share(plan), float(np.expm1(nats)), (0.0, 0.0), {}, self.read_share(plan))


def layer(keys, values) -> LayerRanks:
    settings = Settings(bits_k=keys[1], bits_v=values[1], index=0, read=0)
    return LayerRanks(keys[0], values[0], settings=settings)


def every_plan(book) -> list[tuple[float, float]]:
    """Bytes a token and nats of all plans that read everything."""
    choices = [(0.0, LayerRanks(0, 0)), *((token_bytes(*pair), layer(*pair)) for pair in EVERY)]
    of = [[(size, book.cost(i, ranks)) for size, ranks in choices] for i in range(LAYERS)]
    return [tuple(np.sum(each, 0)) for each in itertools.product(*of)]


def lower_hull(points) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for p in sorted(points):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (p[0] - hull[-2][0]) >= (p[1] - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        if not hull or p[0] > hull[-1][0]:
            hull.append(p)
    return hull


def held(plan) -> float:
    """Bytes a far token and head of all layers, by hand."""
    far = [ranks for ranks in plan.layers if ranks.qk]
    return sum(token_bytes((r.qk, r.settings.bits_k), (r.v, r.settings.bits_v)) for r in far)


@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_plan_is_that_of_brute_force(seed):
    """At limits that corners of the hull just hold, where the cheapest path is the best there is."""
    plans = every_plan(FakeBook(seed))
    corners = [point for point in lower_hull(plans) if point[1] > 0.05]
    for size, nats in corners[1 :: len(corners) // 3]:
        book = FakeBook(seed)
        limit = float(np.expm1(nats * 1.0001))
        assert size == min(bytes_ for bytes_, cost in plans if np.expm1(cost) <= limit)
        best = CodedSearch(book, SearchOptions(limit)).run()
        assert held(best.plan) == size
        assert best.plan.window == SHORTEST_WINDOW
        assert best.plan.method == "coded"
        assert best.increase <= limit


@pytest.mark.parametrize("seed", range(4))
def test_no_single_change_of_the_result_holds_the_limit(seed):
    limit = 0.8
    book = FakeBook(seed)
    best = CodedSearch(book, SearchOptions(limit)).run()
    assert best.increase <= limit
    for i, ranks in enumerate(best.plan.layers):
        if not ranks.qk:
            continue
        codes = ranks.settings
        now = CHOICES.index(Choice(codes.index, codes.read)) if codes.read else -1
        whole = replace(ranks, settings=replace(codes, bits_index=4, index=0, read=0))
        less = [choosing(whole, choice) for choice in CHOICES[now + 1 :]]
        assert whole == layer((ranks.qk, codes.bits_k), (ranks.v, codes.bits_v))
        for other in less:
            layers = (*best.plan.layers[:i], other, *best.plan.layers[i + 1 :])
            assert book.measure(replace(best.plan, layers=layers)).increase > limit


def test_a_third_of_the_limits_may_be_left_to_what_is_read():
    """Then no more is read, and no less held; the limit holds as well."""
    less = 0
    for seed in range(3):
        held, read = (
            CodedSearch(FakeBook(seed), SearchOptions(0.8, objective=objective)).run()
            for objective in ("bytes", "read")
        )
        assert read.increase <= 0.8
        assert read.bytes_share >= held.bytes_share
        assert read.read_share <= held.read_share
        less += read.read_share < held.read_share
    assert less


@pytest.mark.parametrize("seed", range(3))
def test_reading_less_takes_no_more_bytes_but_the_indexs(seed):
    """Its scales, and bits of fewer than four: of the smallest plan that reads everything."""
    book, seen = FakeBook(seed), []
    best = CodedSearch(book, SearchOptions(0.8), lambda trial, _: seen.append(trial)).run()
    reads = lambda plan: [ranks.settings.read for ranks in plan.layers if ranks.qk]
    least = min(t.bytes_share for t in seen if t.increase <= 0.8 and not any(reads(t.plan)))
    codes = [ranks.settings for ranks in best.plan.layers if ranks.qk and ranks.settings.read]
    more = sum(2 + each.index * max(0, 4 - each.bits_k) / 8 for each in codes) * book.config.num_kv_heads
    assert more
    dense = CompressionPlan.full(book.config).bytes(TOKENS)
    assert best.bytes_share == pytest.approx(least + TOKENS * more / dense, rel=1e-9)
    assert best.read_share < least


def test_choices_fall_in_both_numbers_and_in_bytes_read():
    assert all(b.index <= a.index and b.read <= a.read for a, b in itertools.pairwise(CHOICES))
    config = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1], head_dim=H)
    search = CodedSearch(FakeBook(0, config.layers), SearchOptions(0.1))
    plan = search._plan([layer((48, 4), (64, 3))], 64)
    plans = [plan, *(replace(plan, layers=(choosing(plan.layers[0], choice),)) for choice in CHOICES)]
    read = [each.bytes_read(TOKENS) for each in plans]
    assert all(a > b for a, b in itertools.pairwise(read))
    sizes = {each.bytes(TOKENS) for each in plans[1:]}
    assert sizes == {plan.bytes(TOKENS) + 2 * TOKENS * config.num_kv_heads}
    assert choices_for(4096) == CHOICES
    assert {choice.read for choice in choices_for(1024)} == {256, 128}
    assert choices_for(256) == ()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_levels_are_grades_that_plans_may_have(head_dim):
    for levels in coded_levels(head_dim):
        sizes = [grade.size for grade in levels]
        assert sizes == sorted(sizes)
        assert levels[-1] == Grade(head_dim, 8)
        assert len({*levels}) == len(levels) >= 4
        assert {grade.rank for grade in levels} <= {*allowed_ranks(head_dim)[1:]}
    assert Grade(64, 4).size == 34


def test_a_layer_that_slides_keeps_its_window():
    slides = replace(CONFIGS["llama"].layers[0], window=256)
    book = FakeBook(0, (slides, CONFIGS["llama"].layers[0]))
    best = CodedSearch(book, SearchOptions(0.5)).run()
    assert best.plan.layers[0].qk == 0
    assert best.plan.layers[0].window <= 256


def test_the_last_stage_has_trials_of_its_own():
    book = FakeBook(1)
    search = CodedSearch(book, SearchOptions(0.8, trials=40, objective="read"))
    search.run()
    assert any(ranks.qk and ranks.settings.read for ranks in search.best.plan.layers)
    assert book.measured <= 40


def test_a_context_too_short_for_any_choice_is_read_whole(monkeypatch):
    monkeypatch.setattr("convert.search.coded_search.CHOICES", ())
    best = CodedSearch(FakeBook(1), SearchOptions(0.8)).run()
    assert {ranks.settings.read for ranks in best.plan.layers if ranks.qk} == {0}


def test_costs_are_raised_to_those_of_larger_grades_alone():
    """Not to those of a grade of the same bytes."""
    keys, values = coded_levels(H)
    assert Grade(64, 3).size == Grade(48, 4).size
    rng = np.random.default_rng(0)
    qk, v = rng.normal(size=(2, len(keys))), rng.normal(size=(2, len(values)))
    costs = LayerCosts(keys, values, qk, v, np.zeros(2)).monotone()
    for before, after, levels in ((qk, costs.qk, keys), (v, costs.v, values)):
        for (i, grade), row in itertools.product(enumerate(levels), range(2)):
            larger = [before[row, j] for j, other in enumerate(levels) if other.size > grade.size]
            assert after[row, i] == max(0, before[row, i], *larger)
    assert costs.of(0, layer((48, 4), (64, 2))) == costs.qk[0, keys.index((48, 4))] + costs.v[0, 0]


@pytest.mark.parametrize(
    ("more", "named"), [({"mode": "classes"}, "mode='classes'"), ({"objective": "time"}, "objective='time'")]
)
def test_what_it_has_not_is_named(more, named):
    with pytest.raises(PlanError, match=named):
        CodedSearch(FakeBook(0), SearchOptions(0.1, **more))


def test_the_result_is_said_in_words():
    book = FakeBook(0)
    plan = CodedSearch(book, SearchOptions(0.1))._plan([layer((48, 4), (64, 3))] * 2 + [LayerRanks(0, 0)], 64)
    plan = replace(plan, layers=(choosing(plan.layers[0], Choice(16, 256)), *plan.layers[1:]))
    trial = Trial(plan, 0.2, 0.01, (0.0, 0.02), {}, 0.1)
    said = describe(book.config, trial)
    assert "20.0% of the dense KV bytes (a token reads 10.0%) at +1.00%" in said
    assert "1 of 3 layers without distant tokens; keys in bits: 4 (2 layers); values in bits: 3 (2" in said
    assert "read: 256 tokens, chosen by 16 coordinates (1 layers), all tokens (1 layers)" in said


CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model/ converted and calibrated, text/ to search on."""
    return calibrated_folder(tmp_path_factory.mktemp("coded"), CONTEXT)


def test_trials_are_the_loaded_models(folder):
    """One after another, of which some share the weights of some layers."""
    windows = np.random.default_rng(1).integers(3, 96, (2, CONTEXT)).astype(np.int32)
    book = TrialBook(folder / "model", windows)
    search = CodedSearch(book, SearchOptions(0.1))
    whole, fewer = layer((80, 8), (80, 4)), layer((64, 4), (80, 3))
    dense = window_nll(load(folder / "model").network, windows).mean()
    for layers in ([whole, whole], [choosing(fewer, Choice(16, 32)), whole], [fewer, LayerRanks(0, 0)]):
        plan = search._plan(layers, 32)
        nll = window_nll(load(folder / "model", plan).network, windows).mean()
        assert book.measure(plan).increase == pytest.approx(np.expm1(nll - dense), rel=1e-5)


def test_bytes_are_those_of_the_models_dtype(folder):
    windows = np.random.default_rng(1).integers(3, 96, (1, CONTEXT)).astype(np.int32)
    books = [TrialBook(folder / "model", windows, dtype=dtype) for dtype in ("float32", "bfloat16")]
    ranks = [LayerRanks(80, 80)] * books[0].config.num_layers
    plan = CompressionPlan.of_layers(books[0].config, ranks, window=16, method="coded")
    assert books[0].share(plan) == books[1].share(plan)
    size = lambda plan: plan.bytes(CONTEXT, 1, books[0].config.dtype)
    assert books[0].share(plan) == size(plan) / size(CompressionPlan.full(books[0].config))


def test_command(folder, tmp_path, capsys, monkeypatch):
    """On a model that loses by its far tokens, so that only a price on layers without makes codes of use."""
    for name, few in (
        ("CHOICES", (Choice(16, 32), Choice(8, 16))),
        ("KEY_GRADES", ((1, 4), (1, 8))),
        ("VALUE_GRADES", ((1, 3), (1, 8))),
    ):
        monkeypatch.setattr(f"convert.search.coded_search.{name}", few)
    measure = TrialBook.measure

    def priced(book, plan):
        trial = measure(book, plan)
        return replace(trial, increase=trial.increase + sum(ranks.qk == 0 for ranks in plan.layers))

    monkeypatch.setattr(TrialBook, "measure", priced)
    model, plan = str(folder / "model"), tmp_path / "plan.json"
    arguments = ["plan", model, str(plan), "--method", "coded", "--texts", str(folder / "text")]
    small = ["--text-windows", "2", "--context", str(CONTEXT), "--trials", "20", "--min-retention", "0"]
    small += ["--max-degradation", "0.1"]
    assert main([*arguments, *small]) == 0
    assert "keys in bits: " in capsys.readouterr().out
    found = CompressionPlan.load(plan)
    assert (found.method, found.settings) == ("coded", Settings(index=0, read=0))
    best = json.loads((tmp_path / "plan.front.json").read_text())["best"]
    assert best["plan"] == json.loads(plan.read_text())
    assert best["increase"] <= 0.1
    assert best["read_share"] < best["bytes_share"] < 1
    journal = (tmp_path / "plan.journal.jsonl").read_text()
    assert main([*arguments, *small]) == 0
    assert (tmp_path / "plan.journal.jsonl").read_text() == journal
    assert CompressionPlan.load(plan) == found


def test_user_errors_are_one_line(folder, tmp_path, capsys):
    write_variant("llama-head-dim-80", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "bare", progress=False)
    texts = ["--texts", str(folder / "text"), "--context", str(CONTEXT), "--min-retention", "0"]
    for model, flags, named in (
        (folder / "model", ["--method", "coded", *texts, "--mode", "uniform"], "mode='uniform'"),
        (folder / "model", ["--method", "coded", *texts, "--objective", "time"], "objective='time'"),
        (folder / "model", ["--method", "coded", *texts, "--set", "bits_k=4"], "drop --set"),
        (folder / "model", ["--method", "kivi", *texts], "drop --method"),
        (folder / "model", ["--method", "coded", "--max-degradation", "0.1"], "drop --method"),
        (tmp_path / "bare", ["--method", "coded", *texts], "zdc calibrate"),
    ):
        capsys.readouterr()
        assert main(["plan", str(model), str(tmp_path / "plan.json"), *flags]) == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "plan.json").exists()
