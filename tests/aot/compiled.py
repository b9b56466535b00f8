"""Compilation of kernels for sm_90a without a GPU, and what ptxas reports of them.

Tests need the extra `aot` and the environment variable `JAX_PLATFORMS=cpu`. Without it, CUDA's plugin asks
for a GPU.
"""

import functools
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import pytest
from jax.experimental import topologies
from sass import Code

REGISTERS = 65536
"""32-bit registers of one multiprocessor. A thread uses a multiple of 8."""
SHARED_MEMORY = 228 * 1024
"""Shared memory of one multiprocessor, in bytes."""
_BESIDE = 2048
"""Shared memory of one CTA besides its buffers, in bytes: barriers, and 1 KiB of the system."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its launch sizes (memory in bytes), report and code."""

    name: str
    threads: int
    registers: int
    stack: int
    spills: int
    shared_memory: int
    report: str = field(repr=False)
    code: Code = field(repr=False)

    @property
    def serialized(self) -> bool:
        """Whether ptxas serializes matrix products, for example for lack of registers."""
        return "wgmma.mma_async instructions are serialized" in self.report

    @property
    def register_pool(self) -> int:
        """Registers of one CTA, summed over its warps."""
        return -(-self.registers // 8) * 8 * self.threads

    @property
    def ctas(self) -> int:
        """Number of CTAs that fit on one multiprocessor, by registers and shared memory."""
        return min(REGISTERS // self.register_pool, SHARED_MEMORY // (self.shared_memory + _BESIDE))


def compiled(f: Callable[..., Any], *args: Any) -> list[Kernel]:
    """Return the Mosaic kernels of `f` for arguments of these shapes.

    Kernels that XLA generates around them are left out. The ptxas that JAX finds compiles them and reports on
    them. The test is skipped where CUDA's plugin is absent.
    """
    sharding = jax.sharding.SingleDeviceSharding(device())

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    traced = jax.jit(f).trace(*jax.tree.map(placed, args))
    with tempfile.TemporaryDirectory() as folder:
        with patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder):
            traced.lower(lowering_platforms=("cuda",)).compile()
        kernels = [_kernel(path) for path in sorted(Path(folder).glob("*.ptxas"))]
    assert kernels, "no kernel was compiled"
    print(*kernels, sep="\n")
    return kernels


def assert_no_spills(kernels: list[Kernel]) -> None:
    """Assert that all values stay in registers and that no matrix products are serialized."""
    for kernel in kernels:
        accesses = kernel.code.count("LDL", "STL")
        assert kernel.spills + kernel.stack + accesses == 0, f"{kernel} spills, {accesses} accesses"
        assert not kernel.serialized, kernel.report


def device() -> Any:
    """Return an abstract H200."""
    return devices(1)[0]


@functools.cache
def devices(count: int) -> Any:
    """Return `count` abstract H200s of one host."""
    config = Path(__file__).with_name("h200.txtpb").read_text()
    try:
        return topologies.get_topology_desc(
            "h200", "cuda", target_config=config, topology=f"1x1x{count}"
        ).devices
    except NotImplementedError:
        pytest.skip("CUDA's plugin is absent or does not start: install the extra aot, set JAX_PLATFORMS=cpu")


def _kernel(path: Path) -> Kernel:
    """Return the kernel whose ptxas report lies at `path`, next to its PTX, resources and code."""
    report = path.read_text()

    def read(suffix):
        return path.with_suffix(suffix).read_text()

    return Kernel(
        name=path.stem,
        threads=_sum(r"\.maxntid (\d+)", read(".ptx")),
        registers=_sum(r"Used (\d+) registers", report),
        stack=_sum(r"(\d+) bytes stack frame", report),
        spills=_sum(r"frame, (\d+) bytes spill", report) + _sum(r"frame, .* (\d+) bytes spill loads", report),
        shared_memory=_sum(r"smem_scratch_bytes=(\d+)", read(".resources.txt")),
        report=report,
        code=Code(read(".sass_ctrl")),
    )


def _sum(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, f"{pattern} is not in:\n{text[:1000]}"
    return sum(map(int, found))
