"""`zdc demo` runs, leaves folders of others alone, and prints commands that can be pasted."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_variants import write_variant
from rich.console import Console
from safetensors.flax import load_file, save_file

from convert import demo_checkpoint
from convert.cli import demo as module
from convert.cli.demo import DemoSize, claim_folder, make_plan, make_window_plan
from convert.cli.demo_questions import hide_fact
from convert.cli.demo_report import name_program, write_report
from convert.cli.main import main
from convert.conversion import convert
from convert.demo_checkpoint.facts import Fact
from zdc_jax.errors import CheckpointError
from zdc_jax.loading import load
from zdc_jax.plan import CompressionPlan


def test_folders_of_others_are_refused(tmp_path, capsys):
    mine = tmp_path / "text" / "calibration" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for output in (tmp_path, mine):
        assert main(["demo", "--output", str(output)]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert f"{output} is neither empty nor made by the demo" in error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("exists", [False, True])
def test_its_own_folder_is_taken_again(tmp_path, exists):
    output = tmp_path / "a" / "demo"
    if exists:
        output.mkdir(parents=True)
    claim_folder(output)
    (output / "report.json").write_text("{}")
    claim_folder(output)
    (output / ".zdc-demo").unlink()
    with pytest.raises(CheckpointError):
        claim_folder(output)


def test_the_program_named_is_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/zdc", "demo"])
    assert name_program() == [".venv/bin/zdc"]
    monkeypatch.setattr(sys, "argv", ["/anywhere/convert/cli.py", "demo"])
    python, *module = name_program()
    assert Path(python).samefile(sys.executable)
    assert module == ["-m", "convert.cli.main"]


def test_sources_that_cannot_be_shown_leave_nothing(tmp_path, capsys):
    short = write_variant("llama-gqa", tmp_path / "hf")
    for source, error in (
        (short, "has 128 positions, the demo needs 1792"),
        (tmp_path / "no", "no is not a folder"),
    ):
        assert main(["demo", "--source", str(source), "--output", str(tmp_path / "output")]) == 2
        assert error in capsys.readouterr().err
        assert not (tmp_path / "output").exists()


def test_a_report_is_written_whole_or_not_at_all(tmp_path, full_disk):
    report = tmp_path / "report.json"
    report.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        write_report(report, {"source": "model"}, [], [])
    assert report.read_bytes() == b"old"


def test_a_window_plan_stores_as_many_bytes_as_the_plan(tmp_path):
    checkpoint = convert(demo_checkpoint.PATH, tmp_path / "model", progress=False)
    plan = make_plan(checkpoint, SimpleNamespace(coordinates_hash="", shifted=[]))
    window_plan = make_window_plan(checkpoint.config, plan, 1792)
    shorter = replace(window_plan, window=window_plan.window - 1)
    wanted = plan.bytes(1792)
    assert shorter.bytes(1792) < wanted <= window_plan.bytes(1792)
    assert (window_plan.method, window_plan.window < 900) == ("window", True)


def test_a_fact_is_a_paragraph_in_front_of_its_line():
    fact = Fact("code", "red", "house", 4821)
    assert hide_fact(fact, "one\ntwo\nthree", 5) == "one\n\nThe code of the red house is 4821.\n\ntwo\nthree"


@pytest.fixture
def one_layer(tmp_path):
    """Write the first layer of the demo checkpoint, which compiles fast, as a checkpoint of its own."""
    path = tmp_path / "one-layer"
    path.mkdir()
    config = json.loads((demo_checkpoint.PATH / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(demo_checkpoint.PATH / "model.safetensors")
    first = {name: each for name, each in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(first, path / "model.safetensors")
    shutil.copy(demo_checkpoint.PATH / "tokenizer.json", path)
    return path


@pytest.mark.full
def test_the_demo_ends_with_a_quantized_plan_that_loads(tmp_path, one_layer):
    size = DemoSize(context=256, distance=60, lead=40, calibration_tokens=512, heldout_windows=2, questions=2)
    results = module.demo(tmp_path / "out", Console(quiet=True), one_layer, size=size)
    plan = CompressionPlan.load(tmp_path / "out" / "plan.json")
    assert (plan.method, plan.settings.read, plan.settings.bits_near) == ("coded", 0, 8)
    assert load(tmp_path / "out" / "model", tmp_path / "out" / "plan.json").plan == plan
    full, quantized, window = results
    assert full.share == 1
    assert quantized.share == pytest.approx(window.share, rel=0.02)
    assert all(len(result.answers.lines) == 2 for result in results)
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["name"] for each in report["caches"]] == [result.name for result in results]
    assert report["questions"][0]["fact"] in (tmp_path / "out" / "prompt.txt").read_text()
