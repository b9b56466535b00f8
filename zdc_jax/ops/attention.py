"""Attention on truncated coordinates, and the choice of its implementation.

Near keys are the sinks and the recent window, {j < sinks} ∪ {t - window < j ≤ t} for a query at position t.
Far keys are all other j ≤ t. Near keys count with all coordinates; far keys count with the first R (scores)
and Z (values). One softmax covers both.

Implementations:

- `pallas`: the kernels of `kernels_pallas`; GPUs of compute capability 9.0 (H100, H200), 16-bit dtypes.
- `cudnn`: one rank for queries, keys and values, no near keys, no cache, 16-bit dtypes.
- `xla`: every call on every device.

An explicit choice that cannot serve a call raises. None selects the first implementation that can, and logs
the choice once per kind of call (logger `zdc_jax.ops`).
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import (
    Ring,
    Trailing,
    decode_refusal,
    device_refusal,
    prefill_attention,
    prefill_refusal,
)
from zdc_jax.axes import Array
from zdc_jax.ops.xla import NearKeys, xla_attention

Implementation = Literal["pallas", "cudnn", "xla"]

log = logging.getLogger("zdc_jax.ops")


def self_attention(
    q: Float[Array, "B T N Hq"],
    k: Float[Array, "B T K Hq"],
    v: Float[Array, "B T K Hv"],
    *,
    scale: float,
    qk_rank: int | None = None,
    v_rank: int | None = None,
    sinks: int = 0,
    window: int = 0,
    implementation: Implementation | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Compute causal attention within whole sequences.

    Args:
      q: queries. With near keys, q, k and v have all H coordinates; otherwise they are already truncated.
      k: keys.
      v: values.
      scale: factor on the scores, 1/√H of the original head dimension.
      qk_rank: coordinates of far keys in scores. None, or no near keys, means all. If both ranks are 0, far
        keys are not attended to.
      v_rank: coordinates of far values; None as for `qk_rank`.
      sinks: number of sinks.
      window: size of the recent window, in tokens.
      implementation: see the module; None chooses.
      block_scores: what scaled scores gain in each block of positions (`zdc_jax.ops.shift`).

    Returns:
      The output, and the log-sum-exp of the scaled scores.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    R = q.shape[-1] if qk_rank is None or not (sinks or window) else qk_rank
    Z = v.shape[-1] if v_rank is None or not (sinks or window) else v_rank
    near = q.shape[-1] > R or v.shape[-1] > Z
    sinks, window = (min(n, q.shape[1]) if near else 0 for n in (sinks, window))
    operands = partial(_whole_operands, R=R, Z=Z, near=near, sinks=sinks)
    options: dict[str, Any] = {"sinks": sinks, "window": window}
    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: kernel_refusal(prefill_refusal, operands, q, k, v, **options),
        "cudnn": lambda: shift_refusal(block_scores) or _cudnn_refusal(q, k, v, near),
    }
    match choose_implementation("self_attention", implementation, refusals):
        case "pallas":
            return prefill_attention(**operands(q, k, v), scale=scale, block_scores=block_scores, **options)
        case "cudnn":
            o, lse = jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, implementation="cudnn", return_residual=True
            )
            return o, lse.swapaxes(1, 2)
    near_keys = None
    if sinks or window:
        before = ((0, 0), (window, 0), (0, 0), (0, 0))
        near_keys = _make_near_keys(
            jnp.pad(k, before), jnp.pad(v, before), k[:, :sinks], v[:, :sinks], 0, window
        )
    k, v = (x.swapaxes(1, 2) for x in (k[..., :R], v[..., :Z]))
    return xla_attention(
        q, k, v, _list_positions(q), scale=scale, near=near_keys, block_scores=block_scores, **options
    )


def near_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B {window}+T K H"],
    v: Float[Array, "B {window}+T K Z"],
    sink_k: Float[Array, "B P K H"],
    sink_v: Float[Array, "B P K Z"],
    start: Int[Array, ""],
    *,
    scale: float,
    window: int,
    implementation: Implementation | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Compute the near part of attention at full rank, for queries at positions start, start + 1, ….

    Args:
      q: queries.
      k: keys of the `window` tokens before the queries and of the queries' own tokens; entries at positions
        below 0 are masked.
      v: values of the same tokens.
      sink_k: keys of positions 0 … P-1, counted once, as sinks.
      sink_v: values of the sinks.
      start: position of the first query.
      scale, window, implementation, block_scores: as in `self_attention`.

    Returns:
      The output and its log-sum-exp, to be merged with those of `far_attention` by
      `kernels_pallas.merge_partial`.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    operands, arrays = partial(_near_operands, window=window), (q, k, v, sink_k, sink_v, start)
    options: dict[str, Any] = {"sinks": sink_k.shape[1], "window": window}

    def refusal() -> str | None:
        # Keys begin at any position here, and kernels take block scores of whole blocks.
        return shift_refusal(block_scores) or kernel_refusal(prefill_refusal, operands, *arrays, **options)

    if takes_kernels("near_attention", implementation, refusal, lambda: _cudnn_refusal(q, k, v, True)):
        return prefill_attention(**operands(*arrays), scale=scale, **options)
    near = _make_near_keys(k, v, sink_k, sink_v, start, window)
    return xla_attention(
        q,
        near.k[..., :0],
        near.v[..., :0],
        _list_positions(q, start),
        scale=scale,
        near=near,
        block_scores=block_scores,
        **options,
    )


def far_attention(
    q: Float[Array, "B T N R"],
    k: Float[Array, "B S K R"],
    v: Float[Array, "B S K Z"],
    start: Int[Array, ""] | int = 0,
    *,
    scale: float,
    sinks: Int[Array, ""] | int,
    window: int,
    implementation: Implementation | None = None,
    block_scores: Float[Array, "B T N blocks"] | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Compute the far part of attention, sinks ≤ j ≤ t - window, on truncated coordinates.

    Args:
      q: queries, truncated to R coordinates.
      k: keys at positions 0 … S-1.
      v: values at positions 0 … S-1.
      start: position of the first query.
      scale, window, implementation, block_scores: as in `self_attention`.
      sinks: number of sinks; may be negative. If there are no sinks and no window, all keys j ≤ t are far.

    Returns:
      The output and its log-sum-exp; zeros and -inf for queries without far keys.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    known = isinstance(sinks, int)
    options: dict[str, Any] = {"keys": "far", "sinks": max(sinks, 0) if known else sinks, "window": window}

    def refusal() -> str | None:
        if not known:
            return "it needs the number of sinks at compile time"
        return kernel_refusal(prefill_refusal, _far_operands, q, k, v, start, **options)

    if takes_kernels(
        "far_attention", implementation, refusal, lambda: "it cannot compute a part of attention"
    ):
        operands = _far_operands(q, k, v, start)
        return prefill_attention(**operands, scale=scale, block_scores=block_scores, **options)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    near: dict[str, Any] = {"near": None, "sinks": sinks, "window": window}
    return xla_attention(q, k, v, _list_positions(q, start), scale=scale, block_scores=block_scores, **near)


def takes_kernels(
    kind: str,
    implementation: Implementation | None,
    refusal: Callable[[], str | None],
    no_cudnn: Callable[[], str | None] = lambda: "it does not read this cache",
) -> bool:
    """Return whether a call runs on the kernels rather than on XLA.

    `refusal` returns why the kernels cannot serve it, or None if they can; `no_cudnn` why cuDNN cannot.

    Raises:
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    refusals: dict[Implementation, Callable[[], str | None]] = {"pallas": refusal, "cudnn": no_cudnn}
    return choose_implementation(kind, implementation, refusals) == "pallas"


def choose_implementation(
    kind: str,
    implementation: Implementation | None,
    refusals: dict[Implementation, Callable[[], str | None]],
) -> Implementation:
    """Return the implementation to run: the requested one, or the first that can serve the call.

    `xla` comes last and serves every call.

    Args:
      kind: name of the kind of call. The log reports each kind's choice once, with the reasons.
      implementation: requested implementation; None to choose.
      refusals: functions of the other implementations, in order of preference. Each returns the reason why
        its implementation cannot serve the call, or None if it can.

    Raises:
      ValueError: `implementation` is unknown.
      NotImplementedError: the requested implementation cannot serve this call; the message says why.
    """
    if implementation not in (None, "xla", *refusals):
        raise ValueError(f"implementation={implementation!r}: must be None, 'pallas', 'cudnn' or 'xla'")
    if implementation in refusals and (reason := refusals[implementation]()) is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot serve this call: {reason}; pass None to choose another"
        )
    if implementation is not None:
        return implementation
    rejected: list[str] = []
    for name, refusal in refusals.items():
        if (reason := refusal()) is None:
            _log_choice(kind, name, tuple(rejected))
            return name
        rejected.append(f"not {name}: {reason}")
    _log_choice(kind, "xla", tuple(rejected))
    return "xla"


@lru_cache(maxsize=256)
def _log_choice(kind: str, name: str, rejected: tuple[str, ...]) -> None:
    """Log a choice once per kind of call and reasons; the LRU cache suppresses repeats."""
    log.info("%s runs on %s%s", kind, name, "".join(f" ({reason})" for reason in rejected))


def shift_refusal(block_scores: Array | None) -> str | None:
    """Return why an implementation without block scores cannot serve a call, or None if it has none."""
    return None if block_scores is None else "it does not add the block scores of shifted keys"


def _cudnn_refusal(q: Array, k: Array, v: Array, near: bool) -> str | None:
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the default backend is {jax.default_backend()!r}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {q.dtype}"
    if near:
        return "it does not support near keys of another rank"
    if k.shape != v.shape:
        return f"it needs keys and values of equal rank, not {k.shape=}, {v.shape=}"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"it needs a head dimension that is a multiple of 8 up to 128, not {q.shape[-1]}"
    return None


def kernel_refusal(
    refusal: Callable[..., str | None], operands: Callable[..., dict[str, Any]], *arrays: Any, **options: Any
) -> str | None:
    """Return why a kernel cannot run on `operands(*arrays)`, or None if it can.

    Only shapes are evaluated; nothing is computed.

    Args:
      refusal: the kernel's own check, from `kernels_pallas.refusals`.
      operands: function that returns the kernel's arrays by name.
      *arrays: its arguments; the first is q.
      **options: options of the kernel that its check depends on.
    """
    if (reason := device_refusal(arrays[0])) is not None:
        return reason
    return refusal(**jax.eval_shape(operands, *arrays), **options)


def cache_refusal(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ K S R"],
    v: Float[Array, "_ K S Z"],
    ring: tuple[Float[Array, "B K M H-R"], Float[Array, "B K M H-Z"]] | None,
    *,
    sinks: int,
    window: int,
    table: Int[Array, "B n"] | None = None,
) -> str | None:
    """Return why the kernels cannot attend from new tokens to a cache, or None if they can.

    Args:
      q: queries of the new tokens.
      k: first coordinates of the cached keys, or a pool of pages if there is a `table`.
      v: first coordinates of the cached values, or a pool of pages.
      ring: trailing coordinates of near keys and values; None without near keys.
      sinks: number of sinks.
      window: size of the recent window.
      table: block table of a paged cache.
    """

    def decode(q: Array, k: Array, v: Array, ring: Any) -> dict[str, Any]:
        lengths = jnp.zeros(q.shape[0], jnp.int32)
        return {
            "q": q[:, 0],
            "k": k,
            "v": v,
            "lengths": lengths,
            "ring": ring and Ring(*ring),
            "block_table": table,
        }

    def prefill(q: Array, k: Array, v: Array, ring: Any) -> dict[str, Any]:
        operands = {"q": q, "k": k, "v": v, "block_table": table}
        if ring is None:
            return operands
        # The kernel takes tails by position. They have the ring's widths; their number does not matter here.
        tail_k, tail_v = ring
        heads = (x[:, :, window:] for x in ring) if sinks else ()
        return operands | {"trailing": Trailing(tail_k, tail_v, jnp.zeros(q.shape[0], jnp.int32), *heads)}

    refusal, operands = (decode_refusal, decode) if q.shape[1] == 1 else (prefill_refusal, prefill)
    return kernel_refusal(refusal, operands, q, k, v, ring, sinks=sinks, window=window)


def _list_positions(q: Array, start: Array | int = 0) -> Int[Array, "B T"]:
    """Return the positions start, start + 1, … of queries [B, T, N, H]."""
    return jnp.broadcast_to(start + jnp.arange(q.shape[1]), q.shape[:2])


def _make_near_keys(
    k: Array, v: Array, sink_k: Array, sink_v: Array, start: Array | int, window: int
) -> NearKeys:
    """Return near keys from the arrays of `near_attention`; positions of sinks count once."""
    B, P = sink_k.shape[:2]
    recent = start - window + jnp.arange(k.shape[1])
    positions = jnp.concatenate([jnp.arange(P), jnp.where(recent >= P, recent, -1)])
    k, v = (jnp.concatenate(pair, 1).swapaxes(1, 2) for pair in ((sink_k, k), (sink_v, v)))
    return NearKeys(k, v, jnp.broadcast_to(positions, (B, len(positions))))


def _whole_operands(
    q: Array, k: Array, v: Array, *, R: int, Z: int, near: bool, sinks: int
) -> dict[str, Any]:
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    trailing = None
    if near:
        tails = k[..., R:], v[..., Z:]
        heads = (x[:, :, :sinks] for x in tails) if sinks else ()
        trailing = Trailing(*tails, jnp.zeros(q.shape[0], jnp.int32), *heads)
    return {"q": q, "k": k[..., :R], "v": v[..., :Z], "trailing": trailing}


def _near_operands(
    q: Array, k: Array, v: Array, sink_k: Array, sink_v: Array, start: Array, *, window: int
) -> dict[str, Any]:
    k, v, *heads = (x.swapaxes(1, 2) for x in (k, v, sink_k, sink_v))
    starts = jnp.full(q.shape[0], start)
    trailing = Trailing(k, v, starts - window, *(heads if sink_k.shape[1] else ()))
    return {"q": q, "k": k[..., :0], "v": v[..., :0], "starts": starts, "trailing": trailing}


def _far_operands(q: Array, k: Array, v: Array, start: Array | int) -> dict[str, Any]:
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return {"q": q, "k": k, "v": v, "starts": jnp.full(q.shape[0], start)}
