"""The `zdc` command from end to end on a tiny model, and one line for every user error."""

import json
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from hf_variants import write_variant

from convert.cli import COMMANDS, main
from zdc_jax import CompressionPlan


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """`main` sets up logging and warnings for a terminal; put both back."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """hf/, text/, and model/: converted and calibrated by the command."""
    folder = tmp_path_factory.mktemp("cli")
    write_variant("llama-head-dim-80", folder / "hf")
    rng = np.random.default_rng(0)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(" ".join(f"w{i}" for i in rng.integers(3, 96, 2000)))
    assert main(["convert", str(folder / "hf"), str(folder / "model")]) == 0
    options = ["--tokens", "512", "--context", "64", "--qk", "balanced", "--vo", "balanced"]
    assert main(["calibrate", str(folder / "model"), str(folder / "text"), *options]) == 0
    return folder


def test_plan_perplexity_and_generate(folder, tmp_path, capsys):
    model, text = str(folder / "model"), str(folder / "text")
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    near = ["--window", "16", "--sinks", "2"]
    assert main(["plan", model, str(plan), "--budget", "0.5", *near]) == 0
    assert CompressionPlan.load(plan).window == 16

    options = ["--windows", "3", "--context", "64", "--plan", str(plan), "--output", str(report)]
    assert main(["perplexity", model, text, *options]) == 0
    result = json.loads(report.read_text())
    assert result["windows"] == 3
    assert result["interval"][0] <= result["increase"] <= result["interval"][1]
    assert result["kv_bytes"] == CompressionPlan.load(plan).bytes(64, 1, 4) < result["dense_kv_bytes"]

    capsys.readouterr()
    assert main(["generate", model, "w3 w4 w5", "w6", "--qk", "16", "--max-new-tokens", "4"]) == 0
    assert "KV cache" in capsys.readouterr().out
    assert main(["generate", model, "w3 w4", "--max-new-tokens", "6"]) == 0
    whole = capsys.readouterr().out
    assert main(["generate", model, "w3 w4", "--max-new-tokens", "6", "--stream"]) == 0
    assert capsys.readouterr().out.strip() in whole


def test_inspect_checks_hashes(folder, capsys):
    assert main(["inspect", str(folder / "model"), "--check"]) == 0
    out = capsys.readouterr().out
    assert "all hashes match" in out
    assert "balanced" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["convert", "{}/nowhere", "{}/out"], "is not a folder"),
        (["convert", "{}/hf", "{}/model"], "--overwrite"),
        (["generate", "{}/hf", "w3"], "zdc convert"),
        (["generate", "{}/model", "w3", "--qk", "17"], "qk=17"),
        (["generate", "{}/model", "w3", "--budget", "0.5", "--qk", "16"], "one of --plan"),
        (["generate", "{}/model", "w3", "w4", "--stream"], "one prompt"),
        (["generate", "{}/model", ""], "empty"),
        (["plan", "{}/model", "{}/plan.json"], "say what to keep"),
        (["plan", "{}/model", "{}/plan.json", "--budget", "0.01"], "least possible"),
        (["calibrate", "{}/model", "{}/nowhere.txt"], "nowhere.txt"),
        (["calibrate", "{}/model", "{}/text", "--prune", "1.5"], "prune=1.5"),
        (["perplexity", "{}/model", "{}/text", "--context", "100000"], "100000"),
    ],
)
def test_user_errors_are_one_line(folder, capsys, arguments, named):
    capsys.readouterr()
    assert main([argument.format(folder) for argument in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert named in error
    assert not (folder / "out").exists()
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"zdc {command}" in out
    assert "--flags" not in out
    assert "--options" not in out
