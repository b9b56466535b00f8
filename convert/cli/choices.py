"""Parser of flags with choices: tyro's own lists `None` among them in errors and in completions of shells."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

CHOICES = ConstructorRegistry()


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
