"""Decode steps of one program by default, and the numbers of sequences that such programs have."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from conftest import LLAMA, TinyModel

from zdc_jax.engine import runner
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.runner import Runner, choose_decode_steps


@pytest.mark.parametrize(
    ("backend", "billions", "on_mesh", "steps"),
    [("cpu", 9, False, 1), ("gpu", 1.5, False, 4), ("gpu", 8, False, 2), ("gpu", 8, True, 4)],
)
def test_large_models_take_fewer_steps(monkeypatch, backend, billions, on_mesh, steps):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    weights = [jax.ShapeDtypeStruct((int(5e8 * billions), 2), jnp.bfloat16)]
    assert choose_decode_steps(weights, on_mesh=on_mesh) == steps


@pytest.mark.parametrize(
    ("rows", "counts"), [(64, [1, 8, 16, 32, 64]), (16, [1, 8, 16]), (20, [1, 8, 16, 20])]
)
def test_few_sequences_have_programs_of_their_own(monkeypatch, rows, counts):
    network = TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).dense
    given = {"rows": rows, "longest": 32, "page": 16, "cache_tokens": 32 * rows, "reuse": True}
    layout = Layout.of(network.layer_caches, **given)
    listed = []
    monkeypatch.setattr(runner, "compile_all", lambda lowerings: listed.extend(lowerings) or {})
    Runner(network, layout, chunk=32, steps=4)
    loops = [name for name in listed if name.startswith("decode loop") and name.endswith("greedy")]
    assert loops == [f"decode loop of {count} sequences, greedy" for count in counts]
