"""Compiled programs of an engine on disk: a second engine traces nothing, and no other program is taken."""

import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from listening import Listener

from zdc_jax.engine import stored_programs
from zdc_jax.engine.compiling import compile_all
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.program import Program
from zdc_jax.engine.request import EngineRequest
from zdc_jax.loading import LanguageModel

CONFIG = EngineConfig(max_sequences=2, max_model_len=64, chunk=32)
traces: list[str] = []


def scale(x, factor=1):
    traces.append("scale")
    return {"result": factor * x}


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


def test_an_engine_of_a_later_process_loads_all_programs(caplog, monkeypatch):
    network = TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).dense

    def answer() -> tuple[int, ...]:
        with Engine(LanguageModel(network), CONFIG) as engine:
            listener = Listener()
            engine.submit(EngineRequest((3, 1, 4, 1, 5), 6), listener)
            return listener.tokens()

    first = answer()
    monkeypatch.setattr(Program, "lower", None)  # A program that is not stored would fail.
    with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
        assert answer() == first
    loaded = [message for message in caplog.messages if message.startswith("loaded")]
    count = len(list(stored_programs.find_file(make()).parent.iterdir()))
    assert len(loaded) == 1
    assert loaded[0].startswith(f"loaded {count} of {count} programs")


def test_a_stored_program_computes_the_same():
    for _ in range(2):
        compiled = compile_all({"scale": make()})["scale"]
        np.testing.assert_array_equal(compiled(jnp.arange(4.0))["result"], [0, 2, 4, 6])
    assert len(traces) == 1


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


def test_settings_of_jax_and_flags_of_xla_have_other_files(monkeypatch):
    file = stored_programs.find_file(make())
    with jax.default_matmul_precision("tensorfloat32"):
        rough = stored_programs.find_file(make())
    monkeypatch.setenv("XLA_FLAGS", "--xla_none")
    assert len({file, rough, stored_programs.find_file(make())}) == 3


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
