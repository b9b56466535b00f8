"""Runs the files of `eight_devices` in processes that see eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "eight_devices"
GROUPS = [
    "serving traffic zigzag loading",
    "coded_payload runahead payload",
    "benchmark equality exchange",
    "classes lowering",
    "codes decoding numerics",
]
"""Files that share a process, and are drawn together: the groups take alike, a minute and a half alone."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # Programs run once: compiling them is what takes time.
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.full
def test_on_eight_devices(group):
    files = [str(FOLDER / f"{name}.py") for name in group.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_file_is_in_one_group():
    named = sorted(" ".join(GROUPS).split())
    assert named == sorted(path.stem for path in FOLDER.glob("*.py"))
