"""A program of an engine before it is compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled, Traced


class Program(NamedTuple):
    """A program to compile.

    Attributes:
      function: function of trees of arrays. It is stored by name (`zdc_jax.engine.stored_programs`), so it
        must be one of a module, or a `functools.partial` of one.
      arguments: arrays, or descriptions of arrays.
      options: options of `jax.jit`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def trace(self) -> Traced:
        """Trace the function."""
        return jax.jit(self.function, **self.options).trace(*self.arguments)

    def compile(self) -> Compiled:
        """Trace, lower and compile the function."""
        return self.trace().lower().compile()
