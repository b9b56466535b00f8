"""`zdc compress`: from a checkpoint to a judged plan, and what happens when it is interrupted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import CONFIGS
from rich.console import Console

from convert import compress as compress_module
from convert import judging
from convert.cli.compress import Compress, _print_outcome
from convert.cli.main import main
from convert.compress import SEARCH_DOCUMENTS, CompressOptions, Outcome, compress
from convert.conversion import convert
from convert.default_text import write_default_text, write_library
from convert.judging import (
    RULER_TASKS,
    Failure,
    Judge,
    Row,
    choose_batch,
    find_loss,
)
from convert.run_state import Candidate
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CheckpointError, EvaluationError, PlanError, TextError
from zdc_jax.evaluation.ruler.score import compare_scores
from zdc_jax.evaluation.splits import documents_of
from zdc_jax.evaluation.text import Document
from zdc_jax.loading import stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import coded_plan

SOURCE = Path(compress_module.__file__).parent / "demo_checkpoint"
REPORT = Judge.report
OPTIONS = CompressOptions(context=1024, documents=2, tokens=4096, minutes=1)
MANY = replace(OPTIONS, documents=20)
"""Options with enough samples of RULER."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Convert the checkpoint once for all tests."""
    return convert(SOURCE, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture
def short(monkeypatch):
    """Read the language reference alone, which suffices for short contexts."""
    monkeypatch.setattr(compress_module, "write_library", lambda folder: [])


@pytest.fixture
def few(converted, short, monkeypatch):
    """Find and judge plans as a test chooses, without a search, and without calibration or conversion."""
    losses = {"searched": 0.0, "8bit": 0.0}

    def search(self):
        checkpoint = self.checkpoint
        basis = stored_basis(checkpoint)
        bits = {"searched": 3, "8bit": 8}
        return {
            name: Candidate(coded_plan(checkpoint, basis, {"bits_k": each, "bits_v": each}))
            for name, each in bits.items()
        }

    def report(self, name):
        task = {"retention": 0.98, "interval": (0.97, 0.99), "counts": True}
        return {
            "perplexity": {"increase": losses[name], "kl": 0.01},
            "tasks": {"copy": task, "lookup": {"retention": 0.1, "interval": None, "counts": False}},
            "ruler": {name: {"ratio": 0.98, "ratio_interval": (0.97, 0.99)} for name in RULER_TASKS},
        }

    def calibrate(path, *_, **__):
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        basis = Basis.identity(config.num_layers, config.num_kv_heads, config.head_dim)
        replace(basis, fingerprint=checkpoint.fingerprint).save(checkpoint.calibration_path / "basis")

    def copy(source, output, *, overwrite):
        if overwrite:
            shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(converted.path, output)

    monkeypatch.setattr(compress_module, "convert", copy)
    monkeypatch.setattr(Judge, "_time", lambda *_: 100.0)
    monkeypatch.setattr(Judge, "report", report)
    monkeypatch.setattr(compress_module._Choice, "_list_candidates", search)
    monkeypatch.setattr(compress_module, "calibrate", calibrate)
    return losses


def test_the_smallest_plan_that_holds_is_stored_and_found(few, tmp_path, capsys):
    output = tmp_path / "model"
    flags = ["--context", "1024", "--documents", "2", "--tokens", "4096", "--minutes", "1"]
    assert main(["compress", str(SOURCE), str(output), *flags]) == 0
    out = capsys.readouterr().out
    assert "searched" in out
    assert f"next: zdc serve {output}" in out
    plan = CompressionPlan.load(output / "plan.json")
    assert plan.settings.bits_v == 3
    assert plan.fingerprint == Checkpoint.open(output).fingerprint
    assert main(["compress", str(SOURCE), str(output), *flags]) == 2
    assert "pass --overwrite to replace it" in capsys.readouterr().err


def test_no_number_of_the_table_is_cut_at_80_characters():
    rows = (
        Row("16 bits", 1.0, 23_678_208, 0.0, None, None, 425.0),
        Row("searched, 20.1%", 0.201, 118_309_120, -0.0021, 0.003, 0.972, 1488.0),
    )
    console = Console(width=80, record=True)
    _print_outcome(
        console, Outcome(CompressionPlan.full(CONFIGS["llama"]), rows, True), Compress(SOURCE, SOURCE)
    )
    text = console.export_text()
    for number in ("118,309,120", "23,678,208", "-0.21%", "0.0030", "0.972", "1,488", "20.1%"):
        assert number in text


def test_a_context_beyond_the_model_is_lowered_and_said(few, tmp_path):
    said: list[str] = []
    compress(SOURCE, tmp_path / "model", options=replace(OPTIONS, context=1 << 20), watch=said.append)
    assert "context of 2,048 tokens, the model's positions, instead of 1,048,576" in said


def test_a_plan_that_fails_the_judgement_gives_way_to_more_bits(few, tmp_path):
    few["searched"], said = 0.02, list[str]()
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS, watch=said.append)
    assert (outcome.rows[1].name, outcome.within) == ("8bit", True)
    assert "searched fails: perplexity rises by 2.00%, limit 1.00%" in said
    assert said[-1] == "8bit holds the limits"
    few["8bit"] = 0.02
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS, overwrite=True)
    assert (outcome.rows[1].name, outcome.within) == ("8bit", False)
    assert CompressionPlan.load(tmp_path / "model" / "plan.json").settings.bits_k == 8


@pytest.fixture
def candidates(few, monkeypatch):
    """Judge plans of 2 to 5 bits: `losses` are predicted, `failures` measured, `judged` lists names."""
    made = SimpleNamespace(losses={2: 8.0, 3: 4.0, 4: 2.0, 5: 1.0}, failures={}, judged=[], refined=None)

    def make_plan(checkpoint, bits):
        return coded_plan(checkpoint, stored_basis(checkpoint), {"bits_k": bits, "bits_v": bits})

    def find_failure(self, name):
        made.judged.append(name)
        return made.failures.get(name)

    def open_search(self, *, refines, used, smallest):
        assert refines
        assert 0 <= used < 60 * OPTIONS.minutes
        assert smallest == make_plan(self.checkpoint, min(made.losses)).bytes(OPTIONS.context)
        book = SimpleNamespace(bind=lambda plan: plan, share=lambda plan: 0.1)

        def run():
            if made.refined is None:
                raise PlanError("no time is left")
            return SimpleNamespace(plan=make_plan(self.checkpoint, made.refined))

        return SimpleNamespace(book=book, run=run)

    def list_candidates(self):
        return {str(b): Candidate(make_plan(self.checkpoint, b), loss) for b, loss in made.losses.items()}

    report = {"perplexity": {"increase": 0.0, "kl": 0.01}, "tasks": {}, "ruler": {}}
    monkeypatch.setattr(Judge, "report", lambda *_: report)
    monkeypatch.setattr(Judge, "_find_failure", find_failure)
    monkeypatch.setattr(compress_module._Choice, "_open_search", open_search)
    monkeypatch.setattr(compress_module._Choice, "_list_candidates", list_candidates)
    return made


def test_after_a_failure_plans_that_would_lose_too_much_are_not_judged(candidates, tmp_path):
    # Two bits lose three times what they may. Three bits lose half of that by the prediction: too much, too.
    candidates.failures = {"2": Failure("too much", 3.0), "4": Failure("too much", 1.1)}
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS)
    assert candidates.judged == ["2", "4", "5"]
    assert (outcome.rows[1].name, outcome.within) == ("5", True)


def test_after_a_failure_hardly_larger_plans_are_not_judged(candidates, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "LEAST_GROWTH", 1.6)
    candidates.failures = {"2": Failure("by chance", 1.0)}
    compress(SOURCE, tmp_path / "model", options=OPTIONS)
    assert candidates.judged == [
        "2",
        "4",
    ]  # Keys and values of three bits have less than 1.6 times the bytes.


@pytest.mark.parametrize(("interval", "excess"), [((0.90, 0.99), 2.0), ((0.73, 0.99), 3.0), (None, 2.0)])
def test_the_excess_is_that_of_the_limit_that_is_missed_most(interval, excess):
    failure = find_loss("copy", 0.90, interval, 0.95)
    assert failure is not None
    assert failure.excess == pytest.approx(excess)


def test_a_number_just_below_its_limit_does_not_look_like_it():
    failure = find_loss("lookup", 0.97, (0.9299, 1.0), 0.97)
    assert failure is not None
    assert failure.reason == "lookup keeps 0.970 (limit 0.970), lowest 0.929 (limit 0.930)"


def test_the_search_goes_on_if_its_first_plan_holds(candidates, tmp_path):
    candidates.losses, candidates.refined, said = {3: 1.0, 4: 0.5}, 2, list[str]()
    output = tmp_path / "model"
    outcome = compress(SOURCE, output, options=OPTIONS, watch=said.append)
    assert candidates.judged == ["3", "refined, 10.0%"]
    assert any("more minutes" in line for line in said)
    assert outcome.rows[1].name == "refined, 10.0%"
    assert CompressionPlan.load(output / "plan.json").settings.bits_v == 2


def test_a_refined_plan_that_fails_gives_way_to_the_one_before(candidates, tmp_path):
    candidates.losses, candidates.refined = {3: 1.0, 4: 0.5}, 2
    candidates.failures = {"refined, 10.0%": Failure("too much", 3.0)}
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS)
    assert candidates.judged == ["3", "refined, 10.0%"]
    assert (outcome.rows[1].name, outcome.within) == ("3", True)


@pytest.mark.parametrize(
    ("losses", "refined"), [({2: 1.0, 3: 0.5}, 2), ({2: 1.0, 3: 0.5}, None), ({2: None, 3: None}, 2)]
)
def test_a_search_that_finds_nothing_smaller_is_not_judged_again(candidates, losses, refined, tmp_path):
    candidates.losses, candidates.refined = losses, refined
    assert compress(SOURCE, tmp_path / "model", options=OPTIONS).rows[1].name == "2"
    assert candidates.judged == ["2"]


def test_a_search_without_time_does_not_go_on(candidates, tmp_path):
    candidates.losses, candidates.refined = {3: 1.0, 4: 0.5}, 2
    compress(SOURCE, tmp_path / "model", options=replace(OPTIONS, minutes=1e-9))
    assert candidates.judged == ["3"]


def test_an_interrupted_run_continues(few, tmp_path, monkeypatch):
    output, done = tmp_path / "model", []
    calibrate = compress_module.calibrate

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(compress_module, "calibrate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(SOURCE, output, options=OPTIONS)
    assert not json.loads((output / "compress.json").read_text())["done"]
    with pytest.raises(CheckpointError, match="no interrupted run with the same options and version"):
        compress(SOURCE, output, options=CompressOptions(context=1024, documents=3))
    monkeypatch.setattr(compress_module, "calibrate", calibrate)
    monkeypatch.setattr(compress_module, "convert", lambda *_, **__: done.append("converted"))
    monkeypatch.setattr(compress_module, "read_source", lambda *_: pytest.fail("the source was read"))
    compress(SOURCE, output, options=OPTIONS)
    assert not done  # The weights were there.
    assert json.loads((output / "compress.json").read_text())["done"]


def test_bad_input_fails_before_any_work(tmp_path):
    with pytest.raises(TextError):
        compress(SOURCE, tmp_path / "model", [tmp_path / "nowhere"])
    assert not (tmp_path / "model").exists()
    short = tmp_path / "short.txt"
    short.write_text("Too few words for a window of text. " * 9)
    with pytest.raises(TextError, match="too little text"):
        compress(SOURCE, tmp_path / "model", [short], OPTIONS)
    assert not (tmp_path / "model").exists()
    for name, value in (("max_loss", 0.0), ("context", 8), ("documents", 0), ("minutes", 0.0)):
        with pytest.raises(EvaluationError, match=f"{name}={value}"):
            CompressOptions(**{name: value})


def test_calibration_does_not_read_what_the_judgement_reads(tmp_path):
    documents = [Document(topic, f"{topic} {i} " * 20) for topic in ("a", "b") for i in range(30)]
    folder = compress_module._write_unjudged(tmp_path / "text", documents)
    written = {path.read_text() for path in folder.rglob("*.txt")}
    judged = {document.text for document in documents_of("report", documents)}
    assert written | judged == {document.text for document in documents}
    assert not written & judged
    assert {path.name for path in folder.iterdir()} == {"a", "b"}


def test_the_default_text_is_long_enough_to_calibrate(tmp_path):
    folder = write_default_text(tmp_path / "text")
    assert sum(path.stat().st_size for path in folder.iterdir()) > 400_000


def test_the_default_text_is_long_enough_to_judge(few, tmp_path, monkeypatch):
    # Tokenizers of large models need 4.3 characters for a token of this text.
    read, sizes = compress_module.prepare, {}

    def prepare(config, tokenizer, plan, documents, *, split, **options):
        sizes[split] = sum(len(document.text) for document in documents_of(split, documents))
        config = replace(config, max_positions=8192)
        return read(config, tokenizer, plan, documents, split=split, **options | {"contexts": (8192,)})

    monkeypatch.setattr(compress_module, "write_library", write_library)
    monkeypatch.setattr(compress_module, "prepare", prepare)
    said: list[str] = []
    assert compress(SOURCE, tmp_path / "model", watch=said.append).within
    assert said[1] == f"text for {SEARCH_DOCUMENTS} documents to search on and 56 to judge on"
    assert sizes["report"] > 4.3 * CompressOptions().documents * 8192
    assert sizes["search"] > 4.3 * SEARCH_DOCUMENTS * 8192


def test_no_text_of_the_library_is_written_twice(tmp_path):
    docstrings, code = write_library(tmp_path)
    text = read_all(code)
    assert "class Mapping(Collection):" in text
    assert "A Mapping is a generic container" in read_all(docstrings)
    assert "A Mapping is a generic container" not in text


def read_all(folder: Path) -> str:
    """Return the text of all files in a folder."""
    return "".join(path.read_text() for path in folder.iterdir())


def test_calibration_reads_at_least_one_context(converted):
    options = replace(OPTIONS, tokens=100)
    calibration = compress_module._calibration_options(options, converted)
    assert calibration.tokens == OPTIONS.context
    assert calibration.center  # On Qwen2.5, plans of the same size lose less.


def test_too_little_default_text_fails_with_the_flag_for_more(short, tmp_path, capsys):
    assert main(["compress", str(SOURCE), str(tmp_path / "model")]) == 2
    assert "choose a shorter context; for text of your own use --texts" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("retention", "interval", "least", "holds"),
    [
        (0.99, (0.98, 1.0), 0.95, True),
        (0.96, (0.90, 1.0), 0.95, False),  # Some documents may lose much.
        (0.94, (0.935, 0.945), 0.95, False),
        (0.96, None, 0.95, True),  # One document has no interval.
        (0.95, (0.91, 1.0), 0.95, True),
        (0.96, (0.955, 0.965), 0.97, False),
        (0.97, (0.93, 0.98), 0.97, True),
        (0.977, (0.929, 1.0), 0.97, False),
        (float("nan"), (0.95, 0.98), 0.95, False),
        (0.96, (float("nan"), 0.98), 0.95, False),
    ],
)
def test_a_task_is_retained_if_its_interval_is_high_enough(retention, interval, least, holds):
    assert (find_loss("copy", retention, interval, least) is None) == holds


def test_the_limit_of_tasks_is_an_option(few, tmp_path, capsys):
    # Both plans keep 0.98 of each task.
    flags = ["--context", "1024", "--documents", "2", "--tokens", "4096", "--minutes", "1"]
    arguments = ["compress", str(SOURCE), str(tmp_path / "model"), *flags, "--min-retention", "0.985"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "searched fails: copy keeps 0.980 (limit 0.985), lowest 0.970 (limit 0.945)" in captured.err
    assert "every task at 98.5% with an interval above 94.5%" in captured.out
    assert main([*arguments[:-1], "1.2", "--overwrite"]) == 2
    assert "--min-retention 1.2 must lie between 0 and 1" in capsys.readouterr().err


def test_gains_in_ruler_count_as_losses_do():
    # Half of the samples are solved without a plan. One plan loses five and wins five others.
    dense = np.arange(100) < 50
    same, lost = np.roll(dense, 5), dense & (np.arange(100) > 4)
    scores = [vars(compare_scores(dense.astype(float), plan.astype(float))) for plan in (same, lost)]
    assert [score["retention"] for score in scores] == [0.9, 0.9]
    assert [score["ratio"] for score in scores] == [1.0, 0.9]
    scores.append(vars(compare_scores(np.ones(100), (np.arange(100) > 3).astype(float))))
    losses = [find_loss("vt", score["ratio"], score["ratio_interval"], 0.95) for score in scores]
    assert [loss is None for loss in losses] == [False, False, True]  # The first fails by its wide interval.


@pytest.fixture
def judged(few, monkeypatch):
    """Judge without networks; `lost` has pairs of key bits and lost tasks of RULER, `ran` all runs.

    `changed` has the samples of a block that a plan answers otherwise.
    """
    made = SimpleNamespace(lost=[], ran=[], dense=np.ones(40), changed=())

    def evaluate(self, network):
        made.ran.append((find_bits(network), "documents"))
        report = {"perplexity": {"increase": 0.0, "kl": 0.01}, "tasks": {}, "ruler": {}}
        return SimpleNamespace(to_json=lambda: report)

    def score_task(network, samples, **_):
        if (bits := find_bits(network)) is None:
            return made.dense
        made.ran.append((bits, samples))
        answered = made.dense * ((bits, samples) not in made.lost)
        answered[[*made.changed]] = 1 - answered[[*made.changed]]
        return answered

    monkeypatch.setattr(Judge, "report", REPORT)
    monkeypatch.setattr(Judge, "_prepare", lambda self, task, _: SimpleNamespace(ruler={task: task}))
    monkeypatch.setattr(judging, "RULER_TASKS", ("vt", "fwe"))
    monkeypatch.setattr(judging.Evaluation, "evaluate", evaluate)
    monkeypatch.setattr(judging, "score_task", score_task)
    return made


def find_bits(network) -> int | None:
    """Return the bits of keys in a network's plan; None for the unmodified model."""
    settings = network.plan.settings_of(0)
    return getattr(settings, "bits_k", None)


def test_a_plan_that_loses_one_task_of_ruler_is_measured_no_further(judged, tmp_path):
    judged.lost, said = [(3, "vt")], list[str]()
    outcome = compress(SOURCE, tmp_path / "model", options=MANY, watch=said.append)
    assert "searched fails: vt keeps 0.000 (limit 0.970), lowest 0.000 (limit 0.930)" in said
    assert (outcome.rows[1].name, outcome.within, outcome.rows[1].worst) == ("8bit", True, 1.0)
    assert judged.ran == [(3, "documents"), (3, "vt"), (8, "documents"), (8, "vt"), (8, "fwe")]


@pytest.mark.parametrize(
    ("changed", "blocks", "holds"),
    [
        (range(130, 134), 1, True),  # As many samples are won as lost: 0.03 after one block.
        (range(126, 138), 2, True),
        (range(122, 142), 3, True),
        (range(126, 132), 1, False),  # All are lost.
        (range(68, 196), 4, False),  # As many are won as lost, but the interval remains too wide.
    ],
)
def test_samples_are_added_until_the_interval_is_narrow(judged, changed, blocks, holds, tmp_path):
    judged.dense, judged.changed = (np.arange(200) < 132).astype(float), changed
    outcome = compress(SOURCE, tmp_path / "model", options=MANY)
    assert (outcome.rows[1].name == "searched") == holds
    asked = [task for bits, task in judged.ran if bits == 3 and task != "documents"]
    assert asked == ["vt"] * blocks + ["fwe"] * blocks * holds


def test_an_interrupted_judgement_repeats_no_part(judged, tmp_path):
    output = tmp_path / "model"

    def interrupt(line: str) -> None:
        if line == "fwe: 1.00; in 16 bits 1.00; 40 samples":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(SOURCE, output, options=MANY, watch=interrupt)
    assert judged.ran == [(3, "documents"), (3, "vt"), (3, "fwe")]
    compress(SOURCE, output, options=MANY)
    assert judged.ran == [(3, "documents"), (3, "vt"), (3, "fwe")]
    report = json.loads((output / "compress.json").read_text())["reports"]["searched"]
    assert {task: score["score"] for task, score in report["ruler"].items()} == {"vt": 1.0, "fwe": 1.0}


@pytest.mark.parametrize(
    ("options", "right", "reason"),
    [
        (OPTIONS, 40, "4 samples are fewer than 20"),
        (MANY, 19, "without a plan 19 of 40 answers are right, fewer than 20"),
        (MANY, None, "context=1024: too short"),
    ],
)
def test_tasks_of_ruler_that_do_not_count_are_left_out(judged, options, right, reason, tmp_path, monkeypatch):
    def refuse(self, task, seed):
        raise EvaluationError("context=1024: too short")

    if right is None:
        monkeypatch.setattr(Judge, "_prepare", refuse)
    judged.dense, said = (np.arange(40) < (right or 0)).astype(float), []
    outcome = compress(SOURCE, tmp_path / "model", options=options, watch=said.append)
    assert outcome.within
    assert judged.ran == [(3, "documents")]
    assert [f"{task} is not judged: {reason}" for task in ("vt", "fwe")] == [
        line for line in said if "not judged" in line
    ]


def test_prompts_are_read_together_if_their_caches_fit(converted, monkeypatch):
    one = CompressionPlan.full(converted.config).bytes(1024)
    for free, batch in ((None, 1), (one, 1), (8 * one, 2), (40 * one, 8), (1000 * one, 16)):
        monkeypatch.setattr(judging, "free_bytes", lambda free=free: free)
        assert choose_batch(converted, 1024) == batch


@pytest.mark.full
def test_the_whole_command(short, tmp_path):
    said: list[str] = []
    options = CompressOptions(context=1024, documents=4, minutes=3, max_loss=0.05)
    outcome = compress(SOURCE, tmp_path / "model", options=options, watch=said.append)
    dense, plan = outcome.rows
    assert plan.share < dense.share == 1
    assert not outcome.within or (plan.increase <= 0.05 and (plan.worst is None or plan.worst >= 0.97))
    assert any(line.startswith("best so far: ") for line in said)
    state = json.loads((tmp_path / "model" / "compress.json").read_text())
    assert {"3bit", "4bit", "8bit"} <= {*state["candidates"]}
    plans = [CompressionPlan.from_json(each["plan"], tmp_path) for each in state["candidates"].values()]
    sizes = [plan.bytes(1024) for plan in plans]
    assert sizes == sorted(sizes)
    assert state["done"]
    assert plan.name in state["reports"]


@pytest.mark.full
def test_an_interrupted_search_measures_no_plan_twice(short, tmp_path):
    # On slow machines the first plan takes more than a minute.
    options = CompressOptions(context=1024, documents=2, minutes=3, max_loss=0.05)
    output = tmp_path / "model"

    def interrupt(line: str) -> None:
        if line.startswith("best so far"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(SOURCE, output, options=options, watch=interrupt)
    before = (output / "compress.journal.jsonl").read_text()
    compress(SOURCE, output, options=options)
    after = (output / "compress.journal.jsonl").read_text()
    assert after.startswith(before)
    entries = [(entry["key"], json.dumps(entry["plan"])) for entry in map(json.loads, after.splitlines())]
    assert len({*entries}) == len(entries)
