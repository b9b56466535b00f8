"""Records of where a figure was measured, and JSON files of results."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from zdc_jax.files import whole_file

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Return device, versions, commit and time of this run."""
    packages = ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")
    return {
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "commit": commit(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def ask_environment() -> dict[str, Any]:
    """Return `environment()` of a process that ends, so that this one leaves the device to others."""
    program = "import json; from benchmarks.common import environment; print(json.dumps(environment()))"
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[1]
    asked = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(asked.stdout)


def commit() -> str:
    """Return the commit of the working tree, marked `-dirty` if the tree has changes.

    The environment variable `ZDC_COMMIT` names the commit where a tree travels without its history. Outside a
    repository the result is `unknown`.
    """
    if named := os.environ.get("ZDC_COMMIT"):
        return named
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def write_result(
    name: str,
    config: dict[str, Any],
    results: Any,
    folder: Path = RESULTS,
    *,
    measured_in: dict[str, Any] | None = None,
) -> Path:
    """Write one run as `folder/name.json`, atomically.

    `measured_in` is the environment of the run, by default that of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = as_text(
        {"benchmark": name, **(measured_in or environment()), "config": config, "results": results}
    )
    with whole_file(path) as file:
        file.write_text(text)
    return path


def earlier(path: Path, settings: dict[str, Any], device: str | None = None) -> Any:
    """Return the results that a file of `write_result` already has; [] if there is no file.

    `device` is the device of the new results, by default that of this process.

    Raises:
      SystemExit: the file has other settings, or results of another device.
    """
    if not path.exists():
        return []
    run, settings = json.loads(path.read_text()), json.loads(json.dumps(settings))  # Tuples become lists.
    if run["config"] != settings:
        now, then = ({(name, repr(value)) for name, value in x.items()} for x in (settings, run["config"]))
        other = sorted({name for name, _ in now ^ then})
        raise SystemExit(f"{path} holds rows of other settings ({', '.join(other)}); give another name")
    if run["device"] != (device := device or jax.devices()[0].device_kind):
        raise SystemExit(f"{path} holds rows of {run['device']}, this is {device}; give another name")
    return run["results"]


def as_text(run: dict[str, Any]) -> str:
    """Return JSON with one line for each value, and one line for each list of numbers."""

    def one_line(numbers):
        return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")

    return re.sub(r"\[[-+\d.eE,\s]+\]", one_line, json.dumps(run, indent=1)) + "\n"
