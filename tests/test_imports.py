"""Directions of imports, file by file, and the modules that serving loads."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

from convert.cli.entry import TOOLS

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels_pallas", "zdc_jax", "convert", "benchmarks")

BASE = "zdc_jax.axes zdc_jax.config zdc_jax.errors zdc_jax.fields zdc_jax.files"
CACHE = f"{BASE} kernels_pallas zdc_jax.ops zdc_jax.cache"
PLAN = f"{CACHE} zdc_jax.planned_layers zdc_jax.methods zdc_jax.plan"
MODEL = f"{PLAN} zdc_jax.model"
NETWORK = (
    f"{MODEL} zdc_jax.basis zdc_jax.parallel zdc_jax.model.transformer zdc_jax.model.mixed_batch "
    "zdc_jax.model.observe"
)
LOADING = (
    f"{NETWORK} zdc_jax.checkpoint zdc_jax.conversation.template zdc_jax.fold zdc_jax.presets zdc_jax.loading"
)
SERVING_ROOMS = (
    f"{LOADING} zdc_jax.generation zdc_jax.conversation zdc_jax.engine zdc_jax.server zdc_jax.replicas"
)
WHOLE = f"{SERVING_ROOMS} zdc_jax zdc_jax.evaluation zdc_jax.planning"
ALLOWED = {
    "kernels_pallas": "",
    "zdc_jax.axes": "",
    "zdc_jax.errors": "",
    "zdc_jax.files": "zdc_jax.errors",
    "zdc_jax.fields": "",
    "zdc_jax.config": "zdc_jax.errors zdc_jax.fields",
    "zdc_jax.basis": BASE,
    "zdc_jax.planned_layers": CACHE,
    "zdc_jax.methods": f"{CACHE} zdc_jax.planned_layers",
    "zdc_jax.plan": f"{CACHE} zdc_jax.planned_layers zdc_jax.methods",
    "zdc_jax.ops": f"{BASE} kernels_pallas",
    "zdc_jax.cache": f"{BASE} kernels_pallas zdc_jax.ops",
    "zdc_jax.model": MODEL,
    "zdc_jax.model.transformer": NETWORK,
    "zdc_jax.model.mixed_batch": NETWORK,
    "zdc_jax.model.observe": NETWORK,
    "zdc_jax.checkpoint": f"{BASE} zdc_jax.model",
    "zdc_jax.parallel": f"{MODEL} zdc_jax.basis",
    "zdc_jax.fold": f"{MODEL} zdc_jax.basis zdc_jax.parallel",
    "zdc_jax.presets": f"{MODEL} zdc_jax.basis zdc_jax.checkpoint zdc_jax.fold",
    "zdc_jax.loading": LOADING,
    "zdc_jax.generation": LOADING,
    "zdc_jax.conversation.template": f"{BASE} zdc_jax.checkpoint",
    "zdc_jax.conversation": f"{LOADING} zdc_jax.generation",
    "zdc_jax.engine.page_pool": "",
    "zdc_jax.engine.scheduler": "zdc_jax.engine.page_pool",
    "zdc_jax.engine": f"{LOADING} zdc_jax.generation zdc_jax.engine.scheduler zdc_jax.engine.page_pool",
    "zdc_jax.server": f"{LOADING} zdc_jax.generation zdc_jax.conversation zdc_jax.engine",
    "zdc_jax.replicas": f"{LOADING} zdc_jax.generation zdc_jax.engine zdc_jax.server",
    "zdc_jax.evaluation": f"{LOADING} zdc_jax.generation zdc_jax.conversation",
    "zdc_jax.planning": f"{LOADING} zdc_jax.evaluation",
    "zdc_jax": WHOLE,
    "convert.cli.flags": f"{LOADING} zdc_jax.generation",
    "convert.cli.http_flags": f"{SERVING_ROOMS} convert.cli.flags",
    "convert.cli.serve": f"{SERVING_ROOMS} convert.cli.flags convert.cli.http_flags",
    "convert": f"{WHOLE} convert.cli.flags",
    "benchmarks": f"{WHOLE} convert zdc_jax.engine.scheduler",
}
"""Packages from the ground up, and what each may import besides itself.

A name covers all modules below it that have no row of their own.
"""


def modules() -> Iterator[tuple[str, Path]]:
    """Yield dotted names and files of all modules."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imported(path: Path) -> Iterator[str]:
    """Yield dotted names of all that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """Return the table's name that covers a module, or None for third-party modules."""
    while name and name not in ALLOWED:
        name = name.rpartition(".")[0]
    return name or None


def may_import(importer: str, target: str) -> bool:
    """Return whether the table lets a module import another."""
    inside, other = room(importer), room(target)
    if other is None or other == inside:
        return True
    assert inside is not None
    return other in ALLOWED[inside].split()


def test_imports_go_one_way():
    against = {
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(path)
        if not may_import(name, target)
    }
    assert not against


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("kernels_pallas.decode.attention", "zdc_jax.axes"),
        ("zdc_jax.model.block", "convert.search.trials"),
        ("zdc_jax.ops.xla", "zdc_jax.cache.specs.choosing.Choosing"),
        ("zdc_jax.ops.xla", "zdc_jax.Checkpoint"),
        ("zdc_jax.methods.token_classes.cache", "zdc_jax.model.block"),
        ("zdc_jax.model.block", "zdc_jax.parallel.mesh"),
        ("zdc_jax.parallel.layers", "zdc_jax.model.transformer"),
        ("zdc_jax.model.block", "zdc_jax.generation.api"),
        ("zdc_jax.model.block", "zdc_jax.evaluation.text"),
        ("zdc_jax.loading", "zdc_jax.planning.choose"),
        ("zdc_jax.evaluation.retention", "zdc_jax.planning.choose"),
        ("zdc_jax.plan", "zdc_jax.basis"),
        ("convert.search.trials", "benchmarks.common"),
        ("convert.cli.serve", "convert.search.trials"),
        ("convert.cli.flags", "zdc_jax.planning.choose"),
    ],
)
def test_the_table_knows_what_is_not_allowed(importer, target):
    assert not may_import(importer, target)


def test_no_modules_import_each_other():
    # Imports inside functions count too; `static_order` raises `CycleError` with the modules of a circle.
    paths = dict(modules())

    def in_module(target):
        return target if target in paths else target.rpartition(".")[0]

    graph = {
        name: {in_module(target) for target in imported(path)} & paths.keys() - {name}
        for name, path in paths.items()
    }
    assert "zdc_jax.methods" in graph["zdc_jax.plan"]
    assert set(TopologicalSorter(graph).static_order()) == {*paths}


def test_serving_imports_none_of_the_tools():
    # Imports inside functions count too.
    offline = ("zdc_jax.evaluation", "zdc_jax.planning", "benchmarks")
    ours = [(name, path) for name, path in modules() if not name.startswith("convert")]
    serving = [path for name, path in ours if room(name) not in offline]
    assert not {name for path in serving for name in imported(path) if name.split(".")[0] in TOOLS}


SERVING = """
import sys
import flax.nnx, orbax.checkpoint  # They import some of them themselves.
theirs = set(sys.modules)
import zdc_jax
zdc_jax.generate, zdc_jax.load
print(*{name.split(".")[0] for name in set(sys.modules) - theirs})
print(*theirs)
"""


def test_serving_loads_none_of_the_tools():
    run = subprocess.run(
        [sys.executable, "-c", SERVING], check=True, capture_output=True, text=True, cwd=ROOT
    )
    ours, theirs = (set(line.split()) for line in run.stdout.splitlines())
    assert "zdc_jax" in ours
    assert not ours & set(TOOLS)
    assert not theirs & (set(TOOLS) - {"filelock", "flatbuffers", "rich"})


def test_all_packages_are_in_the_wheel():
    # The search for packages leaves out folders without `__init__.py`.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(str(ROOT), **project["packages"]["find"])
    folders = {
        path.parent.relative_to(ROOT) for name in PACKAGES[:-1] for path in (ROOT / name).rglob("*.py")
    }
    assert sorted(packages) == sorted(".".join(folder.parts) for folder in folders)


def test_the_tools_are_an_extra():
    # `zdc` checks for the same list.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {requirement.partition(">")[0] for requirement in requirements}

    assert names(project["optional-dependencies"]["tools"]) == set(TOOLS)
    assert not names(project["dependencies"]) & set(TOOLS)
