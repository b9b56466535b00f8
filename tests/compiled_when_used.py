"""Programs of an engine that are compiled when they are first used, since most tests use few of them."""

from collections.abc import Mapping

from jax.stages import Compiled

from zdc_jax.engine.uncompiled import Program


class CompiledWhenUsed(dict[str, Compiled]):
    """Programs by name."""

    def __init__(self, programs: Mapping[str, Program]):
        self._programs = programs

    def __missing__(self, name: str) -> Compiled:
        self[name] = self._programs[name].compile()
        return self[name]

    def compile_all(self) -> None:
        """Compile all programs, as an engine does at its start."""
        for name in self._programs:
            self[name]
