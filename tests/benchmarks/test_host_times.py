"""Times of an engine's programs, taken in a server."""

from dataclasses import replace

import pytest
from conftest import LLAMA, TinyModel

from benchmarks.serving.host_times import Options, main, make_timed, summarize
from benchmarks.serving.loads import parse_loop
from benchmarks.serving.timed_server import TimedProgram


def test_calls_are_timed_and_the_program_is_as_before():
    class Compiled:
        def __call__(self, x: int) -> int:
            return 1 // x

        def memory_analysis(self) -> str:
            return "little"

    program = TimedProgram(Compiled())
    assert program(1) == 1
    with pytest.raises(ZeroDivisionError):
        program(0)
    assert len(program.seconds) == 2
    assert min(program.seconds) >= 0
    assert program.memory_analysis() == "little"


def test_rows_have_quartiles_of_programs_that_were_called_often():
    (row,) = summarize({"b": [1.0] * 4, "a": [5.0, 1.0, 2.0, 3.0, 4.0]})
    assert row == {"program": "a", "calls": 5, "seconds": {"p25": 2.0, "p50": 3.0, "p75": 4.0}}


def test_the_server_is_that_of_the_comparison_with_timers(tmp_path):
    options = Options(tmp_path / "model", 64, ("8/4@2",), slots=3)
    system = make_timed("3bit", options, [parse_loop("8/4@2")], tmp_path / "times.json")
    assert system.command[1:4] == ("-m", "benchmarks.serving.timed_server", "serve")
    assert system.command[system.command.index("--plan") + 1] == "3bit"
    assert system.environment["ZDC_HOST_TIMES"] == str(tmp_path / "times.json")


def test_longer_loops_are_refused_before_any_work(tmp_path):
    with pytest.raises(SystemExit, match="has 68 tokens, more than --max-model-len 64; raise it"):
        main(Options(tmp_path / "no model", 64, ("60/8@2",)))


@pytest.mark.full
def test_a_server_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).write(tmp_path / "tiny")
    given = {"plan": ("none",), "slots": 2, "dtype": "float32", "results": tmp_path}
    main(Options(tmp_path / "tiny", 64, ("8/8@2",), **given))
    printed = capsys.readouterr().out
    assert "none, decode: " in printed
    assert (tmp_path / "host-times.json").exists()
