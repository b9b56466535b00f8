"""The benchmark of the engine's decode program."""

import json

import pytest
from conftest import LLAMA, TinyModel

from benchmarks.serving.bench_decode_loop import Options, main, parse_case


@pytest.mark.full
def test_cases_are_timed_with_the_tokens_of_each_step(tmp_path):
    TinyModel(LLAMA).write(tmp_path / "model")
    main(Options(tmp_path / "model", case=("3/1/384",), held=100, repeats=2, results=tmp_path))
    (row,) = json.loads((tmp_path / "decode-loop.json").read_text())["results"]
    assert (row["plan"], row["rows"], row["count"], row["longest"]) == ("none", 3, 1, 384)
    assert len(row["token"]) == 2
    assert min(row["token"]) > 0


@pytest.mark.parametrize("text", ["64/1", "a/1/384", "1/2/384", "3/0/384"])
def test_wrong_cases_name_the_flag(text):
    with pytest.raises(SystemExit, match=f"--case {text}: .*must be"):
        parse_case(text)
