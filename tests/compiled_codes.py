"""Codes as whole programs: operation by operation, each shape of each operation is compiled by itself."""

from functools import partial
from typing import Any

import jax


@partial(jax.jit, static_argnames="code")
def encode(code: Any, x: jax.Array) -> Any:
    """Vectors [..., C] as `code` keeps them."""
    return code.encode(x)


@partial(jax.jit, static_argnames=("code", "C"))
def decode(code: Any, coded: Any, C: int) -> jax.Array:
    """Vectors [..., C] as `code` reads them."""
    return code.decode(coded, C)
