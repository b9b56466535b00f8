"""First differences between answers, and their frequency."""

import json

import pytest
from conftest import LLAMA, TinyModel

from benchmarks.serving.first_differences import Options, first_differences, main


def test_tokens_after_a_difference_do_not_count():
    places, found = first_differences([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert places == [2, None]
    assert found == {"differ": 1, "a_token": 1 / 7}


@pytest.mark.full
def test_in_32_bits_there_are_none(tmp_path):
    TinyModel(LLAMA).write(tmp_path / "tiny")
    (tmp_path / "a.txt").write_text(" ".join(f"w{i % 90}" for i in range(400)))
    sizes = {"requests": 3, "tokens": 6, "shortest": 5, "longest": 40, "rows": 2}
    main(Options(tmp_path / "tiny", tmp_path, dtype="float32", results=tmp_path, **sizes))
    found = json.loads((tmp_path / "serving-first-differences.json").read_text())["results"]
    assert found["answers"] == 3
    assert found["differ"] == found["generate_together"]["differ"] == 0
