"""`zdc compress`: from a checkpoint to a judged plan, and what happens when it is interrupted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from convert import compress as compress_module
from convert.cli.main import main
from convert.compress import CompressOptions, compress
from convert.default_text import write_default_text
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import CheckpointError, EvaluationError, TextError
from zdc_jax.evaluation.splits import documents_of
from zdc_jax.evaluation.text import Document
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import index_size

SOURCE = Path(compress_module.__file__).parent / "demo_checkpoint"
OPTIONS = CompressOptions(context=512, documents=2, tokens=4096, minutes=0)


@pytest.fixture
def few(monkeypatch):
    """Try two plans only, with reports that a test chooses and without calibration."""
    candidates = {name: compress_module.CANDIDATES[name] for name in ("3bit", "8bit")}
    monkeypatch.setattr(compress_module, "CANDIDATES", candidates)
    monkeypatch.setattr(compress_module, "FIRST", 0)
    monkeypatch.setattr(compress_module._Trials, "_time", lambda *_: 100.0)
    losses = {"search: 3bit": 0.0, "report: 3bit": 0.0, "report: 8bit": 0.0}

    def report(self, split, name):
        key = f"{split}: {name}"
        if key not in self.state.reports:
            task = {"retention": 0.98, "counts": True}
            self.state.reports[key] = {
                "perplexity": {"increase": losses[key], "kl": 0.01},
                "tasks": {"copy": task, "lookup": {"retention": 0.1, "counts": False}},
            }
            self.state.save()
        return self.state.reports[key]

    def calibrate(path, *_, **__):
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        basis = Basis.identity(config.num_layers, config.num_kv_heads, config.head_dim)
        replace(basis, fingerprint=checkpoint.fingerprint).save(checkpoint.calibration_path / "basis")

    monkeypatch.setattr(compress_module._Trials, "report", report)
    monkeypatch.setattr(compress_module, "calibrate", calibrate)
    return losses


def test_the_smallest_plan_that_holds_is_stored_and_found(few, tmp_path, capsys):
    output = tmp_path / "model"
    flags = ["--context", "512", "--documents", "2", "--tokens", "4096", "--minutes", "0"]
    assert main(["compress", str(SOURCE), str(output), *flags]) == 0
    out = capsys.readouterr().out
    assert "3bit" in out
    assert f"next: zdc serve {output}" in out
    plan = CompressionPlan.load(output / "plan.json")
    assert plan.settings.bits_v == 3
    assert plan.fingerprint == Checkpoint.open(output).fingerprint
    assert main(["compress", str(SOURCE), str(output), *flags]) == 2
    assert "pass --overwrite to replace it" in capsys.readouterr().err


def test_a_plan_that_fails_the_judgement_gives_way_to_more_bits(few, tmp_path):
    few["report: 3bit"] = 0.02
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS)
    assert (outcome.rows[1].name, outcome.within) == ("8bit", True)
    few["report: 8bit"] = 0.02
    outcome = compress(SOURCE, tmp_path / "model", options=OPTIONS, overwrite=True)
    assert (outcome.rows[1].name, outcome.within) == ("8bit", False)
    assert CompressionPlan.load(tmp_path / "model" / "plan.json").settings.bits_k == 8


def test_an_interrupted_run_continues(few, tmp_path, monkeypatch):
    output, done = tmp_path / "model", []
    calibrate = compress_module.calibrate

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(compress_module, "calibrate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compress(SOURCE, output, options=OPTIONS)
    assert not json.loads((output / "compress.json").read_text())["done"]
    with pytest.raises(CheckpointError, match="no interrupted run with the same options"):
        compress(SOURCE, output, options=CompressOptions(context=512, documents=3))
    monkeypatch.setattr(compress_module, "calibrate", calibrate)
    monkeypatch.setattr(compress_module, "convert", lambda *_, **__: done.append("converted"))
    compress(SOURCE, output, options=OPTIONS)
    assert not done  # The weights were there.
    assert json.loads((output / "compress.json").read_text())["done"]


def test_bad_input_fails_before_any_work(tmp_path):
    with pytest.raises(TextError):
        compress(SOURCE, tmp_path / "model", [tmp_path / "nowhere"])
    assert not (tmp_path / "model").exists()
    for name, value in (("max_loss", 0.0), ("context", 8), ("documents", 0), ("minutes", -1.0)):
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


def test_candidates_are_in_order_of_bytes():
    H = 128

    def count(settings):
        index = settings.get("index", index_size(H))
        keys = index * settings.get("bits_index", 0) + (H - index) * settings["bits_k"]
        return keys + H * settings["bits_v"]

    sizes = [count(each) for each in compress_module.CANDIDATES.values()]
    assert sizes == sorted(sizes)


def test_the_default_text_is_long_enough_to_calibrate(tmp_path):
    folder = write_default_text(tmp_path / "text")
    assert sum(path.stat().st_size for path in folder.iterdir()) > 400_000


@pytest.mark.full
def test_the_whole_command(tmp_path):
    outcome = compress(
        SOURCE, tmp_path / "model", options=CompressOptions(context=512, documents=4, minutes=9)
    )
    dense, plan = outcome.rows
    assert plan.share < dense.share == 1
    assert outcome.within == (plan.increase <= 0.01 and (plan.worst is None or plan.worst >= 0.95))
