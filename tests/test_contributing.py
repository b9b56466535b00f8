"""Pages for contributors, whose paths and names must exist in the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "docs/architecture.md")
PATH = re.compile(r"`((?:benchmarks|convert|docs|kernels_pallas|tests|zdc_jax)/[\w./-]*)`")
NAME_IN_FILE = re.compile(r"`(\w+)` in\s+`([\w./]+\.py)`")


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    # `NAME` stands for what a contributor adds.
    paths = [path for path in PATH.findall((ROOT / page).read_text()) if "NAME" not in path]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_names_are_in_their_files():
    places = NAME_IN_FILE.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert ("rope_frequencies", "zdc_jax/ops/rotary.py") in places
    texts = {path: (ROOT / path).read_text() for _, path in places}
    assert [place for place in places if not re.search(rf"\b{place[0]}\b", texts[place[1]])] == []
