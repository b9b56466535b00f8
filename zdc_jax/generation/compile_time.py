"""Seconds this process has spent compiling, as JAX reports them."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_seconds: float | None = None
"""None until somebody asks: importing the library adds no listener to JAX."""


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _seconds
    if event == _COMPILE_EVENT:
        _seconds = (_seconds or 0.0) + duration_secs


def compile_seconds() -> float:
    """Total since the first call, which gives 0; take differences."""
    global _seconds
    if _seconds is None:
        _seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(_listen)
    return _seconds
