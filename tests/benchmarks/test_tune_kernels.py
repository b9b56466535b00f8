"""Table of measured configs: choices from it, and the results of a run that measures one kernel."""

import json
from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import timing
from benchmarks.kernels import tune_kernels as tune
from kernels_pallas import CodedConfig, CodedPass, Plane, tuning
from kernels_pallas.quantized import inputs
from kernels_pallas.quantized.inputs import config_for, default_config


def plane(C: int, bits: int) -> Plane:
    def shape(*last):
        return jax.ShapeDtypeStruct((16, 8, 32768, *last), jnp.uint8)

    return Plane(shape(C * bits // 8), shape(), bits)


@pytest.fixture
def table(monkeypatch):
    """Replace the table by an empty one for this device, which counts as a GPU."""
    found = {}
    monkeypatch.setattr(tuning.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tuning, "_table", lambda device: found)
    return found


def test_stages_are_those_that_were_measured_and_parts_the_rules(table):
    keys, values = [plane(32, 4), plane(96, 4)], plane(128, 4)
    rule = default_config(16 * 8, 32768)
    q = jax.ShapeDtypeStruct((16, 32, 128), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    whole = CodedPass(q, keys, values, row, row)
    assert config_for(whole) == rule, "a table without coded keys and values"
    widths = {"C": 128, "Z": 128, "bytes": 128, "chosen": 0}
    table["coded_decode"] = [{"widths": widths, "config": {"stages": 4, "splits": 99}}]
    assert config_for(whole) == replace(rule, stages=4)
    assert config_for(replace(whole, keys=[plane(128, 4)])) == replace(rule, stages=4)
    assert config_for(replace(whole, keys=[plane(128, 8)])) == rule
    slots = jax.ShapeDtypeStruct((16, 8, 1024), jnp.int32)
    assert config_for(replace(whole, slots=slots)) == default_config(16 * 8, 32768, 1024)
    assert inputs.measured("decode", R=64) is None


def test_the_fastest_is_one_that_may_be_taken(monkeypatch):
    # The first config is timed on a cool and therefore faster card.
    times = {CodedConfig(2, 4): 2.1, CodedConfig(3, 4): 2.0, CodedConfig(4, 4): None, CodedConfig(2, 8): 1.0}
    looks = count()

    def run(x, *, config):
        if times[config] is None:
            raise ValueError("too much shared memory")
        return x * times[config]

    def measure(program, iterations):
        return lambda *args: (None, [float(program(*args)) * (1.2 if next(looks) else 1)] * iterations)

    monkeypatch.setattr(timing.profiler, "measure", measure)
    *candidates, beside = times
    entry = tune.fastest({"C": 128}, candidates, run, (jnp.float32(1),), [beside])
    assert entry["config"] == {"stages": 3, "splits": 4, "least": 1}
    assert [seen["times"][0] for seen in entry["ms"]] == pytest.approx([2.1, 2.4, 1.2])


def test_only_what_is_asked_for_is_measured_anew(tmp_path, monkeypatch):
    number = count()
    kernels = dict.fromkeys(("prefill", "decode", "coded_decode"), lambda: iter([{"run": next(number)}]))
    monkeypatch.setattr(tune, "KERNELS", kernels)
    tune.main(tune.Options(tmp_path))
    (path,) = tmp_path.iterdir()
    before = json.loads(path.read_text())
    assert [before[kernel][0]["run"] for kernel in kernels] == [0, 1, 2]
    tune.main(tune.Options(tmp_path, only=("coded_decode",)))
    assert json.loads(path.read_text()) == before | {"coded_decode": [{"run": 3}]}
