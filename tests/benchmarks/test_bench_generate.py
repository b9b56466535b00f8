"""Options of the benchmark of `generate` that do not fit each other."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.model import bench_generate
from benchmarks.model.bench_generate import Options, list_settings, main


def test_prompts_beyond_the_model_fail_before_any_side_runs(monkeypatch, tmp_path):
    config = SimpleNamespace(max_positions=4096)
    monkeypatch.setattr(bench_generate.Checkpoint, "open", lambda _: SimpleNamespace(config=config))
    monkeypatch.setattr(bench_generate, "run_side", lambda *_: pytest.fail("a side ran"))
    options = Options(model=Path("model"), sides=("ours-16",), lengths=(1024, 4096), results=tmp_path)
    with pytest.raises(SystemExit, match=r"the model has 4,096 .* at most 4,031 tokens"):
        main(options)


def test_results_of_a_real_model_name_no_shape():
    assert list_settings(Options())["shape"] == "llama-3-8b"
    settings = list_settings(Options(model=Path("model")))
    assert settings["model"] == "model"
    assert "shape" not in settings


def test_a_plan_is_needed_for_its_side():
    with pytest.raises(SystemExit, match="add --plan"):
        main(Options(sides=("ours-plan",)))


def test_a_side_that_fails_is_an_error_after_all_sides_and_loses_no_row(monkeypatch, tmp_path):
    row = {"tokens": 8, "sequences": 1, "fits": 0}

    class Worker:
        """Process that sends its environment and one row; that of `ours-16` then fails."""

        def __init__(self, command, **_):
            side = command[-1]
            self.returncode = int(side == "ours-16")
            sent = ["environment", {"device": "none"}], ["row", {"side": side} | row]
            self.stdout = [f"{bench_generate.MARK} {json.dumps(value)}\n" for value in sent]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(bench_generate, "subprocess", SimpleNamespace(Popen=Worker, PIPE=None))
    monkeypatch.setattr(bench_generate, "__spec__", SimpleNamespace(name="benchmarks.model.bench_generate"))
    options = Options(sides=("ours-16", "vllm-16"), name="trial", results=tmp_path)
    for _ in range(2):  # The second run replaces the rows of the first.
        with pytest.raises(SystemExit, match="ours-16 ended with exit status 1"):
            main(options)
    results = json.loads((tmp_path / "trial.json").read_text())
    assert [each["side"] for each in results["results"]] == ["ours-16", "vllm-16"]
    assert set(results["environments"]) == {"ours-16", "vllm-16"}
