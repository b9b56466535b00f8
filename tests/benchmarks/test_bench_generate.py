"""Options of the benchmark of `generate` that do not fit each other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.model import bench_generate
from benchmarks.model.bench_generate import Options, list_settings, main


def test_prompts_beyond_the_model_fail_before_any_side_runs(monkeypatch, tmp_path):
    config = SimpleNamespace(max_positions=4096)
    monkeypatch.setattr(bench_generate.Checkpoint, "open", lambda _: SimpleNamespace(config=config))
    monkeypatch.setattr(bench_generate, "run_side", lambda _: pytest.fail("a side ran"))
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


def test_a_side_that_fails_is_an_error_after_all_sides(monkeypatch, tmp_path):
    ran: list[str] = []

    def run_side(side):
        ran.append(side)
        return (1, {}, []) if side == "ours-16" else (0, {}, [{"side": side}])

    monkeypatch.setattr(bench_generate, "run_side", run_side)
    options = Options(sides=("ours-16", "vllm-16"), name="trial", results=tmp_path)
    with pytest.raises(SystemExit, match="ours-16 ended with exit status 1"):
        main(options)
    assert ran == ["ours-16", "vllm-16"]
    assert '"vllm-16"' in (tmp_path / "trial.json").read_text()
