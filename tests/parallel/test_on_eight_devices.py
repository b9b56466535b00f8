"""Runs each file of `eight_devices` in one process that sees eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "eight_devices").glob("*.py"))
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # Programs run once: compiling them is what takes time.
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.sampled
def test_on_eight_devices(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
