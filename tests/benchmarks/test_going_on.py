"""Benchmarks add to the files of their earlier runs, and refuse those of other settings before any work."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import bench_block_lists, bench_coded_models, bench_generate, bench_plans, studies


@pytest.fixture(autouse=True)
def commits(monkeypatch):
    """One more at each look: a, b, c."""
    for bench in (bench_block_lists, bench_coded_models, bench_generate, bench_plans, studies):
        monkeypatch.setattr(bench, "commit", iter("abcdefgh").__next__)


def results(path: Path):
    (file,) = path.glob("*.json")
    return json.loads(file.read_text())["results"]


def no_work(*args, **named):
    pytest.fail("work began before the refusal")


def test_builds_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_generate, "measure", lambda name, options: {"steps": options.steps})
    options = bench_generate.Options(rows=("cudnn", "window"), results=tmp_path)
    bench_generate.main(options)
    bench_generate.main(replace(options, rows=("window",)))
    assert {name: row["commit"] for name, row in results(tmp_path).items()} == {"cudnn": "a", "window": "c"}
    monkeypatch.setattr(bench_generate, "measure", no_work)
    with pytest.raises(SystemExit, match=r"other settings \(steps\)"):
        bench_generate.main(replace(options, steps=2))


def test_parts_of_a_study(tmp_path, monkeypatch):
    network = SimpleNamespace(dtype="bfloat16")
    bench = SimpleNamespace(
        moments=None, topics=["peps"], train=np.zeros(3), dense_nll=np.zeros(2),
        dense=SimpleNamespace(network=network), make_basis=lambda *args, **kinds: None,
    )  # fmt: skip
    monkeypatch.setattr(studies, "Bench", lambda options, folder: bench)
    parts = {"g": lambda bench: {"rows": []}, "p": lambda bench: {"rows": []}}
    options = studies.Options(Path("model"), Path("corpus"), "study", results=tmp_path)
    studies.run_parts(options, parts, None)
    studies.run_parts(replace(options, parts=("p",)), parts, None)
    assert {name: part["commit"] for name, part in results(tmp_path).items()} == {"g": "a", "p": "b"}
    monkeypatch.setattr(studies, "Bench", no_work)
    with pytest.raises(SystemExit, match=r"other settings \(model, windows\)"):
        studies.run_parts(replace(options, model=Path("other"), windows=2, parts=("p",)), parts, None)


def test_kinds_of_plans(tmp_path, monkeypatch):
    def row(kind):
        return [{"kind": kind, "commit": bench_plans.commit()}]

    kinds = {"uniform": lambda: row("uniform"), "window": lambda: row("window")}
    bench = SimpleNamespace(
        heldout={"balanced": SimpleNamespace(dense_nll=np.zeros(2))}, kinds=lambda: kinds
    )  # fmt: skip
    monkeypatch.setattr(bench_plans, "Bench", lambda options, folder: bench)
    options = bench_plans.Options(Path("model"), Path("corpus"), "plans", results=tmp_path)
    bench_plans.main(options)
    bench_plans.main(replace(options, kinds=("uniform",)))
    held = [(row["kind"], row["commit"]) for row in results(tmp_path)["rows"]]
    assert held == [("window", "b"), ("uniform", "c")]
    monkeypatch.setattr(bench_plans, "Bench", no_work)
    with pytest.raises(SystemExit, match=r"other settings \(search_windows\)"):
        bench_plans.main(replace(options, search_windows=3, kinds=("uniform",)))


def test_prompts_of_block_lists(tmp_path, monkeypatch):
    def timed(options, S, K):
        return iter([{"S": S, "kv_heads": K, "commit": bench_block_lists.commit()}])

    monkeypatch.setattr(bench_block_lists, "measured", timed)
    options = bench_block_lists.Options(tokens=(512, 1024), kv_heads=(8,), results=tmp_path)
    bench_block_lists.main(options)
    bench_block_lists.main(replace(options, tokens=(512,)))
    assert [(row["S"], row["commit"]) for row in results(tmp_path)] == [(1024, "b"), (512, "c")]
    for name in ("measured", "as_judged"):
        monkeypatch.setattr(bench_block_lists, name, no_work)
    with pytest.raises(SystemExit, match=r"other settings \(densities, judged\)"):
        bench_block_lists.main(replace(options, densities=(0.5,), judged=Path("judged.json")))


def test_coded_models(tmp_path, monkeypatch):
    """A trial with fewer layers is not taken for whole models."""
    bench = bench_coded_models

    def timed(shape, options):
        for kind in ("cudnn", *options.chosen_kinds):
            yield {"shape": shape, "rows": 8, "context": 16384, "kind": kind, "commit": bench.commit()}

    monkeypatch.setattr(bench, "check_on_kernels", lambda *args: None)
    monkeypatch.setattr(bench, "rows", timed)
    options = bench.Options(shapes=("Llama-2-7B",), kinds=("whole", "chosen"), results=tmp_path)
    bench.main(options)
    bench.main(replace(options, kinds=("chosen",)))
    held = [(row["kind"], row["commit"]) for row in results(tmp_path)]
    assert held == [("whole", "b"), ("cudnn", "d"), ("chosen", "e")]
    monkeypatch.setattr(bench, "rows", no_work)
    with pytest.raises(SystemExit, match=r"other settings \(layers\)"):
        bench.main(replace(options, layers=2))
