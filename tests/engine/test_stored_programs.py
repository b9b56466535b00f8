"""Compiled programs of an engine on disk: a second engine traces nothing, and no other program is taken."""

import logging
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax.engine import runner, stored_programs
from zdc_jax.engine.compiling import compile_all
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.runner import Runner
from zdc_jax.engine.uncompiled import Program

traces: list[str] = []


def scale(x, factor=1):
    traces.append("scale")
    return {"result": factor * x}


def mix(x):
    return jnp.sort(x * 2 + jnp.flip(x)).sum()


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """Store programs below a folder of this test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    traces.clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def make(x=None, *, factor=2, **options) -> Program:
    return Program(partial(scale, factor=factor), (jnp.arange(4.0) if x is None else x,), options)


def test_a_later_engine_finds_all_programs(monkeypatch):
    network = TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).dense
    given = {"rows": 2, "longest": 64, "page": 32, "cache_tokens": 128, "reuse": True}

    def list_programs() -> dict[str, Program]:
        found: dict[str, Program] = {}
        monkeypatch.setattr(runner, "compile_all", lambda programs: found.update(programs) or {})
        Runner(network, Layout.of(network.layer_caches, **given), chunk=32, steps=2)
        return found

    first, later = list_programs(), list_programs()
    files = {name: stored_programs.find_file(program) for name, program in first.items()}
    assert None not in files.values()
    assert len(set(files.values())) == len(files)
    assert files == {name: stored_programs.find_file(program) for name, program in later.items()}
    compile_all({"decode": first["decode"]})
    monkeypatch.setattr(Program, "trace", None)  # A program that is not stored would fail.
    assert compile_all({"decode": later["decode"]})["decode"].memory_analysis()


def test_a_stored_program_computes_the_same(caplog):
    for _ in range(2):
        with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
            compiled = compile_all({"scale": make()})["scale"]
        np.testing.assert_array_equal(compiled(jnp.arange(4.0))["result"], [0, 2, 4, 6])
    assert len(traces) == 1
    assert caplog.messages[-1].startswith("loaded 1 of 1 programs")


def test_a_program_that_jax_has_kept_is_stored_whole(folder):
    # After a change of the sources, JAX's cache finds what ours does not. On a CPU it lacks functions.
    program = Program(mix, (jnp.arange(4.0),), {})
    for later in range(3):
        before = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compiled = compile_all({"sums": program})["sums"]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
        assert compiled(jnp.arange(4.0)) == 18
        jax.clear_caches()
        if not later:
            shutil.rmtree(folder / stored_programs.FOLDER)


@pytest.mark.parametrize(
    "other",
    [
        lambda: make(factor=3),
        lambda: make(jnp.arange(5.0)),
        lambda: make(jnp.arange(4)),
        lambda: make([jnp.arange(4.0)]),
        lambda: make(donate_argnums=0),
        lambda: make(compiler_options={"xla_cpu_enable_fast_min_max": True}),
        lambda: Program(abs, make().arguments, {}),
    ],
    ids=["static argument", "shape", "dtype", "tree", "donated", "options", "function"],
)
def test_other_programs_have_other_files(other):
    assert stored_programs.find_file(make()) == stored_programs.find_file(make())
    assert stored_programs.find_file(other()) not in (None, stored_programs.find_file(make()))


def test_settings_flags_and_cpus_have_other_files(monkeypatch):
    file = stored_programs.find_file(make())
    with jax.default_matmul_precision("tensorfloat32"):
        rough = stored_programs.find_file(make())
    monkeypatch.setattr(stored_programs, "_read_cpu_features", lambda: "flags: none")
    elsewhere = stored_programs.find_file(make())
    monkeypatch.setenv("XLA_FLAGS", "--xla_none")
    assert len({file, rough, elsewhere, stored_programs.find_file(make())}) == 4


def test_a_damaged_program_is_compiled_and_stored_again():
    compile_all({"scale": make()})
    file = stored_programs.find_file(make())
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    compile_all({"scale": make()})
    assert len(traces) == 2
    assert file.stat().st_size == size


def test_programs_that_cannot_be_named_or_have_several_devices_are_not_stored():
    assert stored_programs.find_file(Program(lambda x: x, make().arguments, {})) is None
    divided = SimpleNamespace(sharding=SimpleNamespace(device_set={0, 1}))
    assert stored_programs.find_file(make(divided)) is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert stored_programs.find_file(make()) is None
    np.testing.assert_array_equal(compile_all({"scale": make()})["scale"](jnp.ones(4))["result"], 2)
