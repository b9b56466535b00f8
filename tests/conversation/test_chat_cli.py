"""`zdc chat` and `zdc generate --chat` on a tiny model whose words are `w0`, `w1`, …"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hf_variants import write_variant

import zdc_jax
from convert.cli.main import main
from convert.conversion import convert
from zdc_jax.generation.run import Run

TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': 'w5 ', 'user': 'w6 ', 'assistant': ' '}[m.role] + m.content }}"
    "{{ '' if m.role == 'user' else ' w7 ' }}"
    "{% endfor %}"
)
FEW = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("chat")
    write_variant("llama-gqa", folder / "hf")
    config = {"chat_template": TEMPLATE, "eos_token": "w7"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    convert(folder / "hf", folder / "model", progress=False)
    return str(folder / "model")


def piped(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def talk(model: str, messages: list[str], **options) -> list[str]:
    """Return the library's replies."""
    conversation = zdc_jax.chat(zdc_jax.load(model), max_new_tokens=6, **options)
    return [conversation.say(message) for message in messages]


def test_lines_are_messages_and_replies_are_printed(model, capsys, monkeypatch):
    piped(monkeypatch, "w3 w4\n\nw8\n/new\nw3 w4")
    assert main(["chat", model, "--system", "w9", *FEW]) == 0
    out, err = capsys.readouterr()
    first, second = talk(model, ["w3 w4", "w8"], system="w9")
    assert out == f"{first}\n{second}\n{first}\n"
    costs = [
        re.match(r"\[(\d+) tokens reused, (\d+) prefilled in .* KV cache [\d,]+ bytes", line)
        for line in err.splitlines()
    ]
    kept, read = zip(*(map(int, cost.groups()) for cost in costs), strict=True)
    assert kept[0] == kept[2] == 0
    assert read[0] == read[2] == 6  # w5 w9 w7 w6 w3 w4
    assert kept[1] > 6


def test_commands_are_no_messages(model, capsys, monkeypatch):
    piped(monkeypatch, "/nw\nw3 w4\n/quit\nw8")
    assert main(["chat", model, *FEW]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{reply}\n" for reply in talk(model, ["w3 w4"]))
    assert err.startswith("/nw: unknown command; /new starts a new conversation, /quit exits\n")


def test_without_standard_input_there_is_no_chat(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", model]) == 2
    assert capsys.readouterr().err == "error: standard input is closed; `zdc chat` reads messages from it\n"


@pytest.mark.full
def test_the_chat_takes_plans_and_samplings(model, capsys, monkeypatch):
    # The command accepts a stop string too.
    piped(monkeypatch, "w3")
    sampling = zdc_jax.Sampling(2.0, top_k=50, top_p=0.99, seed=3)
    flags = ["--temperature", "2", "--top-k", "50", "--top-p", "0.99", "--seed", "3"]
    assert main(["chat", model, *flags, *FEW]) == 0
    (drawn,) = talk(model, ["w3"], sampling=sampling)
    assert capsys.readouterr().out == f"{drawn}\n"
    assert [drawn] != talk(model, ["w3"])
    piped(monkeypatch, "w3")
    stop = drawn.split()[2]
    assert main(["chat", model, *flags, *FEW, "--stop", stop]) == 0
    assert capsys.readouterr().out == drawn[: drawn.index(stop)] + "\n"
    assert main(["chat", model, "--plan", "5bit", *FEW]) == 2
    assert "--plan 5bit" in capsys.readouterr().err


@pytest.mark.full
def test_through_real_pipes(model):
    # A separate process prints only the replies, and exits at the end of its input.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", "convert.cli.main", "chat", model, *FEW],
        input="w3 w4\nw8\n",
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 2
    assert re.fullmatch(r"(w\d+( |\n))+", run.stdout)


class Keyboard(io.StringIO):
    """A terminal with a user who types."""

    def isatty(self) -> bool:
        return True


def test_somebody_who_types_goes_on_after_errors_and_interrupts(model, capsys, monkeypatch):
    real, interrupted = Run.deltas, []

    def deltas(run, steps):
        for delta in real(run, steps):
            yield delta
            if not interrupted:
                interrupted.append(delta.text)
                raise KeyboardInterrupt

    monkeypatch.setattr(Run, "deltas", deltas)
    monkeypatch.setattr(sys, "stdin", Keyboard("w3 w4\n" + "w1 " * 200 + "\nw8"))
    assert main(["chat", model, *FEW]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"> {interrupted[0]}\n> > ")
    error, cost = err.splitlines()
    assert error.startswith("error: the conversation has ")
    assert re.match(r"\[0 tokens reused, \d+ prefilled", cost)


def test_a_pipe_stops_at_the_first_error(model, capsys, monkeypatch):
    piped(monkeypatch, "w1 " * 200 + "\nw8")
    assert main(["chat", model, *FEW]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (error,) = err.splitlines()
    assert error.startswith(
        "error: the conversation has 201 tokens and leaves no room for a reply within the model's 128"
    )


def test_input_that_is_no_text_is_one_line(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", model, *FEW]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: standard input is not UTF-8: ")


@pytest.mark.full
def test_each_prompt_is_a_message(model, capsys):
    (first,), (second,) = talk(model, ["w3 w4"], system="w9"), talk(model, ["w8"], system="w9")
    assert main(["generate", model, "w3 w4", "w8", "--chat", "--system", "w9", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"w3 w4\n{first}\nw8\n{second}\nKV cache ")
    assert main(["generate", model, "w8", "--chat", "--system", "w9", "--stream", *FEW]) == 0
    assert capsys.readouterr().out == f"{second}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "{}", "w3", "--system", "w9"], "add --chat"),
        (["generate", "{}", "w3", "--chat", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["chat", "{}", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["chat", "{}", "--temperature", "-1"], "--temperature -1"),
        (["chat", "nowhere"], "nowhere does not exist"),
    ],
)
@pytest.mark.matrix
def test_user_errors_are_one_line(model, capsys, monkeypatch, arguments, named):
    piped(monkeypatch, "w3")
    assert main([argument.format(model) for argument in arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert named in error


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat"]])
def test_a_model_without_a_template_is_one_line(tmp_path, capsys, monkeypatch, command):
    write_variant("llama-gqa", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model", progress=False)
    piped(monkeypatch, "w3")
    name, *flags = command
    prompts = ["w3"] if name == "generate" else []
    assert main([name, str(tmp_path / "model"), *prompts, *flags]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: this model has no chat template; ")
