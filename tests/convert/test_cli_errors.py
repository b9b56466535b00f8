"""Errors and warnings in the words of flags."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
from tyro.conf import Positional

from convert.cli.errors import reword_for_flags


@dataclass
class Nested:
    window: int = 0
    method: str | None = None


@dataclass
class Command:
    output: Positional[str]
    flags: Annotated[Nested, "nested"] = field(default_factory=Nested)
    mesh: str | None = None
    top_p: float = 1.0
    overwrite: bool = False
    contexts: tuple[int, ...] = ()
    prompts: Positional[tuple[str, ...]] = ()
    texts: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("message", "options", "expected"),
    [
        ("top_p=0.0: too small", {"top_p": 0.0}, "--top-p 0.0: too small"),
        ("top_p=0.05: too small", {"top_p": 0.0}, "top_p=0.05: too small"),
        ("window=16 and window=1", {"flags": Nested(window=1)}, "window=16 and --window 1"),
        ("mesh='model=2' is too large", {"mesh": "model=2"}, "--mesh model=2 is too large"),
        ("mesh='': empty", {"mesh": ""}, "--mesh '': empty"),
        ("mesh=None: missing", {}, "no --mesh: missing"),
        ("give mesh= with it", {}, "give --mesh with it"),
        ("give check_text= with it", {}, "give --texts with it"),
        ("overwrite=False and overwrite=True", {}, "--no-overwrite and overwrite=True"),
        ("context=9: too long", {"contexts": (8, 9)}, "--contexts 9: too long"),
        ("contexts=(8, 9): too long", {"contexts": (8, 9)}, "--contexts 8 9: too long"),
        ("output='a b': exists", {}, "OUTPUT 'a b': exists"),
        ("prompt='': empty", {"prompts": ("w3", "")}, "PROMPT '': empty"),
        ("layer 0: bits=5: odd", {"flags": Nested(method="kivi")}, "layer 0: --set bits=5: odd"),
        ("layer 0: bits=5: odd", {}, "layer 0: bits=5: odd"),
        ("window=0 must be 1, or None", {}, "--window 0 must be 1"),
    ],
)
def test_arguments_become_flags(message, options, expected):
    assert reword_for_flags(message, Command("a b", **options)) == expected


def test_values_refused_while_parsing_become_flags():
    message = "text_windows=-1: must be at least 1, not batch=2"
    assert reword_for_flags(message, None) == "--text-windows -1: must be at least 1, not batch=2"
