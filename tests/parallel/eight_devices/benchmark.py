"""The benchmark runs end to end on a tiny shape, and what it counts and checks is right."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.mesh import attention_parts
from benchmarks.mesh.bench_sequence_parallel import main
from benchmarks.mesh.models import Model, OnMesh
from benchmarks.mesh.rivals.partition import ChunkCost, searched
from benchmarks.mesh.rivals.runahead import RunaheadTransformer
from benchmarks.model.models import SHAPES
from zdc_jax.methods.coded import Settings
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan

OPTIONS = (
    "--shape tiny --lengths 61 --window 9 --sinks 0 --far 16 16 --repeats 1 --check 40 --link-bytes 4096"
)


def test_tasks(tmp_path):
    arguments = [*OPTIONS.split(), "--results", str(tmp_path)]
    float8 = ("plan_float8", "plan_float8:check")
    assert main([*arguments, "--tasks", "plan", "plan:parts", "plan:check", *float8]) == 0
    traces = tmp_path / "traces"
    others = ("--tasks", "one_device", "runahead", "--traces", str(traces))
    assert main([*arguments, *others]) == 0  # into the same file
    assert list(traces.rglob("*.xplane.pb"))
    written = json.loads((tmp_path / "sequence-parallel-tiny-4.json").read_text())
    results = written["results"]
    assert written["config"]["mesh"] == "sequence=4"
    assert results.keys() == {"link_rate", "plan 61", "plan_float8 61", "one_device 61", "runahead 61"}
    assert all(out["first_token"][0] > 0 for name, out in results.items() if name != "link_rate")
    plan, rounded = results["plan 61"], results["plan_float8 61"]
    assert rounded["bytes"]["compiled"] == rounded["bytes"]["formula"] < plan["bytes"]["formula"]
    assert rounded["check"]["error"] < 2.0**-4
    assert plan["bytes"]["compiled"] == plan["bytes"]["formula"]
    assert plan["check"]["error"] <= 2 * plan["check"]["own_error"]
    assert all(plan[part][0] > 0 for part in ("attention", "near", "exchange", "near_and_exchange", "far"))
    expected = results["one_device 61"]["first_token"][0] / plan["first_token"][0]
    assert plan["compared"]["speedup_over_one_device"] == expected
    assert results["runahead 61"]["bytes"]["partition"] == [16, 15, 15, 15]
    with pytest.raises(SystemExit, match=r"holds rows of other settings \(layers\)"):
        main([*arguments, "--tasks", "plan", "--layers", "1"])


def test_zigzag_shards_and_dense_plans_in_fewer_bits(tmp_path):
    """Check 40 tokens, which eight chunks divide; zigzag shards pad 61 tokens to 64."""
    arguments = [*OPTIONS.split(), "--results", str(tmp_path), "--tasks"]
    tasks = ("ring_zigzag", "ring_zigzag:check", "ring_zigzag:numerics", "dense_float8")
    assert main([*arguments, *tasks, "dense_coded:parts", "all_gather_zigzag:parts"]) == 0
    results = json.loads((tmp_path / "sequence-parallel-tiny-4.json").read_text())["results"]
    ring, rounded = results["ring_zigzag 61"], results["dense_float8 61"]
    for out in (ring, rounded):
        assert out["first_token"][0] > 0
        assert out["bytes"]["compiled"] == out["bytes"]["formula"]
    assert "cache" not in ring["bytes"]
    assert rounded["bytes"]["cache"] == 0  # No near set, so no coordinates beyond those that came.
    assert ring["check"]["error"] <= 2 * ring["check"]["own_error"]
    assert 0 < ring["numerics"]["head"] < 0.005
    assert results["all_gather_zigzag 61"]["attention"][0] > 0
    parts = ("attention", "near", "exchange", "near_and_exchange", "far")
    assert all(results["dense_coded 61"][part][0] > 0 for part in parts)


def test_ulysses_builds_the_cache_and_others_none(tmp_path, monkeypatch):
    """Compile one layer, then run both layers once, for 61 tokens padded to 64."""
    calls = []
    for name in ("prefill", "hidden"):
        whole = getattr(Transformer, name)

        def record(*args, name=name, whole=whole, **options):
            return calls.append((name, options.get("capacity"))) or whole(*args, **options)

        monkeypatch.setattr(Transformer, name, record)
    tasks = ("dense", "all_gather")
    assert main([*OPTIONS.split(), "--results", str(tmp_path), "--tasks", *tasks]) == 0
    assert calls == [("prefill", 64)] * 2 + [("hidden", None)] * 2


def test_a_model_on_a_mesh_reads_and_decodes_as_on_one_device():
    """Compare the chosen tokens under a plan with quantized values."""
    config, mesh = SHAPES["tiny"], MeshConfig(sequence=4).create()
    near = CompressionPlan.uniform(config, qk=32, v=32, window=9, sinks=3)
    plan = replace(near, method="coded", settings=Settings(bits_k=4, bits_v=4, index=8, read=0))
    model, tokens = Model(config, mesh), jnp.arange(3, 64)[None]
    side, alone = OnMesh(model.on_mesh(plan, decodes=True), "xla"), model.on_first(plan, config.dtype)
    empty = side.cache(1, 64)
    chosen, held = side.prefill(empty, tokens)
    assert all(x.is_deleted() for x in jax.tree.leaves(empty))
    after, _ = side.decode(held, chosen, 1)
    given = jnp.asarray(np.concatenate([tokens, chosen], 1))
    assert [int(chosen[0, 0]), int(after[0, 0])] == alone(given)[0, -2:].argmax(-1).tolist()
    drawn = side.filled(side.cache(1, 64), 50)
    assert drawn.lengths.tolist() == [50]
    assert all(np.asarray(x).any() for x in jax.tree.leaves(drawn.layers) if x.dtype == jnp.uint8)


@pytest.fixture
def compilations_logged():
    """Log compilations of all threads; `jax.log_compiles` logs those of one."""
    jax.config.update("jax_log_compiles", True)
    yield
    jax.config.update("jax_log_compiles", False)


def test_what_was_compiled_ahead_is_not_compiled_again(compilations_logged, caplog):
    """Run two steps, since the first could change how the cache is divided."""
    config, mesh = SHAPES["tiny"], MeshConfig(sequence=2).create()
    near = CompressionPlan.uniform(config, qk=32, v=32, window=9, sinks=3)
    plan = replace(near, method="coded", settings=Settings(bits_k=4, bits_v=4, bits_near=8, index=0, read=0))
    side = OnMesh(Model(config, mesh).on_mesh(plan, decodes=True), "xla")

    def programs():
        return [
            name
            for record in caplog.records
            for name in ("prompt_layer", "decode_steps")
            if record.getMessage().startswith(f"Compiling jit({name})")
        ]

    side.compile([64], {64: [1, 2]})
    assert sorted(programs()) == ["decode_steps", "decode_steps", "prompt_layer"]
    caplog.clear()
    side.prefill(side.cache(1, 192), jnp.zeros((1, 64), jnp.int32))
    cache, token = side.filled(side.cache(2, 192), 64), jnp.zeros((2, 1), jnp.int32)
    for _ in range(2):
        token, cache = side.decode(cache, token, 5)
    assert programs() == []


def test_a_figure_that_fails_leaves_the_others(tmp_path):
    arguments = [*OPTIONS.split(), "--results", str(tmp_path), "--tasks", "dense", "--mesh", "sequence=3"]
    assert main(arguments) == 1
    out = json.loads((tmp_path / "sequence-parallel-tiny-3.json").read_text())["results"]["dense 61"]
    assert out["first_token"]["error"].startswith("MeshError: num_heads=8: cannot be divided")


def test_weights_are_on_each_device_once():
    mesh = MeshConfig(sequence=4).create()
    model, plan = Model(SHAPES["tiny"], mesh), CompressionPlan.full(SHAPES["tiny"])

    def held(tree):
        return {
            shard.data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(tree)
            for shard in x.addressable_shards
        }

    runahead = RunaheadTransformer(model.on_each(plan), list(mesh.devices.flat))
    made = held((model.embeddings, model.layers))
    assert held((model.on_mesh(plan), model.on_first(plan, "bfloat16"), runahead.networks)) <= made


def test_search_finds_what_times_were_made_of(monkeypatch):
    """Measure two of 32 layers; the partition is that of all of them."""
    mesh = MeshConfig(sequence=4).create()
    model, cost = Model(SHAPES["tiny"], mesh), ChunkCost(call=0.0, token=3e-5, past=4e-9, own=2e-9)

    def times(model, tokens, partitions, **_):
        return {p: sum(cost.seconds(p)) / 16 for p in partitions}

    monkeypatch.setattr(attention_parts, "measure_partitions", times)
    monkeypatch.setattr(attention_parts, "link_bandwidth", lambda *devices: 1e15)
    plan = CompressionPlan.full(SHAPES["tiny"])
    runahead = RunaheadTransformer(model.on_each(plan), list(mesh.devices.flat))
    found = attention_parts.searched_partition(runahead, jnp.zeros((1, 4096), jnp.int32), 32, "xla")
    expected = searched(4096, 4, cost, layers=32, link=lambda end: 0.0)
    assert found.ends == pytest.approx(expected.ends, abs=2)
