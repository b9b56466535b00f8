"""What the prefill kernel takes beside q, k and v, and its refusals before launch."""

from typing import Literal, NamedTuple

from jax import Array

from kernels_pallas import common
from kernels_pallas.common import Shaped

TAIL_ALIGNMENT = 256
"""`Trailing.start` is a multiple of this, so that key blocks of every size begin at a row of the tail."""

Keys = Literal["all", "far"]


class Trailing(NamedTuple):
    """Trailing coordinates of near keys: k [B, K, M, H-R], v [B, K, M, H-Z], start [B] int32.

    Row i belongs to position start + i; rows must cover the window of every query. sink_k [B, K, P, H-R] and
    sink_v [B, K, P, H-Z] are those of positions 0 … sinks-1 (P ≥ sinks), None without sinks. With far keys
    start is a multiple of `TAIL_ALIGNMENT` (its value is not checked), and rows of positions below `sinks`
    must be theirs. Without (R = Z = 0) it is any position; rows below position 0 or `sinks` are ignored.
    """

    k: Array
    v: Array
    start: Array
    sink_k: Array | None = None
    sink_v: Array | None = None


def check_prefill(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    *,
    starts: Shaped | None = None,
    lengths: Shaped | None = None,
    trailing: Trailing | None = None,
    sinks: int = 0,
    window: int = 0,
    keys: Keys = "all",
    positions: tuple[Shaped, Shaped] | None = None,
) -> None:
    """Raises what `prefill_attention` says it raises; arrays and options are those given to it."""
    common.check_device()
    common.check_dtypes(q=q, k=k, v=v)
    common.check_shape("q", q, (None,) * 4, "B, T, N, H")
    B, _, N, H = q.shape
    common.check_shape("k", k, (B, None, None, None), "B, K, S, R")
    _, K, S, R = k.shape
    common.check_shape("v", v, (B, K, S, None), "B, K, S, Z")
    Z = v.shape[-1]
    common.check_groups(N, K)
    if trailing is None or R or Z:
        common.check_rank("R", R)
        common.check_rank("Z", Z)
    if H < R:
        raise ValueError(f"q has {H} coordinates: must be at least those of k, R={R}")
    if keys not in ("all", "far"):
        raise ValueError(f"keys={keys!r}: must be 'all' or 'far'")
    if sinks < 0 or window < 0:
        raise ValueError(f"sinks={sinks}, window={window}: must not be negative")
    for name, x in (("starts", starts), ("lengths", lengths)):
        if x is not None:
            common.check_shape(name, x, (B,), "B")
    if trailing is not None:
        _check_trailing(q, k, v, trailing, sinks, window, keys)
    if positions is not None:
        _check_positions(q, k, positions, keys, trailing)


def _check_trailing(
    q: Shaped, k: Shaped, v: Shaped, trailing: Trailing, sinks: int, window: int, keys: Keys
) -> None:
    (B, K, _, R), Z, H = k.shape, v.shape[-1], q.shape[-1]
    if keys != "all" or not window:
        raise ValueError(
            f"trailing is given with keys={keys!r} and window={window}: needs 'all' and a window"
        )
    if sinks > 64:
        raise ValueError(f"sinks={sinks}: must be at most 64")
    common.check_tails(H, R, Z)
    common.check_dtypes(q=q, **{"trailing.k": trailing.k, "trailing.v": trailing.v})
    common.check_shape("trailing.k", trailing.k, (B, K, None, H - R), "B, K, M, H - R")
    common.check_shape("trailing.v", trailing.v, (B, K, trailing.k.shape[2], H - Z), "B, K, M, H - Z")
    common.check_shape("trailing.start", trailing.start, (B,), "B")
    if not sinks:
        return
    for name, x, width in (("sink_k", trailing.sink_k, H - R), ("sink_v", trailing.sink_v, H - Z)):
        if x is None:
            raise ValueError(f"sinks={sinks} need trailing.{name}, got None")
        common.check_dtypes(q=q, **{f"trailing.{name}": x})
        common.check_shape(f"trailing.{name}", x, (B, K, None, width), "B, K, P, trailing coordinates")
        if x.shape[2] < sinks:
            raise ValueError(f"trailing.{name} has {x.shape[2]} rows: needs at least sinks={sinks}")


def _check_positions(
    q: Shaped, k: Shaped, positions: tuple[Shaped, Shaped], keys: Keys, trailing: Trailing | None
) -> None:
    if keys != "all" or trailing is not None:
        raise ValueError(f"positions are given with keys={keys!r} or trailing: need 'all' and none")
    common.check_shape("positions[0]", positions[0], q.shape[:2], "B, T")
    common.check_shape("positions[1]", positions[1], (q.shape[0], k.shape[2]), "B, S")
