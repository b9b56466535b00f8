"""Attention on truncated coordinates: the one place where an implementation is chosen.

Each query t sees near keys, {j < sinks} ∪ {t - window < j ≤ t}, at full rank and far keys, the remaining
j ≤ t, through their first R (scores) and Z (values) coordinates, all under one softmax. The semantics are
written plainly in `kernels_pallas.reference`. Three implementations meet them:

`pallas`: the kernels of `kernels_pallas`, on GPUs of compute capability 9.0 (H100, H200), 16-bit;
`cudnn`: one rank for queries, keys and values, no near keys, no cache, 16-bit;
`xla`: everything, everywhere.

An explicit choice that cannot serve a call raises; None takes the first of them that can, and says which in
the log (`zdc_jax.ops`, once a kind of call).
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from kernels_pallas import (
    Ring,
    Segment,
    Trailing,
    decode_refusal,
    device_refusal,
    prefill_attention,
    prefill_refusal,
    segment_refusal,
)
from kernels_pallas import segment_attention as kernel_segments
from zdc_jax.axes import Array
from zdc_jax.ops.xla import NearKeys, xla_attention, xla_segments

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
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Causal attention of whole sequences on themselves, and the log-sum-exp of its scaled scores.

    Args:
      q, k, v: with near keys (`sinks` or `window`) at full rank, H coordinates each; else truncated already.
      scale: factor on the scores, 1/√H of the original head dim.
      qk_rank, v_rank: coordinates that far keys count with; None (or no near keys) means all that are given.
        0 for both means that far keys are not seen.
      sinks, window: near set, in tokens.
      implementation: see the module; None chooses.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    R = q.shape[-1] if qk_rank is None or not (sinks or window) else qk_rank
    Z = v.shape[-1] if v_rank is None or not (sinks or window) else v_rank
    near = q.shape[-1] > R or v.shape[-1] > Z
    sinks, window = (min(n, q.shape[1]) if near else 0 for n in (sinks, window))
    operands = partial(_whole_operands, R=R, Z=Z, near=near, sinks=sinks)
    options = {"sinks": sinks, "window": window}
    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: kernel_refusal(prefill_refusal, operands, q, k, v, **options),
        "cudnn": lambda: _cudnn_refusal(q, k, v, near),
    }
    match choose_implementation("self_attention", implementation, refusals):
        case "pallas":
            return prefill_attention(**operands(q, k, v), scale=scale, **options)
        case "cudnn":
            o, lse = jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, implementation="cudnn", return_residual=True
            )
            return o, lse.swapaxes(1, 2)
    return _xla_whole(q, k, v, R, Z, scale, sinks, window)


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
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """The near half of attention, for tokens that stand at positions start, start + 1, …; at full rank.

    Args:
      k, v: of the `window` tokens before the queries and of the queries' own; rows of positions below 0 are
        not seen.
      sink_k, sink_v: of positions 0 … P-1; seen once, as sinks.
      scale, window, implementation: as in `self_attention`.

    Returns:
      the result and its log-sum-exp, to be merged with `far_attention`'s (`kernels_pallas.merge_partial`).

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    B, T = q.shape[:2]
    P = sink_k.shape[1]
    operands = partial(_near_operands, window=window)
    arrays, options = (q, k, v, sink_k, sink_v, start), {"sinks": P, "window": window}
    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: kernel_refusal(prefill_refusal, operands, *arrays, **options),
        "cudnn": lambda: _cudnn_refusal(q, k, v, True),
    }
    if choose_implementation("near_attention", implementation, refusals) == "pallas":
        return prefill_attention(**operands(*arrays), scale=scale, **options)
    k, v, sink_k, sink_v = (x.swapaxes(1, 2) for x in (k, v, sink_k, sink_v))
    no_k, no_v = k[..., :0], v[..., :0]
    positions = jnp.broadcast_to(start + jnp.arange(T), (B, T))
    held = start - window + jnp.arange(window + T)
    held = jnp.concatenate([jnp.arange(P), jnp.where(held >= P, held, -1)])

    def join(sinks, recent):
        return jnp.concatenate([sinks, recent], 2)

    near = NearKeys(join(sink_k, k), join(sink_v, v), jnp.broadcast_to(held, (B, *held.shape)))
    return xla_attention(q, no_k, no_v, positions, scale=scale, near=near, sinks=P, window=window)


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
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """The far half of attention, sinks ≤ j ≤ t - window, on truncated coordinates; else all keys j ≤ t.

    Args:
      start: position of the first query. Keys stand at positions 0 … S-1.
      scale, sinks, window, implementation: as in `self_attention`; sinks may be negative.

    Returns:
      the result and its log-sum-exp; zeros and -inf for queries without far keys.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    B, T = q.shape[:2]
    known = isinstance(sinks, int)
    options: dict[str, Any] = {"keys": "far", "sinks": max(sinks, 0) if known else sinks, "window": window}

    def refusal() -> str | None:
        if not known:
            return "it needs to know the number of sinks when it is compiled"
        return kernel_refusal(prefill_refusal, _far_operands, q, k, v, start, **options)

    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": refusal,
        "cudnn": lambda: "it gives no part of attention",
    }
    if choose_implementation("far_attention", implementation, refusals) == "pallas":
        return prefill_attention(**_far_operands(q, k, v, start), scale=scale, **options)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    positions = jnp.broadcast_to(start + jnp.arange(T), (B, T))
    return xla_attention(q, k, v, positions, scale=scale, near=None, sinks=sinks, window=window)


def segment_attention(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    segments: Sequence[Segment],
    *,
    scale: float,
    sinks: int,
    window: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attention of queries at `positions`, in any order, to the keys of several token classes.

    Args:
      q: scores with a segment's keys use its first R coordinates.
      segments: k [B, K, S, R], v [B, K, S, Z] and positions [B, S] of each class, negative for an empty slot.
      sinks, window: only far keys are seen, sinks ≤ j ≤ t - window; all j ≤ t where both are 0.
      scale, implementation: as in `self_attention`.

    Returns:
      the result in the width of the widest values, narrower ones counting as zero beyond theirs, and its
      log-sum-exp; zeros and -inf for queries that see no key.

    Raises:
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """

    def operands(q):
        return {"q": q, "positions": positions, "segments": segments}

    refusals: dict[Implementation, Callable[[], str | None]] = {
        "pallas": lambda: kernel_refusal(segment_refusal, operands, q),
        "cudnn": lambda: "it reads no keys of several classes",
    }
    kind = "class decode" if q.shape[1] == 1 else "class prefill"
    attend = (
        kernel_segments if choose_implementation(kind, implementation, refusals) == "pallas" else xla_segments
    )
    return attend(q, positions, segments, scale=scale, sinks=sinks, window=window)


def choose_implementation(
    kind: str,
    implementation: Implementation | None,
    refusals: dict[Implementation, Callable[[], str | None]],
) -> Implementation:
    """What runs a call: the implementation that is asked for; else the first that can, XLA after all others.

    Args:
      kind: of call, for the log, which tells a choice once and why others were passed over.
      implementation: None to choose.
      refusals: of the other implementations, the best first: why one cannot do this call, None if it can.

    Raises:
      ValueError: unknown implementation.
      NotImplementedError: the one that is asked for cannot do this call, with the reason.
    """
    if implementation not in (None, "xla", *refusals):
        raise ValueError(f"implementation={implementation!r}: must be None, 'pallas', 'cudnn' or 'xla'")
    if implementation in refusals and (reason := refusals[implementation]()) is not None:
        raise NotImplementedError(f"implementation={implementation!r} cannot do this call: {reason}")
    if implementation is not None:
        return implementation
    passed_over: list[str] = []
    for name, refusal in refusals.items():
        if (reason := refusal()) is None:
            _log_choice(kind, name, tuple(passed_over))
            return name
        passed_over.append(f"not {name}: {reason}")
    _log_choice(kind, "xla", tuple(passed_over))
    return "xla"


@lru_cache(maxsize=256)
def _log_choice(kind: str, name: str, passed_over: tuple[str, ...]) -> None:
    """Once a kind of call and reason: the cache is what remembers."""
    log.info("%s runs on %s%s", kind, name, "".join(f" ({reason})" for reason in passed_over))


def _needs_gpu(q: Array) -> str | None:
    if jax.default_backend() != "gpu":
        return f"it needs a GPU, the default backend is {jax.default_backend()!r}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, got {q.dtype}"
    return None


def _cudnn_refusal(q: Array, k: Array, v: Array, near: bool) -> str | None:
    if (reason := _needs_gpu(q)) is not None:
        return reason
    if near:
        return "it has no second rank for near keys"
    if k.shape != v.shape:
        return f"it needs R = Z, got {k.shape=}, {v.shape=}"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"it needs a head dim that is a multiple of 8 up to 128, got {q.shape[-1]}"
    return None


def kernel_refusal(
    refusal: Callable[..., str | None], operands: Callable[..., dict[str, Any]], *arrays: Any, **options: Any
) -> str | None:
    """Why a kernel cannot run here on `operands(*arrays)`, none of which is computed for that.

    Args:
      refusal: the kernel's own, of `kernels_pallas.refusals`.
      operands: gives the kernel's arrays by name; the first of `arrays` is q.
      options: the kernel's, as far as it may refuse them.
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
    """Why the kernels cannot run on new tokens and what a cache holds, its ring if it has near keys.

    table: of pages; then k and v are pools of them.
    """

    def decode(q: Array, k: Array, v: Array, ring: Any) -> dict[str, Any]:
        lengths = jnp.zeros(q.shape[0], jnp.int32)
        held = {"k": k, "v": v, "lengths": lengths, "ring": ring and Ring(*ring)}
        return {"q": q[:, 0], "block_table": table} | held

    def prefill(q: Array, k: Array, v: Array, ring: Any) -> dict[str, Any]:
        operands = {"q": q, "k": k, "v": v, "block_table": table}
        if ring is None:
            return operands
        # Rows by position have the widths of the ring's; how many there are is for the caller to know.
        tail_k, tail_v = ring
        heads = (x[:, :, window:] for x in ring) if sinks else ()
        return operands | {"trailing": Trailing(tail_k, tail_v, jnp.zeros(q.shape[0], jnp.int32), *heads)}

    kernel = (decode_refusal, decode) if q.shape[1] == 1 else (prefill_refusal, prefill)
    return kernel_refusal(*kernel, q, k, v, ring, sinks=sinks, window=window)


def _xla_whole(
    q: Array, k: Array, v: Array, R: int, Z: int, scale: float, sinks: int, window: int
) -> tuple[Array, Array]:
    B, T = q.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]
    near = None
    if sinks or window:

        def lead(x):
            return jnp.pad(x[:, :, :sinks], ((0, 0), (0, 0), (0, window), (0, 0)))

        lead_positions = jnp.pad(positions[:, :sinks], ((0, 0), (0, window)), constant_values=-1)
        near = NearKeys(
            jnp.concatenate([lead(k), k], 2),
            jnp.concatenate([lead(v), v], 2),
            jnp.concatenate([lead_positions, jnp.where(positions >= sinks, positions, -1)], 1),
        )
    return xla_attention(
        q, k[..., :R], v[..., :Z], positions, scale=scale, near=near, sinks=sinks, window=window
    )


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
