"""Resumption of an interrupted run, and files that it leaves alone."""

import json

import pytest

from benchmarks.common import earlier, write_result


def test_a_run_goes_on_from_results_of_its_settings_alone(tmp_path):
    assert earlier(tmp_path / "rows.json", {"far": (32, 64)}) == []
    path = write_result("rows", {"far": (32, 64), "chunk": 1024}, [{"served": "a"}], tmp_path)
    assert earlier(path, {"far": (32, 64), "chunk": 1024}) == [{"served": "a"}]
    with pytest.raises(SystemExit, match=r"holds rows of other settings \(chunk\); give another name"):
        earlier(path, {"far": (32, 64), "chunk": 2048})
    with pytest.raises(SystemExit, match=r"other settings \(far, layers\)"):
        earlier(path, {"chunk": 1024, "layers": 2})
    with pytest.raises(SystemExit, match=r"other settings \(judged\)"):
        earlier(path, {"far": (32, 64), "chunk": 1024, "judged": None})


def test_results_may_be_those_of_another_process(tmp_path):
    path = write_result("rows", {}, [1], tmp_path, measured_in={"device": "NVIDIA H200", "commit": "abc"})
    assert json.loads(path.read_text())["commit"] == "abc"
    assert earlier(path, {}, device="NVIDIA H200") == [1]


def test_results_of_another_device_are_left_alone(tmp_path):
    path = write_result("rows", {}, [], tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "NVIDIA H200"}))
    with pytest.raises(SystemExit, match="holds rows of NVIDIA H200, this is cpu"):
        earlier(path, {})
