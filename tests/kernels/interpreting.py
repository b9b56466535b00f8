"""Kernels in JAX's interpreter of GPU kernels, on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreter


@contextmanager
def interpreted(module: Any, **plain: Callable[..., Any]) -> Iterator[None]:
    """The kernel that `module._launch` launches is interpreted, and must race nowhere.

    plain: functions of the module by name, for those that the interpreter has no word for.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, function in plain.items():
            patch.setattr(module, name, function)
        module._launch.clear_cache()
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    assert not interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()
    module._launch.clear_cache()
