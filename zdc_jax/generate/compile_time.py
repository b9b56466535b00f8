"""Seconds this process has spent compiling, as JAX reports them."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_seconds = 0.0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _seconds
    if event == _COMPILE_EVENT:
        _seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
    """Total since import; take differences."""
    return _seconds
