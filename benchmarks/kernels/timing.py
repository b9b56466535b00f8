"""Device times of jitted functions, and of PyTorch in a process of its own."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.kernels.flash_attention_3 import Call


def device_ms(f: Callable[..., Any], *args: Any, iterations: int = 7) -> list[float]:
    """Return milliseconds on the device of each of `iterations` calls, after one call that warms up.

    CUPTI adds up all kernels of a call. Inputs should be larger than the second-level cache of 60 MB, which
    is not flushed.
    """
    _, times = profiler.measure(jax.jit(f), iterations=iterations)(*args)
    return [float(t) for t in times]


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return name and milliseconds of each kernel that a call launches, by CUPTI.

    The call should have run before.

    Raises:
      RuntimeError: CUPTI reports no kernel.
    """
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = cupti._cupti_get_timings(True)
    if not timings:
        raise RuntimeError("CUPTI reports no kernel; run on a GPU")
    return [(name, float(ms)) for name, ms in timings]


def in_turns[Name](
    programs: dict[Name, tuple[Callable[..., Any], tuple[Any, ...]]], *, rounds: int = 4, iterations: int = 5
) -> dict[Name, list[float]]:
    """Return milliseconds of each compiled function on its arguments, all rounds together.

    The functions alternate in each round, because the clock of the card falls as the card warms up.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for _, (name, (program, args)) in itertools.product(range(rounds), programs.items()):
        _, measured = profiler.measure(program, iterations=iterations)(*args)
        times[name] += [float(t) for t in measured]
    return times


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Return random normal numbers on the device."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy of 4 GiB."""
    x = normal(0, 2**30, dtype=jnp.float32)
    return 2 * x.nbytes / (np.median(device_ms(lambda x: x * 1.0000001, x)) * 1e-3)


def matmul_rate() -> float:
    """Return floating-point operations per second of a bf16 product of 8192 × 8192 matrices."""
    a, b = normal(0, 8192, 8192), normal(1, 8192, 8192)
    return 2 * 8192**3 / (np.median(device_ms(lambda a, b: a @ b, a, b)) * 1e-3)


_TORCH = """
import json, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
S, N, H = map(int, sys.argv[1:4])
q, k, v = (torch.randn(1, N, S, H, device="cuda", dtype=torch.bfloat16) for _ in range(3))
out = {"version": torch.__version__}
for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
    try:
        with sdpa_kernel(getattr(SDPBackend, name)):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            for _ in range(3): call()
            times = []
            for _ in range(7):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(); call(); b.record(); torch.cuda.synchronize()
                times.append(a.elapsed_time(b))
        out[name] = times
    except RuntimeError as error:
        out[name] = str(error)[:200]
print(json.dumps(out))
"""


def torch_attention(S: int, N: int, H: int) -> dict[str, Any]:
    """Time causal attention in PyTorch's FlashAttention and cuDNN back ends, in milliseconds by CUDA events.

    A result `refused` gives the reason why there are no times.
    """
    return _answer([sys.executable, "-c", _TORCH, str(S), str(N), str(H)])


def flash_attention_3(call: Call) -> dict[str, Any]:
    """Run `benchmarks.kernels.flash_attention_3` for one call; `refused` explains a failure."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(call).items()]
    return _answer([sys.executable, "-m", Call.__module__, *flags])


def _answer(command: list[str], seconds: float = 300.0) -> dict[str, Any]:
    """Return the JSON that a process prints last, or `refused` if it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"refused": f"no answer within {seconds:.0f} s"}
    if done.returncode:
        errors = re.findall(r"^[\w.]*Error: .*", done.stderr, re.MULTILINE)
        return {"refused": (errors or [f"exit status {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])
