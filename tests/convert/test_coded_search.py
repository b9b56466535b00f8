"""Search for plans of method `coded`: brute force where costs add up, and a whole run on a tiny model."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_books import (
    DISTORTION,
    EVERY,
    LAYERS,
    TOKENS,
    FakeBook,
    H,
    TaskBook,
    books_of,
    every_plan,
    held,
    layer,
    lower_hull,
    token_bytes,
)
from conftest import CONFIGS, calibrated_folder
from hf_variants import write_variant

from convert.cli.main import main
from convert.conversion import convert
from convert.search.coded_search import (
    CHOICES,
    LIST_GROWTH,
    REAL_SHARE,
    SHORTEST_WINDOW,
    UNIFORM,
    CodedBooks,
    CodedSearch,
    TokenChoice,
    limit_reads,
    limit_reads_on_kernels,
    list_choices,
    shrink,
)
from convert.search.search import Search, SearchOptions, describe
from convert.search.trials import Trial, TrialBook
from kernels_pallas import CodedPass, Plane, coded_refusal, scan_refusal
from zdc_jax import CompressionPlan, load
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.coded_costs import (
    PREDICTED_KEYS,
    PREDICTED_VALUES,
    coded_levels,
    expected_error,
    key_shares,
    predict_costs,
)
from zdc_jax.planning.layer_costs import LayerCosts, Precision, build_layer, precisions


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full
def test_the_smallest_plan_is_that_of_brute_force(seed, monkeypatch):
    # The limits are those that corners of the hull just meet. There, the cheapest path is optimal.
    # Losses add up here, so measured ones must not be moved to their mean.
    monkeypatch.setattr("convert.search.coded_search.CUT_FAILURES", 0)
    monkeypatch.setattr("convert.search.coded_search.shrink", np.array)
    plans = every_plan(FakeBook(seed))
    corners = [point for point in lower_hull(plans) if 0.05 < point[1] < np.log(2)]  # Limits are below 1.
    for size, nats in corners[1 :: len(corners) // 3]:
        book = FakeBook(seed)
        limit = float(np.expm1(nats * 1.0001))
        assert size == min(bytes_ for bytes_, cost in plans if np.expm1(cost) <= limit)
        best = CodedSearch(books_of(book), SearchOptions(limit)).run()
        assert held(best.plan) == size
        assert best.plan.window == SHORTEST_WINDOW
        assert best.plan.method == "coded"
        assert best.increase <= limit


def fewest_bytes(book: TaskBook, options: SearchOptions) -> float:
    """Return the least bytes per token of all plans within both limits that keep far tokens."""
    choices = [(token_bytes(*pair), layer(*pair)) for pair in EVERY]
    limits = np.log1p(options.max_degradation), -np.log(options.min_retention)
    of = [[(size, book.cost(i, r), book.lost(i, r)) for size, r in choices] for i in range(LAYERS)]
    sums = (np.sum(each, 0) for each in itertools.product(*of))
    return min(size for size, *lost in sums if np.less_equal(lost, limits).all())


@pytest.mark.full
def test_gains_in_tasks_do_not_pay_for_perplexity(monkeypatch):
    # The result is little larger than the smallest plan within both limits, but much larger at a price of
    # 1.
    monkeypatch.setattr("convert.search.coded_search.CUT_FAILURES", 0)
    options = SearchOptions(0.2, min_retention=0.9)

    def ratio(seed: int) -> float:
        book = TaskBook(seed)
        best = CodedSearch(books_of(book), options).run()
        assert best.increase <= 0.2
        assert best.least_retention >= 0.9
        return held(best.plan) / fewest_bytes(book, options)

    with_price = np.array([ratio(seed) for seed in range(4)])
    monkeypatch.setattr("convert.search.search.PRICES", (1.0,))
    without = np.array([ratio(seed) for seed in range(4)])
    assert with_price.min() >= 1
    assert with_price.mean() < 1.05
    assert with_price.mean() < without.mean() - 0.03


def test_larger_plans_lose_less():
    book = FakeBook(0)
    search = CodedSearch(books_of(book), SearchOptions(0.8))
    best = search.run()
    larger = search.list_larger(1.6)
    sizes = [search.size(plan) / search.size(best.plan) for plan in (best.plan, *larger)]
    assert len(sizes) > 4
    assert sizes[-1] <= 1.6
    assert all(after >= LIST_GROWTH * before for before, after in itertools.pairwise(sizes))
    losses = [best.increase, *(book.measure(plan).increase for plan in larger)]
    assert losses == sorted(losses, reverse=True)
    predicted = [search.predict_loss(plan) for plan in larger]
    assert predicted == sorted(predicted, reverse=True)


def searched(seed: int, limit: float) -> tuple[FakeBook, Trial, Trial]:
    """Return the book, the result, and the smallest plan on the way that reads everything."""
    book, seen = FakeBook(seed), []
    options = SearchOptions(limit, objective="read")
    best = CodedSearch(books_of(book), options, lambda trial, _: seen.append(trial)).run()

    def all_read(plan):
        return not any(ranks.settings.read for ranks in plan.layers if ranks.qk)

    whole = [trial for trial in seen if all_read(trial.plan)]
    return book, best, whole[-1]  # Measured last, with arrays of its size.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.full
def test_no_layer_of_the_result_can_read_less(seed):
    limit, choices = 0.8, list_choices(TOKENS)
    book, best, whole = searched(seed, limit)
    assert best.increase <= limit
    for i, ranks in enumerate(best.plan.layers):
        if not ranks.qk:
            continue
        codes = ranks.settings
        assert ranks in (
            whole.plan.layers[i],
            *(limit_reads(whole.plan.layers[i], each) for each in choices),
        )
        less = [
            limit_reads(whole.plan.layers[i], each) for each in choices if not 0 < codes.read <= each.read
        ]
        for other in less:
            layers = (*best.plan.layers[:i], other, *best.plan.layers[i + 1 :])
            plan = replace(best.plan, layers=layers)
            fewer = book.read_share(plan) < best.read_share
            assert not fewer or book.measure(plan).increase > limit


@pytest.mark.parametrize(("objective", "left"), [("bytes", REAL_SHARE), ("read", REAL_SHARE + 2 / 5)])
def test_time_ends_a_stage_and_is_left_for_the_next(objective, left, monkeypatch):
    # Here a trial takes one second. The last trial may begin as time ends.
    book, real = FakeBook(0), FakeBook(0)
    monkeypatch.setattr("convert.search.search.time.monotonic", lambda: float(book.measured + real.measured))
    options = SearchOptions(0.8, objective=objective, minutes=30 / 60)
    best = CodedSearch(CodedBooks(book, book, lambda: real), options).run()
    assert book.measured == pytest.approx(30 * (1 - left), abs=1)
    assert book.measured + real.measured <= 30 + 1
    assert best.increase <= 0.8
    assert any(ranks.settings.read for ranks in best.plan.layers if ranks.qk) == (objective == "read")


def test_less_is_read_though_single_layers_were_not_all_measured():
    # Trials suffice for uniform plans, for a few layers, and for choices.
    search = CodedSearch(books_of(FakeBook(0)), SearchOptions(0.8, trials=20, objective="read"))
    best = search.run()
    assert search.costs is None
    assert any(ranks.settings.read for ranks in best.plan.layers if ranks.qk)
    assert best.increase <= 0.8


@pytest.mark.full
def test_a_third_of_the_limits_may_be_left_to_what_is_read():
    # On average, less is then read though more may be stored. The limit is met as well.
    shares = []
    for seed in range(3):
        held, read = (
            CodedSearch(books_of(FakeBook(seed)), SearchOptions(0.8, objective=objective)).run()
            for objective in ("bytes", "read")
        )
        assert read.increase <= 0.8
        assert read.bytes_share >= held.bytes_share
        shares.append((held.read_share, read.read_share))
    of_held, of_read = np.mean(shares, 0)
    assert of_read < of_held


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full
def test_reading_less_takes_no_more_bytes_but_the_indexs(seed):
    # More bytes than the smallest plan's are only scales of one byte, and levels of at least four bits.
    book, best, whole = searched(seed, 0.8)

    def levels(rank, each):
        return each.index * each.bits_index + (rank - each.index) * each.bits_k

    more = 0.0
    for ranks, before in zip(best.plan.layers, whole.plan.layers, strict=True):
        if not ranks.qk or not ranks.settings.read:
            assert ranks == before
            continue
        codes, old = ranks.settings, before.settings
        more += (levels(ranks.qk, codes) - levels(ranks.qk, old)) / 8 + (0 if old.index else 1)
        assert (codes.bits_k, codes.bits_v) == (old.bits_k, old.bits_v)
    dense = CompressionPlan.full(book.config).bytes(TOKENS)
    grown = TOKENS * more * book.config.num_kv_heads / dense
    assert best.bytes_share == pytest.approx(whole.bytes_share + grown, rel=1e-9)
    assert best.read_share <= whole.read_share


def test_choices_fall_in_both_numbers_and_in_bytes_read():
    assert all(b.index <= a.index and b.read <= a.read for a, b in itertools.pairwise(CHOICES))
    config = replace(CONFIGS["llama"], layers=CONFIGS["llama"].layers[:1], head_dim=H)
    search = CodedSearch(books_of(FakeBook(0, config.layers)), SearchOptions(0.1))
    plan = search._make_plan([layer((64, 4, 0), 3)], 64)
    plans = [plan, *(replace(plan, layers=(limit_reads(plan.layers[0], choice),)) for choice in CHOICES)]
    read = [each.bytes_read(TOKENS) for each in plans]
    assert all(a > b for a, b in itertools.pairwise(read))
    sizes = {each.bytes(TOKENS) for each in plans[1:]}
    assert sizes == {plan.bytes(TOKENS) + TOKENS * config.num_kv_heads}
    assert list_choices(8192) == CHOICES
    assert list_choices(4096) == CHOICES[1:]
    assert {choice.read for choice in list_choices(1024)} == {256, 128}
    assert list_choices(256) == ()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.matrix
def test_levels_are_grades_that_plans_may_have(head_dim):
    for levels in coded_levels(head_dim):
        sizes = [precision.size for precision in levels]
        assert sizes == sorted(sizes)
        assert levels[-1] == Precision(head_dim, 8)
        assert len({*levels}) == len(levels) >= 4
        for precision in levels:
            ranks = build_layer(precision, Precision(head_dim, 4))
            assert precisions(ranks) == (precision, Precision(head_dim, 4))
            plan = CompressionPlan.of_layers(
                replace(CONFIGS["llama"], head_dim=head_dim),
                [ranks] * CONFIGS["llama"].num_layers,
                method="coded",
                settings=Settings(index=0, read=0),
            )
            per_head = head_dim / 2 + 1 + precision.size
            of_all = CONFIGS["llama"].num_layers * CONFIGS["llama"].num_kv_heads
            assert plan.bytes(2048) - plan.bytes(1024) == 1024 * of_all * per_head
    assert Precision(64, 4).size == 33
    assert Precision(64, 2, 16, 5).size == 24


def test_a_layer_that_slides_keeps_its_window():
    slides = replace(CONFIGS["llama"].layers[0], window=256)
    book = FakeBook(0, (slides, CONFIGS["llama"].layers[0]))
    best = CodedSearch(books_of(book), SearchOptions(0.5)).run()
    assert best.plan.layers[0].qk == 0
    assert best.plan.layers[0].window <= 256


@pytest.mark.full
def test_the_last_stage_has_trials_of_its_own():
    book = FakeBook(1)
    search = CodedSearch(books_of(book), SearchOptions(0.8, trials=40, objective="read"))
    search.run()
    assert any(ranks.qk and ranks.settings.read for ranks in search.best.plan.layers)
    assert book.measured <= 40


def test_a_uniform_plan_is_found_before_layers_are_measured():
    seen: list[Trial] = []
    options = SearchOptions(0.8, trials=5)
    best = CodedSearch(books_of(FakeBook(1)), options, lambda trial, _: seen.append(trial)).run()
    assert best.increase <= 0.8
    assert len({*best.plan.layers}) == 1
    assert best.bytes_share == min(trial.bytes_share for trial in seen if trial.increase <= 0.8)


def test_a_layer_without_far_tokens_is_the_last_resort():
    # A layer whose far tokens cost nothing keeps them until all bits are chosen.
    book, seen = FakeBook(0), []
    book.scale[1] = 1e-9
    best = CodedSearch(
        books_of(book), SearchOptions(0.2), lambda trial, _: seen.append(trial.plan.layers)
    ).run()
    cut = [any(ranks.qk == 0 for ranks in layers) for layers in seen]
    assert best.plan.layers[1].qk == 0
    assert not any(cut[: cut.index(True)])
    assert cut.index(True) > len(UNIFORM)


def test_a_plan_that_fails_with_real_arrays_is_not_the_result():
    # Real arrays lose more here, and the next larger plan takes the place of the smallest.
    book, real = FakeBook(0), FakeBook(0)
    real.scale = 1.02 * book.scale
    search = CodedSearch(CodedBooks(book, book, lambda: real), SearchOptions(0.3))
    best = search.run()
    assert best.increase == real.measure(best.plan).increase <= 0.3
    smallest = min(trial.bytes_share for trial in simulated_within(book, 0.3))
    assert best.bytes_share > smallest


def test_a_caller_that_measures_plans_itself_needs_no_real_arrays():
    def fail():
        raise AssertionError("real arrays were measured")

    book = FakeBook(0)
    best = CodedSearch(CodedBooks(book, book, fail), SearchOptions(0.3, verifies=False)).run()
    assert best.plan == CodedSearch(CodedBooks(book, book, lambda: book), SearchOptions(0.3)).run().plan


def test_losses_of_layers_move_half_of_the_way_to_their_mean():
    found = shrink([np.array([1.0, 0.0]), np.array([3.0, 8.0])])
    np.testing.assert_allclose(found, [[1.5, 2.0], [2.5, 6.0]])
    assert shrink([]).shape == (0, 2)


def simulated_within(book: FakeBook, limit: float) -> list[Trial]:
    """Return the plans within the limit that a search without other real arrays measures."""
    seen: list[Trial] = []
    CodedSearch(books_of(book), SearchOptions(limit), lambda trial, _: seen.append(trial)).run()
    return [trial for trial in seen if trial.increase <= limit]


def readable(ranks):
    """Return whether kernels can read all planes of a layer, according to each kernel's refusals."""
    codes = ranks.settings
    index = [(codes.index, codes.bits_index)] if codes.index else []
    keys = [*index, (ranks.qk - codes.index, codes.bits_k)]

    def like(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.uint8)

    *planes, values = (
        Plane(like(1, 1, 128, C * bits // 8), like(1, 1, 128), bits)
        for C, bits in (*keys, (ranks.v, codes.bits_v))
    )

    def q(C):
        return jax.ShapeDtypeStruct((1, 1, C), jnp.bfloat16)

    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    reasons = [coded_refusal(CodedPass(q(ranks.qk), planes, values, row, row))]
    if codes.read:
        reasons.append(scan_refusal(q(codes.index), planes[0], row, row, config=None))
    return reasons == [None] * len(reasons)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_levels_on_kernels_are_those_that_kernels_read(head_dim):
    keys, values = coded_levels(head_dim)
    for key, value in itertools.product(keys, values):
        layer = build_layer(key, value)
        assert readable(layer)
        for choice in CHOICES:
            wider = limit_reads_on_kernels(layer, choice)
            assert readable(wider)
            assert wider == layer or wider.settings.read == choice.read
            assert wider == layer or wider.settings.index >= choice.index
            assert wider != layer or key.rank - 16 < choice.index or key.bits == 6


def test_four_bits_may_choose_on_kernels():
    half, quarter = TokenChoice(24, 512), TokenChoice(32, 512)
    of_64 = limit_reads_on_kernels(build_layer(Precision(64, 4), Precision(64, 4)), half).settings
    of_128 = limit_reads_on_kernels(build_layer(Precision(128, 4), Precision(128, 4)), quarter).settings
    assert [(x.index, x.bits_index, x.read) for x in (of_64, of_128)] == [(32, 4, 512), (32, 4, 512)]


@pytest.mark.parametrize("objective", ["bytes", "read"])
@pytest.mark.full
def test_a_search_on_kernels_finds_what_they_read(objective):
    found = CodedSearch(books_of(FakeBook(0)), SearchOptions(0.8, objective=objective, on_kernels=True)).run()
    assert found.increase <= 0.8
    far = [ranks for ranks in found.plan.layers if ranks.qk]
    assert far
    assert all(map(readable, far))


def test_kernels_are_for_codes_of_wide_heads():
    with pytest.raises(PlanError, match="on_kernels=True: applies to plans of method 'coded' only"):
        Search.check(SearchOptions(0.1, on_kernels=True))
    book = FakeBook(0)
    book.config = replace(book.config, head_dim=80)
    with pytest.raises(
        PlanError, match=r"on_kernels=True: the kernels decode head dimensions \(64, 128, 256\)"
    ):
        CodedSearch(books_of(book), SearchOptions(0.8, on_kernels=True)).run()


def test_foretold_costs_fall_with_the_error_of_scores():
    book, (keys, values) = FakeBook(0), coded_levels(H)
    squares = book.basis.k_rms[0] ** 2, book.basis.q_rms[0] ** 2
    errors = [expected_error(precision, *squares) for precision in keys]
    shares = key_shares(book.basis, 0, keys)
    assert (shares[0], shares[-1]) == (1, 0)
    np.testing.assert_allclose(shares * (errors[0] - errors[-1]) + errors[-1], errors)
    costs = predict_costs(book.basis, np.linspace(-1, 1, LAYERS), H)
    np.testing.assert_array_equal(costs.cut, [0, 0, 1])
    np.testing.assert_array_equal(costs.qk[:-1], 0)
    assert costs.qk[-1, 0] == PREDICTED_KEYS
    distortion = np.array([DISTORTION[precision.bits] for precision in values])
    want = (distortion - distortion[-1]) / (distortion[0] - distortion[-1])
    np.testing.assert_allclose(costs.v[-1], PREDICTED_VALUES * want, rtol=1e-3)


@pytest.mark.full
def test_a_context_too_short_for_any_choice_is_read_whole(monkeypatch):
    monkeypatch.setattr("convert.search.coded_search.CHOICES", ())
    best = CodedSearch(books_of(FakeBook(1)), SearchOptions(0.8, objective="read")).run()
    assert {ranks.settings.read for ranks in best.plan.layers if ranks.qk} == {0}


def test_costs_are_raised_to_those_of_larger_grades_alone():
    # Precisions of the same size do not raise a cost.
    keys, values = (
        (Precision(64, 3), Precision(48, 4), Precision(64, 4)),
        (Precision(64, 3), Precision(64, 4)),
    )
    assert keys[0].size == keys[1].size
    rng = np.random.default_rng(0)
    qk, v = rng.normal(size=(2, len(keys))), rng.normal(size=(2, len(values)))
    costs = LayerCosts(keys, values, qk, v, np.zeros(2)).monotone()
    for before, after, levels in ((qk, costs.qk, keys), (v, costs.v, values)):
        for (i, precision), row in itertools.product(enumerate(levels), range(2)):
            larger = [before[row, j] for j, other in enumerate(levels) if other.size > precision.size]
            assert after[row, i] == max(0, before[row, i], *larger)
    assert costs.of(0, build_layer(keys[1], values[0])) == costs.qk[0, 1] + costs.v[0, 0]


@pytest.mark.parametrize(
    ("more", "named"), [({"mode": "classes"}, "mode='classes'"), ({"objective": "time"}, "objective='time'")]
)
def test_what_it_has_not_is_named(more, named):
    with pytest.raises(PlanError, match=named):
        CodedSearch(books_of(FakeBook(0)), SearchOptions(0.1, **more))


def test_the_result_is_said_in_words():
    book = FakeBook(0)
    plan = CodedSearch(books_of(book), SearchOptions(0.1))._make_plan(
        [layer((64, 4, 0), 3), layer((64, 2, 5), 3), LayerRanks(0, 0)], 64
    )
    plan = replace(plan, layers=(limit_reads(plan.layers[0], TokenChoice(16, 256)), *plan.layers[1:]))
    trial = Trial(plan, 0.2, 0.01, (0.0, 0.02), {}, 0.1)
    said = describe(book.config, trial)
    assert "20.0% of the dense KV bytes (a token reads 10.0%) at +1.00%" in said
    assert "keys in bits: 4 then 4 (1 layers), 5 then 2 (1 layers); values in bits: 3 (2 layers)" in said
    assert "read: 256 tokens, chosen by 16 coordinates (1 layers), all tokens (1 layers)" in said


CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with model/, converted and calibrated, and text/ to search on."""
    return calibrated_folder(tmp_path_factory.mktemp("coded"), CONTEXT)


@pytest.mark.full
def test_trials_are_the_loaded_models(folder):
    # Trials run one after another, and some share weights of layers.
    windows = np.random.default_rng(1).integers(3, 96, (2, CONTEXT)).astype(np.int32)
    book = TrialBook(folder / "model", windows)
    search = CodedSearch(books_of(book), SearchOptions(0.1))
    whole, fewer = (
        build_layer(Precision(80, 8), Precision(80, 4)),
        build_layer(Precision(64, 2, 16, 5), Precision(80, 3)),
    )
    dense = window_nll(load(folder / "model").network, windows).mean()
    for layers in (
        [whole, whole],
        [limit_reads(fewer, TokenChoice(16, 32)), whole],
        [fewer, LayerRanks(0, 0)],
    ):
        plan = search._make_plan(layers, 32)
        nll = window_nll(load(folder / "model", plan).network, windows).mean()
        assert book.measure(plan).increase == pytest.approx(np.expm1(nll - dense), rel=1e-5)


@pytest.mark.full
def test_bytes_are_those_of_the_models_dtype(folder):
    windows = np.random.default_rng(1).integers(3, 96, (1, CONTEXT)).astype(np.int32)
    books = [TrialBook(folder / "model", windows, dtype=dtype) for dtype in ("float32", "bfloat16")]
    ranks = [LayerRanks(80, 80)] * books[0].config.num_layers
    plan = CompressionPlan.of_layers(books[0].config, ranks, window=16, method="coded")
    assert books[0].share(plan) == books[1].share(plan)

    def size(plan):
        return plan.bytes(CONTEXT, 1, books[0].config.dtype)

    assert books[0].share(plan) == size(plan) / size(CompressionPlan.full(books[0].config))


@pytest.mark.full
def test_command(folder, tmp_path, capsys, monkeypatch):
    # Far tokens harm this model, so only a price on layers without them makes quantized tokens useful.
    for name, few in (
        ("convert.search.coded_search.CHOICES", (TokenChoice(16, 32), TokenChoice(8, 16))),
        ("convert.search.coded_search.UNIFORM", ((8, 0, 8), (2, 5, 2))),
        ("zdc_jax.planning.coded_costs.KEY_PRECISIONS", ((1, 2, 5), (1, 8, 0))),
        ("zdc_jax.planning.coded_costs.VALUE_BITS", (2, 8)),
    ):
        monkeypatch.setattr(name, few)
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
    assert (found.method, found.settings) == ("coded", Settings(index=0, read=0, bits_near=8))
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
        (folder / "model", ["--method", "coded", *texts, "--mode", "uniform"], "--mode uniform"),
        (folder / "model", ["--method", "coded", *texts, "--objective", "time"], "--objective time"),
        (folder / "model", ["--method", "coded", *texts, "--set", "bits_k=4"], "drop --set"),
        (folder / "model", ["--method", "kivi", *texts], "drop --method"),
        (folder / "model", ["--method", "coded", "--max-degradation", "0.1"], "drop --method"),
        (tmp_path / "bare", ["--method", "coded", *texts], "zdc calibrate"),
        (tmp_path / "bare", ["--texts", str(tmp_path / "no.txt")], "zdc calibrate"),
    ):
        capsys.readouterr()
        assert main(["plan", str(model), str(tmp_path / "plan.json"), *flags]) == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "plan.json").exists()
