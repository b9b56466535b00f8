"""The benchmark runs end to end on a tiny shape, and what it counts and checks is right."""

import json

from benchmarks.bench_sequence_parallel import main

OPTIONS = (
    "--shape tiny --lengths 61 --window 9 --sinks 0 --far 16 16 --repeats 1 --check 40 --link-bytes 4096"
)


def test_rows(tmp_path):
    arguments = [*OPTIONS.split(), "--results", str(tmp_path)]
    assert main([*arguments, "--rows", "plan", "plan_float8"]) == 0
    traces = tmp_path / "traces"
    assert main([*arguments, "--rows", "one_device", "--traces", str(traces)]) == 0  # into the same file
    assert list(traces.rglob("*.xplane.pb"))
    written = json.loads((tmp_path / "sequence-parallel-tiny-4.json").read_text())
    results = written["results"]
    assert written["config"]["mesh"] == "sequence=4"
    assert results.keys() == {"link_rate", "plan 61", "plan_float8 61", "one_device 61"}
    for name, out in results.items():
        if name == "link_rate":
            continue
        assert out["first_token"][0] > 0
        if out["payload"] == "native":
            assert out["check"]["error"] <= 2 * out["check"]["own_error"]
        else:
            assert out["check"]["error"] < 2.0**-4
        if out["method"] is not None:
            assert out["bytes"]["compiled"] == out["bytes"]["formula"]
            assert out["attention"][0] > 0
    parts = ["attention", "near", "exchange", "near_and_exchange", "far", "together_over_sum"]
    assert all(part in results["plan 61"] for part in parts)


def test_a_figure_that_fails_leaves_the_others(tmp_path, capsys):
    arguments = [*OPTIONS.split(), "--results", str(tmp_path), "--rows", "dense", "--mesh", "sequence=3"]
    assert main(arguments) == 1
    out = json.loads((tmp_path / "sequence-parallel-tiny-3.json").read_text())["results"]["dense 61"]
    assert out["first_token"]["error"].startswith("MeshError: num_heads=8 cannot be divided")
