"""The clock of compilation, which starts and listens to JAX on first use."""

from importlib.util import find_spec, module_from_spec

import jax


def test_listens_once_and_not_at_import(monkeypatch):
    listeners, register = [], jax.monitoring.register_event_duration_secs_listener
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    spec = find_spec("zdc_jax.generation.compile_time")
    clock = module_from_spec(spec)  # A new process has such a fresh copy.
    spec.loader.exec_module(clock)
    assert listeners == []
    assert [clock.compile_seconds() for _ in range(2)] == [0, 0]
    assert len(listeners) == 1
    register(listeners[0])
    jax.jit(lambda x: 3 * x + 1)(2.0)
    assert clock.compile_seconds() > 0
