"""Search for plans: its arithmetic against brute force, and whole runs on a tiny model."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CONFIGS, calibrated_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.cli import search_flags
from convert.cli.main import main
from convert.search.plots import write_front
from convert.search.search import Search, SearchOptions
from convert.search.trials import Trial, TrialBook, pareto_front
from zdc_jax import Checkpoint, CompressionPlan, load
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.questions import Question
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.loading import stored_basis
from zdc_jax.methods import token_classes
from zdc_jax.methods.token_classes.cache import ClassMember
from zdc_jax.plan import LayerRanks, allowed_ranks
from zdc_jax.planning.layer_costs import LayerCosts, Precision, cheapest_path, list_reductions, rank_levels

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with model/, converted and calibrated, and text/ to search on."""
    return calibrated_folder(tmp_path_factory.mktemp("search"), CONTEXT)


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return np.random.default_rng(1).integers(3, 96, (3, CONTEXT)).astype(np.int32)


def costs_of(rng: np.random.Generator, layers: int, ranks: tuple[int, ...]) -> LayerCosts:
    def draw():
        return np.concatenate([rng.normal(size=(layers, len(ranks) - 1)), np.zeros((layers, 1))], 1)

    levels = tuple(map(Precision, ranks))
    return LayerCosts(levels, levels, draw(), draw(), rng.normal(size=layers)).monotone()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), layers=st.integers(1, 4))
def test_the_path_is_the_lower_hull_of_every_choice(seed, layers):
    # Costs add up here, so no choice of ranks lies below the line through the path's points.
    rng, ranks = np.random.default_rng(seed), (16, 32, 48)
    costs = costs_of(rng, layers, ranks)
    choices = [LayerRanks(0, 0), *(LayerRanks(qk, v) for qk in ranks for v in ranks)]

    def kept(plan):
        return sum(r.qk + r.v for r in plan)

    def cost(plan):
        return sum(costs.of(layer, r) for layer, r in enumerate(plan))

    path = cheapest_path(costs)
    sizes, prices = [kept(plan) for plan in path], [cost(plan) for plan in path]
    assert sizes[0] == 96 * layers
    assert sizes[-1] == 0
    assert all(a > b for a, b in itertools.pairwise(sizes))
    for plan in (
        itertools.product(choices, repeat=layers)
        if layers < 3
        else [tuple(choices[i] for i in rng.integers(len(choices), size=layers)) for _ in range(200)]
    ):
        assert cost(plan) >= np.interp(kept(plan), sizes[::-1], prices[::-1]) - 1e-9


def test_single_steps_are_the_next_ones():
    costs = costs_of(np.random.default_rng(0), 2, (16, 32, 64))
    steps = list_reductions(costs, [LayerRanks(64, 32), LayerRanks(0, 0)], single=True)
    assert {(0, LayerRanks(32, 32)), (0, LayerRanks(64, 16)), (0, LayerRanks(0, 0))} == set(steps)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_levels_are_allowed_ranks(head_dim):
    levels = rank_levels(head_dim)
    assert set(levels) <= set(allowed_ranks(head_dim))
    assert levels[-1] == head_dim
    assert 0 not in levels


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points):
    trials = [Trial(None, size, increase, (0, 0), {}, 1.0) for size, increase in points]  # type: ignore[arg-type]
    front = {(t.bytes_share, t.increase) for t in pareto_front(trials)}

    def beaten(p):
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)

    assert front == {p for p in points if not beaten(p)}


@pytest.mark.full
def test_a_trial_is_the_loaded_model(folder, windows):
    book = TrialBook(folder / "model", windows)
    plan = CompressionPlan.uniform(book.config, qk=16, v=32, window=64, sinks=4)
    trial = book.measure(plan)
    nll = [window_nll(load(folder / "model", p).network, windows) for p in (None, plan)]
    assert trial.increase == pytest.approx(np.expm1((nll[1] - nll[0]).mean()), rel=1e-6)

    def size(plan):
        return plan.bytes(CONTEXT, 1, "float32")

    assert trial.bytes_share == size(plan) / size(CompressionPlan.full(book.config))


def documents() -> list[TaskDocument]:
    rng = np.random.default_rng(5)

    def tokens(count):
        return rng.integers(3, 96, count).astype(np.int32)

    def ask():
        return (Question(tokens(8), np.arange(8) >= 4),)

    return [TaskDocument(tokens(64), {"recall": ask()}) for _ in range(3)]


@pytest.mark.full
def test_tasks_limit_the_search_too(folder, windows, tmp_path, monkeypatch):
    # If the limit on perplexity is generous, the limit on tasks decides. The journal remembers both.
    monkeypatch.setattr("zdc_jax.evaluation.retention.LEAST_SCORE", 0.0)  # A tiny model recalls nothing.
    journal = tmp_path / "journal.jsonl"
    book = TrialBook(folder / "model", windows, documents(), journal=journal)
    assert book.counting == ["recall"]
    assert book.measure(CompressionPlan.full(book.config)).least_retention == pytest.approx(1, abs=1e-4)
    found = {}
    for least in (0.0, 0.99):
        options = SearchOptions(0.99, "uniform", 12, min_retention=least)
        found[least] = Search(book, options).run()
    assert found[0.99].least_retention >= 0.99 > found[0.0].least_retention
    assert found[0.99].bytes_share > found[0.0].bytes_share
    again = TrialBook(folder / "model", windows, documents(), journal=journal)
    assert again.trials == book.trials
    assert TrialBook(folder / "model", windows, journal=journal).counting == []


@pytest.mark.parametrize(
    ("mode", "trials", "more"),
    [
        ("window", 30, {}),
        ("uniform", 30, {"objective": "time"}),
        ("classes", 7, {}),
        ("window+classes", 7, {}),
    ],
)
@pytest.mark.full
def test_search_holds_the_limit_and_loses_nothing_when_broken_off(
    folder, windows, tmp_path, monkeypatch, mode, trials, more
):
    # Large steps, few trials.
    monkeypatch.setattr("convert.search.class_search.rank_levels", lambda H: (16, H))
    monkeypatch.setattr("convert.search.class_search.WINDOWS", (16,))
    journal = tmp_path / "journal.jsonl"
    options = SearchOptions(0.05, mode, trials, **more)
    whole = Search(TrialBook(folder / "model", windows), options).run()
    assert whole.increase <= 0.05
    assert whole.bytes_share < 1

    class Broken(Exception):
        pass

    def stop(trial: Trial, best: Trial | None) -> None:
        if len(journal.read_text().splitlines()) > 5:
            raise Broken

    with pytest.raises(Broken):
        Search(TrialBook(folder / "model", windows, journal=journal), options, stop).run()
    with journal.open("a") as file:
        file.write('{"key": "cut o')  # A crash in the middle of a write leaves such a line.
    before = journal.read_text().splitlines()[:-1]
    book = TrialBook(folder / "model", windows, journal=journal)
    book._make_network = fail_on(before, book._make_network)  # type: ignore[method-assign]
    assert Search(book, options).run() == whole


@pytest.mark.full
def test_journals_of_version_1_are_read(folder, windows, tmp_path):
    # Their plans name no basis, and no plan is measured again.
    journal = tmp_path / "journal.jsonl"
    book = TrialBook(folder / "model", windows, journal=journal)
    trial = book.measure(CompressionPlan.uniform(book.config, qk=16, v=32))
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    assert entries[1]["plan"].pop("basis") == ""
    entries[1]["plan"]["format_version"] = 1
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    again = TrialBook(folder / "model", windows, journal=journal)
    again._make_network = lambda plan: pytest.fail("measured again")  # type: ignore[method-assign]
    assert again.trials == [trial]


def fail_on(lines, build):
    """Wrap `build` so that plans already in the journal fail the test.

    The unmodified model runs once more, for the KL divergence of further plans.
    """
    names = {json.dumps(json.loads(line)["plan"]) for line in lines}

    def checked(plan):
        assert plan is None or json.dumps(plan.to_json()) not in names
        return build(plan)

    return checked


@pytest.mark.full
def test_another_limit_costs_no_trial_twice(folder, windows):
    book = TrialBook(folder / "model", windows)
    Search(book, SearchOptions(0.05, trials=30)).run()
    count = len(book.measurements)
    Search(book, SearchOptions(0.05, trials=30)).run()
    assert len(book.measurements) == count


MINUTES = {"max_degradation": 0.1, "minutes": 0.0}
IMPOSSIBLE = [{"max_degradation": limit} for limit in (0.0, -1.0, float("nan"))]


@pytest.mark.parametrize("options", [*IMPOSSIBLE, {"max_degradation": 0.1, "trials": 0}, MINUTES])
def test_impossible_options_are_named(options):
    with pytest.raises(PlanError, match=r"must (lie strictly|be above 0|be at least 1)"):
        SearchOptions(**options)


@pytest.mark.parametrize("name", ["mode", "objective"])
def test_unknown_words_are_named_with_those_allowed(name):
    with pytest.raises(PlanError, match=rf"{name}='both': must be one of \("):
        SearchOptions(0.1, **{name: "both"})


class FakeBook:
    """A trial book that measures by a formula: 4096 tokens, eight layers, a cost per dropped coordinate."""

    config = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1] * 8, head_dim=64)
    windows = np.zeros((1, 4096), np.int32)

    def share(self, plan):
        return plan.bytes(4096) / CompressionPlan.full(self.config).bytes(4096)

    def measure(self, plan):
        lost = 0.0
        for layer, spec in zip(plan.layers, plan.layer_caches("bfloat16"), strict=True):
            parts = [(1.0, (layer.qk, layer.v))]
            if isinstance(spec, ClassMember):
                shares = spec.blocks.share, 1 - spec.blocks.share
                parts = list(zip(shares, spec.ranks, strict=True))
            lost += sum(share * (2 * (1 - qk / 64) ** 2 + (1 - v / 64) ** 2) for share, (qk, v) in parts)
        return Trial(plan, self.share(plan), 0.02 * lost / (1 + plan.window / 64), (0.0, 0.0), {}, 1.0)


def test_time_counts_what_bytes_do_not():
    # V costs prefill more time than Q/K. A window's ring is a second pass, which costs more here than it
    # saves.
    search = Search(FakeBook(), SearchOptions(0.05, "uniform", objective="time"))

    def size(qk, v, **near):
        return search.size(CompressionPlan.uniform(FakeBook.config, qk=qk, v=v, **near))

    assert size(64, 64) == 1
    assert size(32, 16) < size(16, 32) < 1 < size(32, 32, window=512)
    assert search.size(search.run().plan) < 1


@pytest.mark.parametrize(("mode", "windows"), [("classes", {0}), ("window+classes", {128, 256, 512})])
def test_class_modes_take_few_trials_and_every_window(mode, windows):
    tried: list[CompressionPlan] = []
    options = SearchOptions(0.05, mode)
    with pytest.raises(PlanError, match=r"objective='time': .* minimizes bytes only; use 'bytes'"):
        Search(FakeBook(), replace(options, objective="time"))
    best = Search(FakeBook(), options, lambda trial, _: tried.append(trial.plan)).run()
    assert best.increase <= 0.05
    assert best.bytes_share < 0.75
    assert {plan.window for plan in tried} == windows
    assert {plan.sinks for plan in tried} == ({4} if max(windows) else {0})
    assert len(tried) <= 80


def test_a_limit_that_nothing_holds_is_said(folder, windows):
    book = TrialBook(folder / "model", windows)
    book.measure = lambda plan: Trial(plan, 0.5, 1.0, (1.0, 1.0), {}, 1.0)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="mode='uniform': no measured plan stays within"):
        Search(book, SearchOptions(0.01, "uniform")).run()


def test_a_journal_that_is_none_is_named(folder, windows, tmp_path):
    (tmp_path / "j").write_text('{"key": "x"}\n')
    with pytest.raises(PlanError, match="line 1: not an entry of a search journal"):
        TrialBook(folder / "model", windows, journal=tmp_path / "j")


def test_a_line_that_was_cut_off_is_dropped_from_a_full_disk(folder, windows, tmp_path, full_disk):
    journal, kept = tmp_path / "j", b'{"key": "another search", "plan": null, "nll": []}\n'
    journal.write_bytes(kept + b'{"key')
    book = TrialBook(folder / "model", windows, journal=journal)
    first, own = journal.read_bytes().splitlines(keepends=True)
    assert first == kept
    assert json.loads(own)["key"] == book.key


@pytest.mark.parametrize("name", ["front.json", "front.png"])
def test_a_front_is_written_whole_or_not_at_all(windows, tmp_path, monkeypatch, request, name):
    trial = Trial(CompressionPlan.full(CONFIGS["llama"]), 1.0, 0.0, (0.0, 0.0), {}, 1.0)
    book = SimpleNamespace(trials=[trial], bind=lambda plan: plan, windows=windows, documents=[])
    write = partial(write_front, book, trial, SearchOptions(0.1), tmp_path / "front.json")
    write()
    before = (tmp_path / name).read_bytes()
    assert before.startswith(b"\x89PNG" if name.endswith("png") else b"{")

    def write_half(figure, path, **_):
        Path(path).write_bytes(before[:100])
        raise OSError

    if name.endswith("png"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", write_half)
    else:
        request.getfixturevalue("full_disk")
    with pytest.raises(OSError):
        write()
    assert (tmp_path / name).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"front.json", "front.png"}


@pytest.mark.parametrize(("mode", "length"), [("window", 320), ("classes", 256)])
def test_questions_begin_where_plans_can_begin_a_piece(folder, monkeypatch, mode, length):
    # At other positions, token classes give NaN, which no limit admits.
    monkeypatch.setattr(token_classes.Settings, "block", 256)
    monkeypatch.setattr(search_flags, "names", lambda: ("copy@128",))
    text = np.random.default_rng(0).integers(3, 96, (2, 448)).astype(np.int32)
    monkeypatch.setattr(search_flags.SearchFlags, "_draw_windows", lambda *given: text)
    asked = search_flags.SearchFlags(texts=(folder / "text",), mode=mode, text_windows=1, documents=1)
    windows, documents = asked._draw_texts(Checkpoint.open(folder / "model"))
    assert windows.shape == (1, 448)
    assert [len(document.context) for document in documents] == [length]


@pytest.mark.full
def test_command(folder, tmp_path, capsys):
    model, plan = str(folder / "model"), tmp_path / "plan.json"
    arguments = ["plan", model, str(plan), "--max-degradation", "0.1", "--texts", str(folder / "text")]
    small = ["--text-windows", "2", "--context", "128", "--trials", "6", "--min-retention", "0"]
    assert main([*arguments, *small]) == 0
    assert "plans: 1, " in capsys.readouterr().err
    found = CompressionPlan.load(plan)
    checkpoint = Checkpoint.open(model)
    basis = stored_basis(checkpoint).coordinates_hash
    assert (found.fingerprint, found.basis) == (checkpoint.fingerprint, basis)
    front = json.loads((tmp_path / "plan.front.json").read_text())
    assert front["best"]["plan"] == json.loads(plan.read_text())
    assert (tmp_path / "plan.front.png").stat().st_size > 1000
    assert front["best"]["increase"] <= 0.1
    assert load(model, found, dtype="bfloat16").network.dtype == jnp.bfloat16
    capsys.readouterr()
    classes = ["--mode", "classes", "--trials", "5"]
    assert main([*arguments, *small, *classes]) == 0
    assert CompressionPlan.load(plan).settings.block == 128
    front = json.loads((tmp_path / "plan.front.json").read_text())
    assert (front["mode"], front["objective"]) == ("classes", "bytes")
    capsys.readouterr()
    for extra, message in (
        (["--qk", "16"], "a search chooses the whole plan"),
        (["--context", "100000"], "positions"),
        (["--text-windows", "0"], "--text-windows 0"),
        (["--max-degradation", "0"], "--max-degradation 0.0: must lie"),
        (["--min-retention", "1"], "must be in"),
        (["--min-retention", "0.9"], "must be at least 192 tokens for tasks"),
    ):
        assert main([*arguments, *small, *extra]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("w5 w6")
    short = ["--texts", str(tmp_path / "short.txt"), "--context", "128", "--min-retention", "0"]
    assert main(["plan", model, str(plan), "--max-degradation", "0.1", *short]) == 2
    assert "too little text for one window" in capsys.readouterr().err


def test_minutes_begin_with_the_unmodified_model(folder, tmp_path, monkeypatch, capsys):
    # The unmodified model alone takes longer than the limit, so no plan is begun.
    clock = [0.0]

    def slow(*_, **__):
        clock[0] += 90
        return FakeBook()

    monkeypatch.setattr(search_flags, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("convert.search.search.time", search_flags.time)
    monkeypatch.setattr(search_flags, "TrialBook", slow)
    arguments = ["plan", str(folder / "model"), str(tmp_path / "plan.json"), "--texts", str(folder / "text")]
    assert main([*arguments, "--mode", "uniform", "--min-retention", "0", "--minutes", "1"]) == 2
    assert "--mode uniform: no measured plan" in capsys.readouterr().err


class Line:
    """Plans 0, 1, … of falling size, of which the first `within` meet the limit.

    `best` is the best so far.
    """

    allowed = 1.0

    def __init__(self, within: int, best: int | None):
        self.within, self.best, self.tried = within, best, []

    def size(self, plan: int) -> float:
        return 1 / (2 + plan)

    def smallest(self) -> float:
        return 1.0 if self.best is None else self.size(self.best)

    def try_plan(self, plan: int) -> int:
        self.tried.append(plan)
        if plan < self.within and self.size(plan) < self.smallest():
            self.best = plan
        return plan

    def cost(self, plan: int) -> float:
        return 0.0 if plan < self.within else 2.0


@given(count=st.integers(0, 200), data=st.data())
def test_the_last_plan_within_the_limit_is_found_from_any_guess(count, data):
    # A close guess needs few trials.
    within = data.draw(st.integers(0, count))
    guess = data.draw(st.none() | st.integers(0, max(count - 1, 0)))
    best = data.draw(st.none() | st.integers(0, max(within - 1, 0))) if within else None
    line = Line(within, best)
    Search.find_last_within(line, range(count), guess)
    assert line.best == (within - 1 if within else None)
    assert len(set(line.tried)) == len(line.tried) <= 17
    if guess is not None:
        assert len(line.tried) <= 4 + 2 * np.log2(1 + abs(guess - (within - 1)))
