"""Page of methods, which must name every method with its settings and their defaults."""

import dataclasses
import re
from pathlib import Path

import pytest

from zdc_jax import methods

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"


@pytest.mark.parametrize("name", methods.names())
def test_settings_of_a_method(name):
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` "))
    shown = dict(re.findall(r"`(\w+)=([^`]*)`", row))
    fields = dataclasses.fields(methods.named(name).Settings)
    assert shown == {field.name: str(field.default).lower() for field in fields}
