"""The `zdc` command end to end on a tiny model, with a one-line message for every user error."""

import io
import json
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from hf_variants import write_variant
from rich.console import Console

from convert.cli import entry, programs
from convert.cli.basis_report import report_basis
from convert.cli.errors import reword_for_flags
from convert.cli.flags import PlanFlag, SamplingFlags
from convert.cli.main import main
from convert.cli.plan import _report_savings
from convert.compress import CompressOptions
from zdc_jax import Checkpoint, CompressionPlan, LayerRanks, Sampling
from zdc_jax.errors import PlanError, PromptError
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.results import Completion, Generation, Timings
from zdc_jax.loading import stored_basis


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with hf/, text/ and model/, converted and calibrated by the command."""
    folder = tmp_path_factory.mktemp("cli")
    write_variant("llama-head-dim-80", folder / "hf")
    rng = np.random.default_rng(0)
    (folder / "text").mkdir()
    documents = (" ".join(f"w{i}" for i in rng.integers(3, 96, 50)) for _ in range(120))
    (folder / "text" / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    assert main(["convert", str(folder / "hf"), str(folder / "model")]) == 0
    options = ["--tokens", "512", "--context", "64", "--qk", "balanced", "--vo", "balanced"]
    assert main(["calibrate", str(folder / "model"), str(folder / "text"), *options]) == 0
    return folder


@pytest.fixture
def plan(folder, tmp_path) -> str:
    """Return the path of a plan of low rank."""
    path = str(tmp_path / "narrow.json")
    assert main(["plan", str(folder / "model"), path, "--qk", "16"]) == 0
    return path


def test_plan_and_perplexity(folder, tmp_path, capsys):
    model, text = str(folder / "model"), str(folder / "text")
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    near = ["--window", "16", "--sinks", "2"]
    assert main(["plan", model, str(plan), "--budget", "0.5", *near]) == 0
    found, checkpoint = CompressionPlan.load(plan), Checkpoint.open(model)
    assert found.window == 16
    assert (found.fingerprint, found.basis) == (
        checkpoint.fingerprint,
        stored_basis(checkpoint).coordinates_hash,
    )

    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(plan.read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json"}

    options = ["--tasks", "perplexity", "--max-documents", "3", "--contexts", "64", "--output", str(report)]
    assert main(["evaluate", model, text, *options, "--plan", str(plan)]) == 0
    (found,) = json.loads(report.read_text())["contexts"]
    assert (found["context"], found["agreement"], found["tasks"]) == (64, None, {})
    result = found["perplexity"]
    assert result["windows"] == 3
    assert result["interval"][0] <= result["increase"] <= result["interval"][1]
    assert result["kv_bytes"] == CompressionPlan.load(plan).bytes(64, 1, "float32") < result["dense_kv_bytes"]
    assert "unmodified" not in capsys.readouterr().err


def test_plan_says_what_it_saves(folder, tmp_path, capsys):
    # The plan keeps 16 and 32 of 2 x 80 coordinates. A layer without far tokens keeps its ring of 16.
    model, plan = str(folder / "model"), tmp_path / "plan.json"
    assert main(["plan", model, str(plan), "--qk", "16", "--v", "32"]) == 0
    saved, lost = capsys.readouterr().err.splitlines()
    assert "30.0% of a 16-bit cache's bytes at 128 tokens; 0 of" in saved
    assert lost.startswith("certificate: score error mean 0.")

    some = CompressionPlan.load(plan)
    checkpoint = Checkpoint.open(model)
    basis = stored_basis(checkpoint)
    assert (some.fingerprint, some.basis) == (checkpoint.fingerprint, basis.coordinates_hash)
    assert [ranks.shift for ranks in some.layers] == basis.shifted
    some.for_model(some.fingerprint, "old").save(tmp_path / "old.json")
    assert main(["generate", model, "w3", "--plan", str(tmp_path / "old.json")]) == 2
    assert "for basis 'old'" in capsys.readouterr().err
    cut = replace(some, layers=(LayerRanks(0, 0),) * (len(some.layers) - 1) + some.layers[-1:], window=16)
    _report_savings(cut, Checkpoint.open(model))
    saved, lost = capsys.readouterr().err.splitlines()
    L = len(some.layers)
    share = ((L - 1) * 16 * 160 + 128 * 48 + 16 * 112) / (L * 128 * 160)
    assert f"{share:.1%} of" in saved
    assert f"{L - 1} of {L} layers drop all tokens outside the window" in saved
    assert f"(layer {L - 1})" in lost
    assert "1.000" not in lost


def test_evaluate_prints_what_it_writes(folder, tmp_path, capsys):
    # The unmodified model is compared with itself.
    TinyModel(replace(LLAMA, max_positions=320)).write(tmp_path / "model")
    report = tmp_path / "report.json"
    options = [
        "--tasks",
        "passkey",
        "copy",
        "--contexts",
        "256",
        "320",
        "--protocol",
        "exact",
        "--batch",
        "4",
    ]
    options += ["--max-documents", "4", "--output", str(report)]
    assert main(["evaluate", str(tmp_path / "model"), str(folder / "text"), *options]) == 2
    assert "copy@64: the distance must be >= 96" in capsys.readouterr().err
    options[1:3] = ["passkey", "copy@128"]
    assert main(["evaluate", str(tmp_path / "model"), str(folder / "text"), *options]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result == json.loads(report.read_text())
    assert [each["context"] for each in result["contexts"]] == [256, 320]
    for each in result["contexts"]:
        assert (each["perplexity"], each["agreement"]) == (None, None)
        assert list(each["tasks"]) == ["passkey", "copy@128"]
        assert each["tasks"]["passkey"]["retention"] == 1
        assert each["tasks"]["passkey"]["documents"] == 4
    assert (result["protocol"], result["seed"]) == ("exact", 0)
    assert err.startswith("no plan given: measuring the unmodified model\n")
    assert "4 of at most 4 contexts of 320 tokens" in err


def test_token_classes_are_not_read_exactly(folder, tmp_path, capsys):
    config = Checkpoint.open(folder / "model").config
    plan = CompressionPlan.uniform(config, qk=32, v=32)
    replace(plan, method="token_classes", settings=None).save(tmp_path / "plan.json")
    capsys.readouterr()
    options = ["--plan", str(tmp_path / "plan.json"), "--protocol", "exact"]
    assert main(["evaluate", str(folder / "model"), str(folder / "text"), *options]) == 2
    assert "--protocol exact: not for plans of method token_classes" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["{}/nowhere/report.json", "{}/text"])
def test_outputs_are_checked_before_any_work(folder, capsys, monkeypatch, output):
    for module in ("plan", "evaluate"):
        monkeypatch.setattr(f"convert.cli.{module}.Checkpoint", None)
    output, model = output.format(folder), str(folder / "model")
    for arguments in (
        ["evaluate", model, "text", "--output", output],
        ["plan", model, output, "--qk", "16"],
    ):
        assert main(arguments) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: cannot write {output}: ")


def test_an_interrupt_is_one_line(folder, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.cli.generate.load", interrupt)
    assert main(["generate", str(folder / "model"), "w3"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"zdc \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_generate(folder, plan, capsys, monkeypatch):
    model = str(folder / "model")
    assert main(["generate", model, "w3 w4 w5", "w6", "--plan", plan, "--max-new-tokens", "4"]) == 0
    dense = re.search(r"without a plan ([\d,]+)\) for 2 x 128 tokens", capsys.readouterr().out)
    assert main(["generate", model, "w3 w4 w5", "w6", "--max-new-tokens", "4"]) == 0
    assert dense is not None
    assert f"KV cache {dense[1]} bytes for 2 x 128" in capsys.readouterr().out
    assert main(["generate", model, "w3 w4", "--max-new-tokens", "6"]) == 0
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert "KV cache" in rest
    assert main(["generate", model, "w3 w4", "--max-new-tokens", "6", "--stream"]) == 0
    assert "w3 w4" + capsys.readouterr().out == first + "\n"
    assert main(["generate", model, "w3 w4", "--max-new-tokens", "6", "--mesh", "sequence=1"]) == 0
    assert capsys.readouterr().out.startswith(first + "\n")
    assert main(["generate", model, "w3 w4", "--mesh", "sequence=64"]) == 2
    assert "needs 64 devices" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("w3 w4"))
    assert main(["generate", model, "-", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith(first + "\n")


def test_flags_of_sampling_are_parameters_of_sampling(tmp_path):
    schema = {"type": "object", "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    values = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7}
    penalties = {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1}
    flags = SamplingFlags(**values, **penalties, json_schema=tmp_path / "schema.json")
    assert flags.build() == Sampling(**values, **penalties, grammar=Grammar.json(schema))
    assert SamplingFlags(regex="a+").build().grammar == Grammar.regex("a+")
    assert SamplingFlags().build() == Sampling()
    (tmp_path / "schema.json").write_text("{")
    with pytest.raises(PromptError, match=r"--json-schema .*schema\.json: "):
        flags.build()


def test_generated_text_is_printed_as_it_is(folder, capsys, monkeypatch):
    # The output has no markup, emoji, wrapping or expanded tabs.
    text = "\t[bold]a[/bold] :heart: " + "word " * 40 + "\nend "
    result = Generation((Completion((3, 4), text, "length"),), 0, 128, Timings(0.0, 0.0, 0.0))
    monkeypatch.setattr("convert.cli.generate.generate", lambda *_, **__: result)
    assert main(["generate", str(folder / "model"), "[red]w3[/red] :heart:"]) == 0
    assert capsys.readouterr().out.startswith(f"[red]w3[/red] :heart:{text}\n")


@pytest.mark.full
def test_converting_and_calibrating(folder, tmp_path, capsys):
    # The source path also looks like markup.
    source, output = shutil.copytree(folder / "hf", tmp_path / "[red]hf"), tmp_path / "model"
    assert main(["convert", str(source), str(output), "--dtype", "float16"]) == 0
    assert main(["calibrate", str(output), str(folder / "text")]) == 0
    out, err = capsys.readouterr()
    assert f"converted {source} -> {output} (" in out
    assert "worst condition number" in out
    stages = [line.split(":")[0] for line in err.splitlines() if "(100 %)" in line]
    assert stages == ["layers", "moments", "profile of layers", "profile of far attention"]
    assert (output / "calibration" / "basis").is_dir()


def test_warnings_are_one_line_and_hooks_are_put_back(folder, plan, capsys):
    before = warnings.showwarning
    arguments = ["generate", str(folder / "model"), "w3", "--plan", plan, "--max-new-tokens", "100"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        hook = warnings.showwarning
        assert main(arguments) == 0
        assert warnings.showwarning is hook
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: sequences may have 101 tokens")
    assert warnings.showwarning is before


def test_the_alias_converts(folder, tmp_path, monkeypatch, capsys):
    kept: list[str] = []
    monkeypatch.setattr(programs, "keep_programs", lambda: kept.append("programs"))
    monkeypatch.setattr(sys, "argv", ["zdc-convert", str(folder / "hf"), str(tmp_path / "model")])
    assert entry.main_convert() == 0
    assert capsys.readouterr().out.startswith("converted ")
    assert kept == ["programs"]


def test_missing_packages_are_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert entry.main() == 2
    assert capsys.readouterr().err == "error: zdc needs scipy, tyro; run: pip install 'zdc-jax[tools]'\n"


@pytest.mark.full
def test_a_method_in_the_models_own_coordinates(folder, tmp_path, capsys):
    model, plan = str(folder / "model"), tmp_path / "plan.json"
    flags = ["--method", "quest", "--set", "page=8", "read=16", "--window", "8"]
    assert main(["plan", model, str(plan), *flags]) == 0
    assert "decoding a token reads" in capsys.readouterr().err
    value = json.loads(plan.read_text())
    assert (value["method"], value["rotated"], value["settings"]) == ("quest", False, {"page": 8, "read": 16})
    assert main(["generate", model, "w3 w4", "--plan", str(plan), "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    assert main(["plan", model, str(plan), "--method", "int8", "--qk", "16", "--v", "16", "--overwrite"]) == 0
    assert CompressionPlan.load(plan).rotated


def test_inspect_checks_hashes(folder, capsys):
    assert main(["inspect", str(folder / "model"), "--check"]) == 0
    out = capsys.readouterr().out
    assert "all hashes match" in out
    assert json.loads(out[out.index("{") : out.rindex("}") + 1])["layers"] == [
        {"count": 2, "rope": {"theta": 1e4}}
    ]
    assert "balanced" in out
    assert "inaccurate basis: calibrated on 512 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["convert", "{}/nowhere", "{}/out"], "is not a folder"),
        (["convert", "{}/no.gguf", "{}/out"], "no.gguf does not exist; give a GGUF file or"),
        (["convert", "{}/hf", "{}/model"], "--overwrite"),
        (["generate", "{}/hf", "w3"], "zdc convert"),
        (["plan", "{}/model", "{}/plan.json", "--qk", "17"], "--qk 17"),
        (["plan", "{}/model", "{}/plan.json", "--qk", "0"], "--qk 0: a layer without older keys"),
        (["plan", "{}/model", "{}/plan.json", "--qk", "0", "--window", "8"], "add --v 0 and --window"),
        (
            ["plan", "{}/model", "{}/plan.json", "--qk", "16", "--v", "0"],
            "--v 0: a layer without older keys or values drops these tokens; add --qk 0 and --window, or "
            "keep at least 16 coordinates",
        ),
        (
            ["plan", "{}/model", "{}/plan.json", "--texts", "{}/model", "--context", "0"],
            "--context 0: must be at least 2 tokens",
        ),
        (["compress", "{}/hf", "{}/out", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["plan", "{}/model", "{}/plan.json", "--budget", "0.5", "--qk", "16"], "only one of --qk/--v"),
        (["generate", "{}/model", "w3", "w4", "--stream"], "only one prompt"),
        (["generate", "{}/model", ""], "empty"),
        (["plan", "{}/model", "{}/plan.json"], "no plan described"),
        (["plan", "{}/model", "{}/plan.json", "--budget", "0.01"], "least possible"),
        (
            ["plan", "{}/model", "{}/plan.json", "--method", "zip"],
            "--method zip: unknown; must be one of coded, ",
        ),
        (
            ["plan", "{}/model", "{}/plan.json", "--method", "kivi", "--set", "bits"],
            "--set bits: must be NAME=VALUE",
        ),
        (["plan", "{}/model", "{}/plan.json", "--method", "kivi", "--set", "bits=5"], "--set bits=5"),
        (
            ["plan", "{}/model", "{}/plan.json", "--method", "kivi", "--set", "bit=4"],
            "--set bit=4: ",
        ),
        (["plan", "{}/model", "{}/plan.json", "--method", "kivi"], "--window 0"),
        (
            ["plan", "{}/model", "{}/plan.json", "--method", "kivi", "--set", "bits=4", "bits=2"],
            "--set bits=2: bits is given twice",
        ),
        (["plan", "{}/model", "{}/plan.json", "--set", "bits=4"], "add --method"),
        (["plan", "{}/model", "{}/plan.json", "--preset", "4bit", "--method", "fp8"], "drop --method"),
        (
            ["generate", "{}/model", "w3", "--plan", "5bit"],
            "--plan 5bit: no such file; give the file",
        ),
        (["generate", "{}/model", "w3", "--plan", "small"], "run `zdc compress`"),
        (["generate", "{}/model", "w3", "--plan", ""], "--plan '': no such file"),
        (["generate", "{}/model", "w3", "--plan", "{}/model"], "model: is a folder; give the file"),
        (["generate", "{}/model", "-", "-"], "PROMPT -: standard input is one prompt"),
        (["generate", "{}/model", "\udcff"], "PROMPT 1 is not UTF-8"),
        (["calibrate", "{}/model", "{}/nowhere.txt", "--overwrite"], "nowhere.txt"),
        (["calibrate", "{}/model", "{}/text"], "--overwrite"),
        (["calibrate", "{}/model", "{}/text", "--from-moments"], "--from-moments: reads no text"),
        (["convert", "{}/model", "{}/again"], "is already converted"),
        (["calibrate", "{}/model", "{}/text", "--prune", "1.5"], "--prune 1.5"),
        (
            ["calibrate", "{}/model", "{}/text", "--clusters", "16"],
            "--clusters 16: has no effect on moments; use --reduction kmeans or leave it out",
        ),
        (["calibrate", "{}/hf", "{}/text"], "zdc convert"),
        (["calibrate", "{}/model", "{}/text", "--seed", "-1"], "--seed -1"),
        (
            ["calibrate", "{}/model", "{}/text", "--overwrite", "--tokens", "5"],
            "--tokens 5: must be at least 128, one window; raise it, or lower --context",
        ),
        (["evaluate", "{}/model", "{}/text", "--contexts", "64", "129"], "128 positions"),
        (["evaluate", "{}/model", "{}/text", "--contexts", "0"], "--contexts 0"),
        (["evaluate", "{}/model", "{}/text", "--max-documents", "0"], "--max-documents 0"),
        (["evaluate", "{}/model", "{}/text", "--batch", "0"], "--batch 0: must be at least 1"),
        (
            ["evaluate", "{}/model", "{}/text", "--tasks", "poetry"],
            "must be one of perplexity, agreement, copy",
        ),
        (
            ["evaluate", "{}/model", "{}/text", "--tasks", "passkey"],
            "context=128: must be at least 192",
        ),
        (["evaluate", "{}/model"], "TEXT is missing"),
        (
            ["evaluate", "{}/model", "--tasks", "vt", "niah_single_2"],
            "or leave out tasks that read text: niah_single_2",
        ),
        (
            ["evaluate", "{}/model", "--tasks", "vt", "--contexts", "128"],
            "--contexts 128: task 'vt' needs at least",
        ),
        (["evaluate", "{}/model", "{}/text", "--tasks"], "--tasks must name at least one of perplexity"),
        (["plan", "{}/model", "{}/plan.json", "--budget", "0.5", "--texts", "{}/text"], "drop --budget"),
        (
            ["plan", "{}/model", "{}/plan.json", "--texts", "{}/text", "--text-windows", "-5"],
            "--text-windows -5: must be at least 1",
        ),
        (
            ["plan", "{}/model", "{}/plan.json", "--texts", "{}/text", "--text-windows", "0"],
            "--text-windows 0: must be at least 1",
        ),
        (["plan", "{}/model", "{}/plan.json", "--qk", "16", "--on-kernels"], "add --texts"),
        (["plan", "{}/model", "{}/plan.json", "--max-degradation", "0.1", "--trials", "9"], "add --texts"),
        (["plan", "{}/model", "{}/plan.json", "--max-degradation", "0.1", "--sinks", "4"], "drop --sinks"),
        (["generate", "{}/model", "w3", "--plan", "{}/no.json"], "no.json"),
        (["generate", "{}/model", "w3", "--temperature", "-1"], "--temperature -1"),
        (["generate", "{}/model", "w3", "--min-p", "2"], "--min-p 2"),
        (["generate", "{}/model", "w3", "--json-schema", "{}/no.json"], "no.json"),
        (["generate", "{}/model", "w3", "--json-schema", "x.json", "--regex", "a"], "drop one of them"),
        (["generate", "{}/model"], "PROMPT is missing"),
        (
            ["generate", "{}/model", "w3", "--mesh", "model=99,data=1"],
            "--mesh model=99,data=1: needs 99 devices",
        ),
        (["generate", "{}/model", "w3", "--distributed"], "--mesh"),
        (
            ["generate", "{}/model", "w3", "--mesh", "sequence=2", "--process-id", "1"],
            "no --coordinator, no --num-processes, --process-id 1",
        ),
        (["inspect", "{}/text"], "zdc convert"),
    ],
)
def test_user_errors_are_one_line(folder, capsys, arguments, named):
    capsys.readouterr()
    assert main([argument.format(folder) for argument in arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert named in error
    assert not (folder / "out").exists()
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "plan"])
def test_a_folder_without_permission_is_refused_first(folder, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr("convert.cli.output.os.access", lambda path, mode: False)
    arguments = {
        "calibrate": [str(folder / "model"), str(folder / "text"), "--overwrite"],
        "evaluate": [str(folder / "model"), str(folder / "text"), "--output", str(tmp_path / "x.json")],
        "plan": [str(folder / "model"), str(tmp_path / "x.json"), "--method", "int8"],
    }
    assert main([command, *arguments[command]]) == 2
    assert "you have no permission" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_preset_that_is_refused_is_named_by_its_flag(folder, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise PlanError("plan='3bit': would lose too much; use plan='4bit'")

    monkeypatch.setattr("convert.cli.plan_flags.preset_plan", refuse)
    assert main(["plan", str(folder / "model"), str(tmp_path / "x.json"), "--preset", "3bit"]) == 2
    assert "--preset 3bit: would lose too much; use --preset 4bit" in capsys.readouterr().err


def test_too_little_memory_is_one_line(folder, capsys, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr("convert.cli.generate.generate", fail)
    assert main(["generate", str(folder / "model"), "w3"]) == 2
    assert capsys.readouterr().err.endswith("lower the batch, the context or the cache\n")


def test_a_schema_is_named_by_its_file(tmp_path):
    flags, problem = SamplingFlags(json_schema=tmp_path / "schema.json"), "cannot be used: Invalid type: foo"
    said = reword_for_flags(f"""json='{{"type": "foo"}}' {problem}""", flags)
    assert said == f"--json-schema {flags.json_schema} {problem}"
    assert reword_for_flags("or use plan='4bit'", PlanFlag()) == "or use --plan 4bit"


@pytest.mark.parametrize(
    ("message", "reworded"),
    [
        ("lower max_loss, or texts", "lower --max-loss, or texts"),
        ("/runs/max_loss/out exists", "/runs/max_loss/out exists"),
        ("'max_loss' is unknown in config.max_loss", "'max_loss' is unknown in config.max_loss"),
    ],
)
def test_names_of_flags_become_flags_where_they_are_words(message, reworded):
    assert reword_for_flags(message, CompressOptions()) == reworded


def test_a_plan_is_not_replaced_by_accident(folder, tmp_path, capsys):
    command = ["plan", str(folder / "model"), str(tmp_path / "plan.json"), "--method", "int8"]
    assert main(command) == 0
    stored = (tmp_path / "plan.json").read_bytes()
    assert main([*command[:-1], "fp8"]) == 2
    assert "plan.json exists; pass --overwrite to replace it" in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_bytes() == stored
    assert main([*command[:-1], "fp8", "--overwrite"]) == 0


def test_a_method_alone_stores_8_bits_of_all_calibrated_coordinates(folder, tmp_path):
    assert main(["plan", str(folder / "model"), str(tmp_path / "plan.json"), "--method", "coded"]) == 0
    plan = CompressionPlan.load(tmp_path / "plan.json")
    assert {(ranks.qk, ranks.v) for ranks in plan.layers} == {(80, 80)}
    assert plan.basis == stored_basis(Checkpoint.open(folder / "model")).coordinates_hash
    assert (plan.rotated, plan.settings.read, plan.settings.bits_k, plan.settings.bits_v) == (True, 0, 8, 8)


@pytest.mark.parametrize(
    "flags", [["--method", "coded", "--set", "index=8"], ["--preset", "3bit"], ["--budget", "0.5"]]
)
def test_errors_say_how_to_calibrate(folder, tmp_path, capsys, flags):
    assert main(["convert", str(folder / "hf"), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "model"), str(tmp_path / "plan.json"), *flags]) == 2
    assert f"zdc calibrate {tmp_path / 'model'} TEXT" in capsys.readouterr().err


@pytest.mark.parametrize(("head_dim", "kept"), [(1, "1"), (2, "1 2"), (6, "2 3 5 6"), (80, "20 40 60 80")])
def test_the_certificate_is_said_at_each_quarter(head_dim, kept):
    error, condition = np.ones((1, 1, head_dim + 1)), np.ones((1, 1))
    said = SimpleNamespace(k_map=np.eye(head_dim)[None, None], qk_kind="keys", vo_kind="output", num_tokens=1)
    said.qk_error = said.vo_error = error
    said.qk_condition = said.vo_condition = condition
    console = Console(file=io.StringIO(), width=120)
    report_basis(console, said)  # type: ignore[arg-type]
    assert re.findall(r"^│ +(\d+) ", console.file.getvalue(), re.MULTILINE) == kept.split()
