"""Validation of dataclass fields that come from JSON, against their names and annotations."""

from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

MOST = 2**31 - 1
"""Largest integer allowed. Positions, token ids and sizes are int32 on devices."""
_DESCRIPTIONS = {
    bool: "true or false",
    int: f"an integer from {-MOST} to {MOST}",
    float: "a finite number",
    NoneType: "None",
}


def check_fields(instance: Any, error: type[Exception] = ValueError) -> None:
    """Raise an error of this class for the first field whose value does not match its annotation.

    Integers must fit int32. Floats must be finite; integers are accepted as floats. Strings annotated as a
    `Literal` must be one of its choices.
    """
    kinds = get_type_hints(type(instance))
    for field in fields(instance):
        value = getattr(instance, field.name)
        if not _fits(value, kinds[field.name]):
            raise error(f"{field.name}={value!r:.80} must be {_describe(kinds[field.name])}")


def check_names(kind: Any, value: Any, what: str) -> None:
    """Raise `ValueError` unless a JSON value is an object whose keys are the fields of a dataclass.

    Args:
      kind: the dataclass. Fields without a default are required.
      value: the JSON value.
      what: name of the value in the error message.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {value!r:.80} must be a JSON object")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if unknown := sorted(value.keys() - known.keys()):
        raise ValueError(
            f"{what}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(known) or 'none'}"
        )
    if missing := [name for name, needed in known.items() if needed and name not in value]:
        raise ValueError(f"{what}: missing {', '.join(map(repr, missing))}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_fits(value, choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(kind)[0]) for item in value)
    if kind in (int, float):
        # The float bounds exclude NaN and infinity, and also compare with integers of any size.
        least, most = (-MOST, MOST) if kind is int else (-1e308, 1e308)
        number = int if kind is int else int | float
        return isinstance(value, number) and not isinstance(value, bool) and least <= value <= most
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    if get_origin(kind) is UnionType:
        return " or ".join(map(_describe, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list, each {_describe(get_args(kind)[0])}"
    return _DESCRIPTIONS.get(kind, kind.__name__)
