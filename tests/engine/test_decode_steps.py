"""Number of decode steps that an engine puts into one program by default."""

import jax
import jax.numpy as jnp
import pytest

from zdc_jax.engine.runner import choose_decode_steps


@pytest.mark.parametrize(
    ("backend", "billions", "on_mesh", "steps"),
    [("cpu", 9, False, 1), ("gpu", 1.5, False, 4), ("gpu", 8, False, 2), ("gpu", 8, True, 4)],
)
def test_large_models_take_fewer_steps(monkeypatch, backend, billions, on_mesh, steps):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    weights = [jax.ShapeDtypeStruct((int(5e8 * billions), 2), jnp.bfloat16)]
    assert choose_decode_steps(weights, on_mesh=on_mesh) == steps
