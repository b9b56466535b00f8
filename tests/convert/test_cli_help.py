"""Flags, help and completions of the `zdc` command, which need no model."""

import re
import subprocess
import sys

import pytest

from convert.cli.main import SUMMARIES, import_command, main

PENALTY_FLAGS = "presence-penalty frequency-penalty repetition-penalty"
SAMPLING_FLAGS = f"temperature top-k top-p min-p {PENALTY_FLAGS} json-schema regex seed"
PLAN_FLAGS = "preset qk v budget max-score-error window sinks method set"
FLAGS = {
    "compress": "max-loss min-retention context minutes tokens documents seed texts overwrite",
    "convert": "dtype overwrite verify",
    "calibrate": "qk vo center tokens context batch seed reduction prune clusters profile from-moments "
    "overwrite dtype",
    "plan": f"{PLAN_FLAGS} max-degradation texts min-retention documents mode objective "
    "on-kernels trials minutes text-windows context seed batch dtype overwrite",
    "generate": f"plan {SAMPLING_FLAGS} max-new-tokens stop chat system stream mesh payload dtype "
    "max-positions reproducible distributed coordinator num-processes process-id join-timeout",
    "chat": f"plan {SAMPLING_FLAGS} system max-new-tokens stop dtype max-positions",
    "serve": "plan host port uds ssl-certfile ssl-keyfile root-path api-key-file keep-alive "
    "allowed-origins access-log "
    "name max-sequences max-model-len cache-tokens chunk decode-steps "
    "max-waiting replicas drain-seconds mesh dtype max-positions reproducible",
    "evaluate": "plan tasks contexts protocol max-documents batch seed dtype output",
    "inspect": "check",
    "demo": "source output",
}


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (["serve", "m", "--dtype"], "'float32', 'bfloat16', 'float16'"),
        (["convert", "m", "o", "--dtype"], "'float32', 'bfloat16', 'float16'"),
        (["plan", "m", "p.json", "--preset"], "'8bit', '4bit', '3bit'"),
    ],
)
@pytest.mark.parametrize("typed", ["5bit", "None"])
def test_an_error_lists_the_choices_that_can_be_typed(arguments, choices, typed, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, typed])
    assert stopped.value.code == 2
    words = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"invalid choice '{typed}' for argument '{arguments[-1]}'. Expected one of ({choices})" in words


def test_completions_list_the_choices_that_can_be_typed(capsys):
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", "bash"])
    assert "'None'" not in capsys.readouterr().out


@pytest.mark.parametrize("command", SUMMARIES)
def test_help_lists_flat_flags(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"zdc {command}" in out
    flags = set(re.findall(r"--([a-z][\w.-]*)", out)) - {"help"}
    assert {flag for flag in flags if not flag.startswith("no-")} == set(FLAGS[command].split())


@pytest.mark.parametrize(
    ("typed", "advice"), [("serv", "did you mean serve?"), ("nonsense", "choose one of compress, convert,")]
)
def test_an_unknown_command_is_named(typed, advice, capsys):
    assert main([typed, "model"]) == 2
    assert f"error: '{typed}' is not a command; {advice}" in capsys.readouterr().err


def test_help_names_what_a_search_leaves(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("PLAN.front.json", "PLAN.front.png", "PLAN.journal.jsonl"))


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in SUMMARIES)


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_of_commands_has_the_first_lines_of_their_help(name):
    assert import_command(name).__doc__.split("\n")[0] == SUMMARIES[name]


def test_the_list_of_commands_imports_none_of_them():
    code = """
import sys
from convert.cli.entry import main
sys.argv = ["zdc", "--help"]
try:
    main()
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "convert.cli.main" in modules
    assert not modules & {"jax", "numpy", "zdc_jax", "matplotlib", "rich"}


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["plan", "a", "b", "--flags.qk", "16"]])
def test_bad_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("command", "usage"), [("generate", "PROMPT"), ("evaluate", "TEXT")])
def test_help_shows_what_is_required(command, usage, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out.split("options ")[0]
    assert f"MODEL {usage} [{usage} ...]" in out
    assert out.count("(required") == 2
