"""Helpers shared by all kernels: shared-memory tiles, launch limits, and argument checks."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

LOG2_E = math.log2(math.e)
NEVER = -1e30
"""Running maximum before any key: finite, so that blocks without visible keys give 0 instead of NaN."""

GAIN_BLOCK = 64
"""Consecutive positions of keys whose scores gain the same."""
DTYPES = (jnp.bfloat16, jnp.float16)
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory available to one CTA on compute capability 9.0."""

Shaped = Array | jax.ShapeDtypeStruct
"""Argument of a check: has a shape and a dtype, with or without values."""


def tile_width(*widths: int) -> int:
    """Return the columns of a swizzled tile: the largest of 64, 32, 16 that divides all `widths`."""
    return math.gcd(64, *widths)


def tiled(*shape: int, dtype: Any, width: int) -> Any:
    """Describe a shared-memory buffer in tiles of 8 x `width` elements, as tensor cores and TMA require."""
    swizzle = width * jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, width)), swizzling(swizzle)))


def filled(shape: tuple[int, ...], value: float | int, layout: Any) -> Array:
    """Fill float32 registers with `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def scaled(rows: Array, factor: Array) -> Array:
    """Multiply `rows` [M, N] by `factor` [M]."""
    return rows * lax.broadcast_in_dim(factor, rows.shape, [0])


def divide(x: Array, y: Any) -> tuple[Array, Array]:
    """Return quotient and remainder of nonnegative int32, without the sign cases of `//`."""
    y = jnp.asarray(y, jnp.int32)
    return lax.div(x, y), lax.rem(x, y)


def pad_rows(x: Array, axis: int) -> Array:
    """Pad `x` with zeros to a multiple of 8 along `axis`, the granule of tiled copies."""
    missing = -x.shape[axis] % 8
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


SMS = 132
"""Multiprocessors of an H100 or H200."""
MOST_CACHES = 65535
"""Largest number of caches (sequences times KV heads) in a launch: CUDA's limit for the grid axis."""


def checked_by[**P, R](check: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Call `check` before a function, with those of its arguments that `check` accepts by name."""
    accepted = inspect.signature(check).parameters

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            arguments = signature.bind(*args, **kwargs).arguments
            check(**{name: x for name, x in arguments.items() if name in accepted})
            return function(*args, **kwargs)

        return run

    return decorate


def check_device() -> None:
    """Raise `NotImplementedError` on a GPU of another compute capability than 9.0.

    Other devices are left to JAX.
    """
    if jax.default_backend() == "gpu" and (capability := jax.local_devices()[0].compute_capability) != "9.0":
        raise NotImplementedError(f"it needs a GPU of compute capability 9.0, the device has {capability}")


def check_rank(name: str, value: int) -> None:
    """Raise `ValueError` unless `value` is a multiple of 16 from 16 to 256."""
    if value % 16 or not 16 <= value <= 256:
        raise ValueError(f"{name}={value}: must be a multiple of 16 from 16 to 256")


def check_tails(H: int, R: int, Z: int) -> None:
    """Raise `ValueError` unless R and Z leave trailing coordinates of H, in multiples of 16."""
    check_rank("H", H)
    for name, rest in (("H - R", H - R), ("H - Z", H - Z)):
        if rest < 0 or rest % 16:
            raise ValueError(f"{name}={rest}: must be a multiple of 16, not negative")
    if H == R == Z:
        raise ValueError(f"R = Z = H = {H}: must leave trailing coordinates, with R or Z below H")


def check_dtypes(**arrays: Shaped) -> None:
    """Raise `ValueError` unless all arrays have the same 16-bit float dtype."""
    first, expected = next((name, x.dtype) for name, x in arrays.items())
    for name, x in arrays.items():
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}: must be bfloat16 or float16")
        if x.dtype != expected:
            raise ValueError(f"{name} has dtype {x.dtype}: must be {expected}, as {first} has")


def check_shape(name: str, x: Shaped, expected: tuple[int | None, ...], axes: str) -> None:
    """Raise `ValueError` unless `x` has the expected shape; None allows any size."""
    if x.ndim != len(expected) or any(
        e is not None and e != s for e, s in zip(expected, x.shape, strict=True)
    ):
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} has shape {x.shape}: must be [{axes}] = ({wanted})")


def check_integers(name: str, x: Shaped, expected: tuple[int | None, ...], axes: str) -> None:
    """Raise `ValueError` unless `x` has the expected shape and an integer dtype."""
    check_shape(name, x, expected, axes)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: must be an integer dtype")


def check_rows(B: int | None, **rows: Shaped | None) -> None:
    """Raise `ValueError` unless each array has one integer per sequence; None is allowed."""
    for name, x in rows.items():
        if x is not None:
            check_integers(name, x, (B,), "B")


def check_floats(name: str, x: Shaped, expected: tuple[int | None, ...], axes: str) -> None:
    """Raise `ValueError` unless `x` has the expected shape and a float dtype."""
    check_shape(name, x, expected, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {x.dtype}: must be a float dtype")


def check_sizes(**sizes: int) -> None:
    """Raise `ValueError` if a size is zero: launches need a non-empty grid, copies a non-empty source."""
    for name, size in sizes.items():
        if not size:
            raise ValueError(f"{name}={size}: must be at least 1")


def check_scale(scale: float) -> None:
    """Raise `ValueError` unless the scale is positive: masked scores are -inf before they are scaled."""
    if not scale > 0:
        raise ValueError(f"scale={scale}: must be above 0")


def check_table(block_table: Shaped, rows: int, pool: Shaped, multiple: int) -> None:
    """Raise `ValueError` unless the table has `rows` sequences, and the pool [P, K, slots, …] whole blocks.

    Slots per page must be a multiple of `multiple`.
    """
    check_shape("block_table", block_table, (rows, None), "B, pages")
    if block_table.dtype != jnp.int32:
        raise ValueError(f"block_table has dtype {block_table.dtype}: must be int32")
    pages, (in_all, _, page) = block_table.shape[1], pool.shape[:3]
    if not page or page % multiple:
        raise ValueError(f"page size of {page} slots: must be a non-zero multiple of {multiple}")
    if not pages or not in_all:
        raise ValueError(f"block_table has {pages} pages per sequence, the pool {in_all}: must be at least 1")


def check_caches(rows: int, num_kv_heads: int) -> None:
    """Raise `ValueError` unless the grid of a launch has room for each KV head of each sequence."""
    if rows * num_kv_heads > MOST_CACHES:
        raise ValueError(
            f"{rows} sequences of {num_kv_heads} KV heads are {rows * num_kv_heads} caches: "
            f"must be at most {MOST_CACHES}"
        )


def check_groups(num_heads: int, num_kv_heads: int, most: int | None = None) -> None:
    """Raise `ValueError` unless the query heads divide into equal groups, of at most `most` heads."""
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads: must be a multiple of the {num_kv_heads} heads of k and v"
        )
    if most is not None and num_heads // num_kv_heads > most:
        raise ValueError(f"q has {num_heads // num_kv_heads} heads per KV head: must be at most {most}")
