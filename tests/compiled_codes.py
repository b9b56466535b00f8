"""Quantizers as whole compiled programs.

Without jit, each shape of each operation would be compiled by itself.
"""

from functools import partial
from typing import Any

import jax


@partial(jax.jit, static_argnames="code")
def encode(code: Any, x: jax.Array) -> Any:
    """Quantize vectors [..., C] with `code`."""
    return code.encode(x)


@partial(jax.jit, static_argnames=("code", "C"))
def decode(code: Any, coded: Any, C: int) -> jax.Array:
    """Dequantize vectors [..., C] with `code`."""
    return code.decode(coded, C)
