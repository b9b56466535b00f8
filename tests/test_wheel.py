"""Wheel built from the tree, in a clean environment: the command starts and the demo converts."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command away from the tree and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the tracked files, so that the tree stays as it is."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, folder / "tree", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.full
def test_a_wheel_in_a_clean_environment_converts_the_demo_checkpoint(tmp_path):
    wheel = build_wheel(tmp_path)
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        wheel,
        cwd=tmp_path,
    )
    # The dependencies are those of this environment. Its own .pth files, and so the tree, are not read there.
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    zdc = tmp_path / "clean" / "bin" / "zdc"
    assert "convert" in run(zdc, "--help", cwd=tmp_path)
    where = run(
        python, "-c", "from convert import demo_checkpoint; print(demo_checkpoint.PATH)", cwd=tmp_path
    ).strip()
    assert Path(where).is_relative_to(tmp_path / "clean")
    page = "from zdc_jax.server import page; print(len(page._load()[0]))"
    assert int(run(python, "-c", page, cwd=tmp_path)) > 1000
    assert "converted" in run(zdc, "convert", where, tmp_path / "model", cwd=tmp_path)
    assert (tmp_path / "model" / "manifest.json").exists()
