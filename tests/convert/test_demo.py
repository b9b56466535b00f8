"""`zdc demo` leaves what is not its own alone, and names a command that can be pasted."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_variants import write_variant
from rich.console import Console

from convert.cli import demo as module
from convert.cli.demo import _claim, _program
from convert.cli.main import main
from zdc_jax.errors import CheckpointError


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
    _claim(output)
    (output / "report.json").write_text("{}")
    _claim(output)
    (output / ".zdc-demo").unlink()
    with pytest.raises(CheckpointError):
        _claim(output)


def test_the_program_named_is_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/zdc", "demo"])
    assert _program() == [".venv/bin/zdc"]
    monkeypatch.setattr(sys, "argv", ["/anywhere/convert/cli.py", "demo"])
    python, *module = _program()
    assert Path(python).samefile(sys.executable)
    assert module == ["-m", "convert.cli.main"]


def test_sources_that_cannot_be_shown_leave_nothing(tmp_path, capsys):
    short = write_variant("llama-gqa", tmp_path / "hf")
    for source, error in (
        (short, "has 128 positions, the demo needs 1024"),
        (tmp_path / "no", "no is not a folder"),
    ):
        assert main(["demo", "--source", str(source), "--output", str(tmp_path / "output")]) == 2
        assert error in capsys.readouterr().err
        assert not (tmp_path / "output").exists()


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch, full_disk):
    made = SimpleNamespace(config=SimpleNamespace(num_layers=1), qk_kind="keys", vo_kind="output")
    for name, found in (
        ("convert", made),
        ("calibrate", made),
        ("write_text", (tmp_path, tmp_path)),
        ("_measured", []),
        ("_print", None),
    ):
        monkeypatch.setattr(module, name, lambda *_, found=found, **__: found)
    _claim(tmp_path)
    (tmp_path / "report.json").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        module.demo(tmp_path, Console(quiet=True))
    assert (tmp_path / "report.json").read_bytes() == b"old"
