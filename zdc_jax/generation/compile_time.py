"""Total time that this process has spent compiling, as JAX reports it."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_seconds: float | None = None
"""Seconds so far. None until the first call, so that importing the library adds no listener to JAX."""


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _seconds
    if event == _COMPILE_EVENT:
        _seconds = (_seconds or 0.0) + duration_secs


def compile_seconds() -> float:
    """Return the seconds spent compiling since the first call, which returns 0."""
    global _seconds
    if _seconds is None:
        _seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(_listen)
    return _seconds
