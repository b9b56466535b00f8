"""Entry points of `zdc` and `zdc-convert`, which report missing packages in one line."""

import gc
import sys
from importlib.util import find_spec

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
