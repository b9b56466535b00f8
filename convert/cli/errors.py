"""Errors and warnings in the words of the command line: flags instead of Python arguments."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from tyro.conf import Positional

from zdc_jax import methods

_OTHER_NAMES = {"texts": "check_text"}
"""Names that functions have for a flag's argument, where they differ from the flag's."""
_POSITIONAL_MARKER = get_args(Positional[Any])[1]  # type: ignore[misc]


def reword_for_flags(message: str, command: Any) -> str:
    """Return an error or a warning in the words of the user who typed a command.

    An argument becomes a flag only where the message quotes the value that the command has. Values that come
    from files keep their names.

    Args:
      message: the message, in which functions quote their arguments as `name=value`.
      command: the parsed command: a dataclass whose fields, and whose fields' fields, are flags. None where
        parsing failed because a dataclass of options refused a value.
    """
    if command is None:
        message = re.sub(r"(?<=use )(\w+)='([^']*)'", _spell_as_flag, message)
        return re.sub(r"^(\w+)=(\S+?)(?=:?\s)", _spell_as_flag, message)
    values: dict[str, Any] = {}
    for name, flag, value in _list_flags(command):
        values[name] = value
        if name == "mesh" and value is not None:  # A parsed mesh has another spelling.
            typed = f"--mesh {value}".replace("\\", r"\\")
            message = re.sub(r"\bmesh=MeshConfig\([^)]*\)", typed, message)
        message = re.sub(rf"(?<=use ){name}='([^']*)'", rf"{flag} \1", message)
        if "_" in name and flag.startswith("--"):  # No word of English.
            message = re.sub(rf"(?<![^\s(]){name}(?=[,;:)]?(?:\s|$))", flag, message)
        for quoted, typed in _list_spellings(name, flag, value):
            pattern = rf"(?<![\w-]){re.escape(quoted)}(?!\w|\.\d)"
            message = re.sub(pattern, typed.replace("\\", r"\\"), message)
        message = re.sub(rf"(?<![\w-])({name}|{_OTHER_NAMES.get(name, name)})=(?=[\s,;]|$)", flag, message)
    if (schema := values.get("json_schema")) is not None:  # The text of the file says less than its name.
        named = f"--json-schema {schema}".replace("\\", r"\\")
        message = re.sub(r"(?<![\w-])json='.*?(?= cannot be used)", named, message)
    if (method := values.get("method")) in methods.names():
        for setting in fields(methods.named(method).Settings):
            message = re.sub(
                rf"(?<![\w-])(?<!--set ){setting.name}=(?=\S)", f"--set {setting.name}=", message
            )
    return re.sub(r",? or None\b", "", message)  # A user leaves the flag out instead.


def _spell_as_flag(quoted: re.Match[str]) -> str:
    return f"--{quoted[1].replace('_', '-')} {quoted[2]}"


def _list_flags(command: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the flag and the value of each argument of a command."""
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(command):
        name, value = field.name, getattr(command, field.name)
        if is_dataclass(value):
            yield from _list_flags(value)
        elif _POSITIONAL_MARKER in get_args(hints[name]):
            yield name, name.upper(), value
        else:
            yield name, f"--{name.replace('_', '-')}", value


def _list_spellings(name: str, flag: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each way in which a message may quote a value, with what the user types for it."""
    match value:
        case None:
            yield f"{name}=None", f"no {flag}"
        case bool():
            yield f"{name}={value}", flag if value else flag.replace("--", "--no-", 1)
        case tuple():
            typed = shlex.join([flag, *map(str, value)])
            yield f"{name}={value!r}", typed
            yield f"{name}={list(value)!r}", typed
            for item in value:  # A function that handles one of them uses the singular.
                singular = flag.removesuffix("S")  # Only positional arguments are in upper case.
                for quoted in (repr(item), repr(str(item))):
                    yield f"{name.removesuffix('s')}={quoted}", shlex.join([singular, str(item)])
        case _:
            typed = shlex.join([flag, str(value)])
            yield f"{name}={value!r}", typed
            yield f"{name}={str(value)!r}", typed
