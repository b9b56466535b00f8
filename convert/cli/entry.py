"""Entry points of `zdc` and `zdc-convert`, which report missing packages in one line."""

import gc
import os
import sys
from contextlib import nullcontext, suppress
from importlib.util import find_spec

from convert.cli.interrupts import INTERRUPTED, end_at_second_interrupt

TOOLS = (
    "filelock",
    "flatbuffers",
    "gguf",
    "matplotlib",
    "rich",
    "scipy",
    "transformers",
    "tyro",
    "wonderwords",
)
"""Packages of the extra `tools`, which the library can serve without."""
OWN_INTERRUPTS = {"chat", "serve"}
"""Commands that go on after Ctrl-C, or end in steps."""


def main() -> int:
    """Run `zdc` and return its exit status, which is 2 where packages are missing."""
    return _run(sys.argv[1:])


def main_convert() -> int:
    """Run `zdc convert` under its alias `zdc-convert`."""
    return _run(["convert", *sys.argv[1:]])


def _run(arguments: list[str]) -> int:
    if missing := [name for name in TOOLS if find_spec(name) is None]:
        print(f"error: zdc needs {', '.join(missing)}; run: pip install 'zdc-jax[tools]'", file=sys.stderr)
        return 2
    try:
        # A flag may come before the command.
        with nullcontext() if OWN_INTERRUPTS.intersection(arguments[:2]) else end_at_second_interrupt():
            status = _run_command(arguments)
    except KeyboardInterrupt:  # While modules were imported.
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status == INTERRUPTED:
        with suppress(OSError):  # The reader of a pipe may have ended.
            sys.stdout.flush()
        os._exit(status)  # Threads of XLA that still run would abort a normal exit.
    return status


def _run_command(arguments: list[str]) -> int:
    gc.disable()  # Imports make many objects that stay. To search them for garbage takes a fifth of the time.
    try:
        from convert.cli.main import main
        from convert.cli.programs import FLAG, keep_programs

        if arguments[:1] == [FLAG]:
            arguments = arguments[1:]
        elif arguments and not arguments[0].startswith("-"):  # Help compiles nothing.
            keep_programs()
        return main(arguments)
    finally:
        gc.enable()  # A command enables it, too. Help and errors end before that.


if __name__ == "__main__":
    sys.exit(main())
