"""Kernels in JAX's interpreter of GPU kernels, on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreter
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


@contextmanager
def interpreted(module: Any, launch: str, **plain: Callable[..., Any]) -> Iterator[None]:
    """Interpret the kernel that `launch` of the module launches, and assert that it has no races.

    plain: replacements by name for functions of the module that the interpreter does not support.
    """
    with all_interpreted((module, launch, plain)):
        yield


@contextmanager
def all_interpreted(*kernels: tuple[Any, str, dict[str, Callable[..., Any]]]) -> Iterator[None]:
    """Interpret kernels of several modules, each with the name of its launch and its plain functions."""
    mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(_patched(*kernel))
        stack.enter_context(mode)
        yield
    assert not interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()


@contextmanager
def interpreted_warpgroups(module: Any, launch: str, **plain: Callable[..., Any]) -> Iterator[None]:
    """Interpret a kernel whose warpgroups differ in their work, without a search for races.

    The interpreter reports a false race where a warpgroup waits for several others. It also demands that all
    of them see each phase of each barrier.
    """
    with _patched(module, launch, plain) as patch:
        patch.setattr(shared_memory.Barrier, "deallocate", _given_up)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=False)):
            yield
    interpreter.reset_gpu_interpret_mode_state()


@contextmanager
def _patched(module: Any, launch: str, plain: dict[str, Callable[..., Any]]) -> Iterator[pytest.MonkeyPatch]:
    clear = getattr(module, launch).jitted.clear_cache
    with pytest.MonkeyPatch.context() as patch:
        for name, function in plain.items():
            patch.setattr(module, name, function)
        patch.setattr(callbacks, "io_callback_impl", _call_back)
        patch.setattr(shared_memory, "_to_int", _to_int)
        clear()
        yield patch
    clear()


def _call_back(*args: np.ndarray, callback: Callable[..., Any], **_: Any) -> Any:
    """Call the interpreter with numpy arrays.

    JAX would first copy each array to the device, which takes longer than the interpreter's own work.
    """
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _to_int(x: Any) -> Any:
    """Return an integer for a numpy array, which the interpreter's own function does not support."""
    return x.item() if isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer) else x


def _given_up(barrier: shared_memory.Barrier) -> None:
    with barrier.cv:
        barrier.ref_count -= 1
