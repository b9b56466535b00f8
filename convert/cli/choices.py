"""Parsers of flags with choices, and of numbers.

Tyro's own parser of choices lists `None` in errors and in completions; that of numbers quotes Python.
"""

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

CHOICES = ConstructorRegistry()


@CHOICES.primitive_rule
def parse_number(flag: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return the parser of a number, whose error quotes what was typed; None for other types."""
    kinds = [kind for kind in get_args(flag.type) or (flag.type,) if kind is not NoneType]
    if kinds not in ([int], [float]):
        return None
    kind, word = (int, "an integer") if kinds == [int] else (float, "a number")

    def parse(typed: list[str]) -> int | float:
        try:
            return kind(typed[0])
        except ValueError:
            raise ValueError(f"{typed[0]!r} is not {word}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, int | kind),
        str_from_instance=lambda value: [str(value)],
    )


@CHOICES.primitive_rule
def parse_choice(flag: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return the parser of a flag of type `Literal[...] | None`; None for other types."""
    kinds = get_args(flag.type)
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == len(kinds) or [get_origin(kind) for kind in others] != [Literal]:
        return None
    choices: tuple[str, ...] = get_args(others[0])
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(choices)}}}",
        instance_from_str=lambda typed: typed[0],
        is_instance=lambda value: value is None or value in choices,
        str_from_instance=lambda value: [str(value)],
        choices=choices,
    )
