"""The command `zdc`, with a timer around each compiled program of an engine.

    ZDC_HOST_TIMES=times.json python -m benchmarks.serving.timed_server serve model/

When the server ends, the file has the seconds that each call of a program kept the host, by name of the
program. The GPU may compute meanwhile and afterwards.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from convert.cli import entry
from zdc_jax.engine import runner
from zdc_jax.engine.compiling import compile_all
from zdc_jax.engine.uncompiled import Program

VARIABLE = "ZDC_HOST_TIMES"
"""Environment variable that names the file."""


class TimedProgram:
    """Compiled program whose calls are timed.

    Attributes:
      seconds: time of each call so far.
    """

    def __init__(self, program: Any):
        self._program = program
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._program(*args)
        finally:
            self.seconds.append(time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def main() -> int:
    """Run `zdc` with the arguments of this process, and return its exit status."""
    timed: dict[str, TimedProgram] = {}

    def compile_timed(programs: dict[str, Program]) -> dict[str, TimedProgram]:
        timed.update({name: TimedProgram(program) for name, program in compile_all(programs).items()})
        return timed

    vars(runner)["compile_all"] = compile_timed
    try:
        return entry.main()
    finally:
        seconds = {name: program.seconds for name, program in timed.items()}
        Path(os.environ[VARIABLE]).write_text(json.dumps(seconds))


if __name__ == "__main__":
    sys.exit(main())
