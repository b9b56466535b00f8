"""Tests in processes that see eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "eight_devices"
GROUPS = [
    "equality exchange",
    pytest.param("loading decoding", marks=pytest.mark.full),
    pytest.param("payload coded_payload", marks=pytest.mark.full),
    pytest.param("serving", marks=pytest.mark.full),
    pytest.param("codes", marks=pytest.mark.full),
    pytest.param("lowering numerics traffic", marks=pytest.mark.full),
    pytest.param("benchmark runahead zigzag", marks=pytest.mark.full),
]
"""Files that share a process. `make test` runs the first group."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # Programs run once: compiling them is what takes time.
}


@pytest.mark.parametrize("group", GROUPS)
def test_on_eight_devices(group, request):
    files = [str(FOLDER / f"{name}.py") for name in group.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["--all"] if request.config.getoption("--all") else []
    run = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_file_is_in_one_group():
    groups = [group if isinstance(group, str) else group.values[0] for group in GROUPS]
    assert sorted(" ".join(groups).split()) == sorted(path.stem for path in FOLDER.glob("*.py"))
