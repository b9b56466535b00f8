"""Benchmark of one plan: how many sequences fit, whose quality it reports, and interrupted runs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from benchmarks.common import RESULTS
from benchmarks.model import bench_one_plan as bench
from benchmarks.model.models import LLAMA_2_7B
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks

CONFIG = replace(LLAMA_2_7B, layers=LLAMA_2_7B.layers[:2], num_heads=4, num_kv_heads=4)


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch):
    """Skip garbage collection, which takes a second after many other tests."""
    monkeypatch.setattr(bench, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def memory(monkeypatch):
    """Stub a device with a gigabyte of memory, of which a tenth is in use."""
    stats = {"bytes_limit": 10**9, "bytes_in_use": 10**8}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    return stats


@pytest.mark.usefixtures("memory")
def test_rows_fit_by_their_bytes():
    a_row = 2 * 2 * 4 * 128 * 2 * 1000  # Keys and values, layers, heads, coordinates, bytes, tokens.
    fit = bench.rows_that_fit(CompressionPlan.full(CONFIG).layer_caches("bfloat16"), 1000)
    assert fit == int(0.97 * 9 * 10**8 // a_row)


@pytest.mark.usefixtures("memory")
def test_coded_rows_fit_by_the_bytes_of_their_codes():
    settings = Settings(bits_k=2, bits_v=4, index=0, read=0)
    plan = CompressionPlan.of_layers(CONFIG, [LayerRanks(128, 128)] * 2, method="coded", settings=settings)
    a_token = (
        2 * 4 * (128 * 2 // 8 + 128 * 4 // 8 + 2)
    )  # Layers, heads, quantized keys and values, a scale of each.
    assert bench.rows_that_fit(plan.layer_caches("bfloat16"), 1024) == int(
        0.97 * 9 * 10**8 // (1024 * a_token + 4)
    )


@pytest.mark.parametrize(("most", "holds"), [(100, 100), (100, 61), (7, 1), (1, 1)])
def test_the_largest_batch_is_one_that_memory_holds(most, holds):
    tried = []

    def time(batch):
        tried.append(batch)
        if batch > holds:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return [float(batch)]

    batch, times = bench.fitting(time, most)
    assert times == [batch]
    assert 0.95 * holds - 1 <= batch <= holds
    assert tried == sorted(tried, reverse=True)


def test_other_errors_are_not_taken_for_lack_of_memory():
    def broken(batch):
        raise RuntimeError("INTERNAL: a kernel failed")

    def full(batch):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        bench.fitting(broken, 8)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        bench.fitting(full, 8)


@pytest.fixture
def plan(tmp_path):
    """Return the path of a plan that was judged, and its row of results."""
    path = RESULTS / "coded-smollm2-135m.json"
    rows = json.loads(path.read_text())["rows"]
    row = next(row for row in rows if row["method"] == "coded, 8192, 0.3 %" and row["protocol"] == "cached")
    found = CompressionPlan.from_json(row["plan"], path)
    found.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", row


def test_quality_is_that_of_the_plan(plan, tmp_path):
    path, row = plan
    found = bench.quality(bench.Options(path))
    assert (found["increase"], found["bytes_share"]) == (row["increase"], row["bytes_share"])
    other = CompressionPlan.load(path)
    replace(other, window=other.window + 16).save(tmp_path / "other.json")
    with pytest.raises(SystemExit, match="was not judged"):
        bench.quality(bench.Options(tmp_path / "other.json"))


@pytest.fixture
def timed(monkeypatch):
    """Replace all that needs a GPU by fakes with known times, and return the list of timed batches."""
    asked = []

    def decode_times(side, batch, length, steps, repeats):
        asked.append((length, batch))
        return [batch * length * 1e-6] * repeats

    network = SimpleNamespace(plan=CompressionPlan.full(CONFIG))
    fakes = {
        "build": lambda config, plan, rotated: network,
        "transferred": lambda plan, config, growth: network.plan,
        "check_on_kernels": lambda *args: None,
        "rows_that_fit": lambda caches, tokens: {1128: 20, 4128: 5}[tokens],
        "decode_times": decode_times,
        "prefill_times": lambda side, length, repeats: [length * 1e-5] * repeats,
        "OnCudnn": lambda network: "peer",
        "OnKernels": lambda network, chunk: "kernels",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(bench, name, fake)
    return asked


def test_batches_that_memory_has_not_are_left_out(plan, timed):
    options = bench.Options(plan[0], lengths=(1000, 4000))
    last = {row["length"]: row for row in bench.measured("searched", CONFIG, options, [])}
    assert [*last] == [1000, 4000]
    assert timed == [(1000, 1), (1000, 8), (1000, 20), (4000, 1), (4000, 5)]
    assert {length: row["largest"] for length, row in last.items()} == {1000: 20, 4000: 5}
    assert last[4000]["token"]["5"] == [0.02] * options.repeats


def test_of_rows_that_memory_does_not_hold_nothing_is_timed(plan, timed, monkeypatch):
    monkeypatch.setattr(bench, "rows_that_fit", lambda caches, tokens: 0)
    *_, row = bench.measured("dense", CONFIG, bench.Options(plan[0], lengths=(4000,)), [])
    none = {"length": 4000, "token": {}, "largest": 0, "bytes_a_row": 16384004}
    assert row == none | {"commits": {"0": bench.commit()}}
    assert not timed
    assert not list(
        bench.measured("dense", CONFIG, bench.Options(plan[0], lengths=(4000,), figures=("first_token",)), [])
    ), "what was measured with more memory stays"


def test_a_cut_run_leaves_what_it_measured(plan, timed, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"Llama-2-7B": CONFIG, "Llama-3-8B": CONFIG})
    options = bench.Options(plan[0], lengths=(4000, 1000), kinds=("cudnn",), results=tmp_path)
    bench.main(options)

    def cut(side, length, repeats):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "prefill_times", cut)
    with pytest.raises(KeyboardInterrupt):
        bench.main(replace(options, shapes=("Llama-3-8B",), lengths=(1000,), repeats=2))
    entries = json.loads((tmp_path / "one-plan-h100.json").read_text())["results"]
    assert [entry["shape"] for entry in entries] == ["Llama-2-7B", "Llama-3-8B"]
    first, second = ({row["length"]: row for row in entry["rows"]} for entry in entries)
    assert all(row["largest"] for row in first.values())
    assert second[4000] == first[4000]
    assert second[1000]["token"] == {"1": [0.001] * 2, "8": [0.008] * 2}
    assert "first_token" not in second[1000]


@pytest.mark.parametrize(
    ("kind", "rotated", "share", "side"),
    [("cudnn", False, 1, "peer"), ("dense", False, 1, "kernels"), ("searched", True, 0.5, "kernels")],
)
def test_each_kind_has_its_own_plan_and_path(plan, timed, monkeypatch, kind, rotated, share, side):
    half = CompressionPlan.uniform(CONFIG, qk=64, v=64)
    built, sides = [], []

    def build(config, plan, rotated):
        built.append(rotated)
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(bench, "build", build)
    monkeypatch.setattr(bench, "transferred", lambda plan, config, growth: half)
    monkeypatch.setattr(bench, "decode_times", lambda side, *args, **named: sides.append(("token", side)))
    monkeypatch.setattr(bench, "prefill_times", lambda side, *args: sides.append(("first", side)))
    *_, row = bench.measured(kind, CONFIG, bench.Options(plan[0], lengths=(1000,)), [])
    assert built == [rotated]
    assert set(sides) == {("token", side), ("first", side)}
    dense = 2 * 2 * 4 * 128 * 2 * 1000  # Keys and values, layers, heads, coordinates, bytes, tokens.
    assert row["bytes_a_row"] == share * dense + 4, "the length of a sequence needs 4 bytes"


@pytest.mark.usefixtures("timed")
def test_a_run_replaces_its_own_rows_alone(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"Llama-2-7B": CONFIG})
    options = bench.Options(plan[0], shapes=("Llama-2-7B",), lengths=(1000, 4000), results=tmp_path)
    options = replace(options, kinds=("cudnn", "searched"))
    bench.main(options)
    bench.main(replace(options, kinds=("searched",), lengths=(1000,), repeats=2))
    entries = json.loads((tmp_path / "one-plan-h100.json").read_text())["results"]
    repeats = {
        entry["kind"]: sorted((row["length"], len(row["first_token"])) for row in entry["rows"])
        for entry in entries
    }
    assert len(entries) == 2
    assert repeats == {"cudnn": [(1000, 5), (4000, 5)], "searched": [(1000, 2), (4000, 5)]}


@pytest.mark.usefixtures("timed")
def test_figures_that_are_not_asked_for_stay_with_their_commits(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"Llama-2-7B": CONFIG})
    monkeypatch.setattr(bench, "commit", lambda: "a")
    options = bench.Options(
        plan[0], kinds=("dense",), shapes=("Llama-2-7B",), lengths=(1000,), results=tmp_path
    )

    def read():
        return json.loads((tmp_path / "one-plan-h100.json").read_text())["results"][0]["rows"][0]

    bench.main(options)
    whole = read()
    bench.main(replace(options, figures=("first_token",), repeats=2))
    assert read() == whole | {"first_token": whole["first_token"][:2]}
    bench.main(replace(options, figures=("largest",), repeats=3))
    assert read()["token"] == whole["token"] | {"20": whole["token"]["20"][:3]}
    assert read()["commits"] == dict.fromkeys(("1", "8", "first_token", "20"), "a")
    monkeypatch.setattr(bench, "commit", lambda: "b")
    bench.main(replace(options, figures=("first_token",)))
    assert read()["commits"] == dict.fromkeys(("1", "8", "20"), "a") | {"first_token": "b"}
    assert read()["token"] == whole["token"] | {"20": whole["token"]["20"][:3]}


def test_nothing_is_timed_where_kernels_do_not_decode_the_plan(plan, timed, tmp_path, monkeypatch):
    def refuses(plan, config, rows, capacity):
        raise PlanError(f"not {rows} rows of {capacity}")

    monkeypatch.setattr(bench, "SHAPES", {"Llama-2-7B": CONFIG})
    monkeypatch.setattr(bench, "check_on_kernels", refuses)
    options = bench.Options(plan[0], shapes=("Llama-2-7B",), lengths=(1000, 4000), results=tmp_path)
    with pytest.raises(PlanError, match="not 8 rows of 4128"):
        bench.main(options)
    assert not timed


def test_rows_of_another_plan_are_not_mixed(plan, timed, tmp_path):
    options = bench.Options(plan[0], lengths=(1000,), shapes=("Llama-2-7B",), results=tmp_path)
    bench.main(options)
    asked = len(timed)
    with pytest.raises(SystemExit, match="holds rows of other settings"):
        bench.main(replace(options, steps=options.steps + 1))
    assert len(timed) == asked
