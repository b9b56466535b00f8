"""Errors and warnings in the words of flags."""

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import pytest
from conftest import LLAMA, TinyModel
from tyro.conf import Positional

from convert.cli.errors import reword_for_flags
from convert.cli.main import main
from zdc_jax import CompressionPlan


@dataclass
class Nested:
    window: int = 0
    method: str | None = None


@dataclass
class Command:
    output: Positional[str]
    flags: Annotated[Nested, "nested"] = field(default_factory=Nested)
    mesh: str | None = None
    top_p: float = 1.0
    overwrite: bool = False
    contexts: tuple[int, ...] = ()
    prompts: Positional[tuple[str, ...]] = ()
    texts: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("message", "options", "expected"),
    [
        ("top_p=0.0: too small", {"top_p": 0.0}, "--top-p 0.0: too small"),
        ("top_p=0.05: too small", {"top_p": 0.0}, "top_p=0.05: too small"),
        ("window=16 and window=1", {"flags": Nested(window=1)}, "window=16 and --window 1"),
        ("mesh='model=2' is too large", {"mesh": "model=2"}, "--mesh model=2 is too large"),
        ("mesh='': empty", {"mesh": ""}, "--mesh '': empty"),
        ("mesh=None: missing", {}, "no --mesh: missing"),
        ("give mesh= with it", {}, "give --mesh with it"),
        ("give check_text= with it", {}, "give --texts with it"),
        ("overwrite=False and overwrite=True", {}, "--no-overwrite and overwrite=True"),
        ("context=9: too long", {"contexts": (8, 9)}, "--contexts 9: too long"),
        ("contexts=(8, 9): too long", {"contexts": (8, 9)}, "--contexts 8 9: too long"),
        ("output='a b': exists", {}, "OUTPUT 'a b': exists"),
        ("prompt='': empty", {"prompts": ("w3", "")}, "PROMPT '': empty"),
        ("layer 0: bits=5: odd", {"flags": Nested(method="kivi")}, "layer 0: --set bits=5: odd"),
        ("layer 0: bits=5: odd", {}, "layer 0: bits=5: odd"),
        ("window=0 must be 1, or None", {}, "--window 0 must be 1"),
    ],
)
def test_arguments_become_flags(message, options, expected):
    assert reword_for_flags(message, Command("a b", **options)) == expected


def test_values_refused_while_parsing_become_flags():
    message = "text_windows=-1: must be at least 1, not batch=2"
    assert reword_for_flags(message, None) == "--text-windows -1: must be at least 1, not batch=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a converted model, which is not calibrated, and files that are no plans."""
    folder = tmp_path_factory.mktemp("errors")
    TinyModel(LLAMA).write(folder / "model")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("w3 w4")
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text('{"type": "object"}')
    CompressionPlan.uniform(LLAMA, qk=16, v=16).save(folder / "plan.json")
    deep = replace(LLAMA, layers=LLAMA.layers[:1] * (len(LLAMA.layers) + 1))
    CompressionPlan.uniform(deep, qk=16, v=16).save(folder / "deep.json")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "{}/model", "{}/no"],
            "TEXT {}/no: no such file or folder; give a text file or a folder",
        ),
        (["calibrate", "{}/model", "{}/no.txt"], "TEXT {}/no.txt: no such file or folder; give a text file"),
        (
            ["compress", "{}/empty", "{}/out", "--texts", "{}/no"],
            "--texts {}/no: no such file or folder; give a text file",
        ),
        (["convert", "{}/empty", "{}/out"], "has no config.json; give a Hugging Face folder or a GGUF file"),
        (
            ["generate", "{}/model", "w3", "--json-schema", "{}/no.json"],
            "--json-schema {}/no.json: no such file or directory",
        ),
        (
            ["serve", "{}/model", "--api-key-file", "{}/no"],
            "--api-key-file {}/no: cannot be read: no such file or directory",
        ),
        (
            ["serve", "{}/model", "--ssl-certfile", "{}/no"],
            "--ssl-certfile {}/no: cannot be loaded: no such file or directory",
        ),
        (
            ["generate", "{}/model", "w3", "--plan", "{}/deep.json"],
            "--plan {}/deep.json: the plan was made for another model: it has layers=4, the model has "
            "layers=3; make one for this model: run `zdc plan MODEL PLAN.json",
        ),
        (
            ["serve", "{}/model", "--plan", "{}/broken.json"],
            "--plan {}/broken.json: is not a plan of `zdc plan`, but broken JSON: ",
        ),
        (
            ["chat", "{}/model", "--plan", "{}/other.json"],
            "--plan {}/other.json: is not a plan of `zdc plan`: it has no format_version",
        ),
        (
            ["evaluate", "{}/model", "{}/text.txt", "--tasks", "perpelxity"],
            "--tasks perpelxity: unknown; did you mean perplexity? It must be one of",
        ),
        (
            ["evaluate", "{}/model", "{}/text.txt", "--tasks", "vt", "nosuch"],
            "--tasks nosuch: unknown; must be one of perplexity",
        ),
        (
            ["generate", "{}/model", "w3", "--plan", "{}/plan.json"],
            "has no calibrated basis, which plans need; run `zdc calibrate {}/model TEXT`",
        ),
    ],
)
def test_errors_name_the_flag_and_the_remedy(folder, capsys, arguments, message):
    assert main([argument.format(folder) for argument in arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message.format(folder) in error
    assert "Errno" not in error
    assert not (folder / "out").exists()


def test_a_port_in_use_is_said_in_words(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder / "model"), "--port", str(port)]) == 2
    expected = (
        f"error: cannot listen on --host 127.0.0.1 --port {port}: the port is already in use; "
        "choose another --port, or 0 for a free one\n"
    )
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("has_moments", "advice"),
    [
        (False, "run `zdc calibrate {} TEXT`"),
        (
            True,
            "run `zdc calibrate {} --from-moments`, which makes the basis from the stored moments without",
        ),
    ],
)
def test_a_missing_calibration_is_said_with_its_remedy(tmp_path, capsys, has_moments, advice):
    TinyModel(LLAMA).write(model := tmp_path / "model")
    if has_moments:
        (model / "calibration" / "moments").mkdir(parents=True)
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert "not calibrated: presets 8bit and 4bit work" in out
    assert advice.format(model) in out
    for flags, start in ((["--preset", "3bit"], "--preset 3bit: "), (["--budget", "0.5"], "")):
        assert main(["plan", str(model), str(tmp_path / "plan.json"), *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {start}{model} ")
        assert advice.format(model) in error


def test_damage_is_said_with_what_its_repair_removes(tmp_path, capsys):
    TinyModel(LLAMA).write(model := tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    assert main(["inspect", str(model), "--check"]) == 2
    advice = "run `zdc convert` again with --overwrite, which also removes the calibration"
    assert capsys.readouterr().err.endswith(f"is damaged (its hash changed); {advice}\n")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--port", "'abc' is not an integer"),
        ("--chunk", "'abc' is not an integer"),
        ("--keep-alive", "a number"),
    ],
)
def test_a_word_in_place_of_a_number_is_quoted(capsys, flag, message):
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "model", flag, "abc"])
    assert stopped.value.code == 2
    words = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"Error parsing {flag}: " in words
    assert message in words


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("cuda", "JAX_PLATFORMS=cuda: JAX finds no such device"), ("", "JAX finds no device")],
)
def test_a_device_that_jax_lacks_is_one_line(folder, monkeypatch, capsys, wanted, message):
    def refuse(*_, **__):
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr("convert.cli.generate.call_with_flags", refuse)
    monkeypatch.setattr("jax.devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
    assert main(["generate", str(folder / "model"), "w3", "--plan", "none"]) == 2
    assert capsys.readouterr().err == (
        f"error: {message}; set JAX_PLATFORMS=cpu, or run pip install 'zdc-jax[cuda]' on a machine with an "
        "NVIDIA GPU\n"
    )
