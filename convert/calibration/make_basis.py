"""From moments to a basis: which coordinates of Q/K and V/O matter most (ZDC §4.3, and ours).

Everything is float64 and works on stacks of heads, [*K, H, H]. One theory serves both pairs of
matrices. Scores are q kᵀ; keeping r coordinates leaves the error q E kᵀ with E = I − A_Q,r A_K,rᵀ,
whose mean square over independent rows is tr(C_Q E C_K Eᵀ). For values, v W_O,n leaves v Eᵀ W_O,n,
and summed over the group its mean square is tr(M E C_V Eᵀ) with M = Σ_n W_O,n W_O,nᵀ. So V takes
the place of K, M that of C_Q, C that of A_K and C⁻ᵀ that of A_Q.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
from jaxtyping import Float64, Int32
from threadpoolctl import threadpool_limits

from convert.calibration.moments import QUANTITIES, Moments, Quantity
from zdc_jax.basis import Basis, QKKind, VOKind
from zdc_jax.errors import CalibrationError

Matrices = Float64[np.ndarray, "*K H H"]

DEFAULT_RIDGE = 1e-6


def stacked(C_Q: Matrices, C_K: Matrices) -> Matrices:
    """A_K = A_Q: right singular vectors of the rows [Q; K], most energetic first (ZDC §4.3).

    The two moments must be sums over the rows that are stacked (or share one factor): their ratio
    is the weight of Q's rows, of all G heads, against K's.
    """
    return np.linalg.eigh(C_Q + C_K).eigenvectors[..., ::-1]


def keys(C_K: Matrices) -> Matrices:
    """A_K = A_Q: principal components of the keys, most energetic first; queries are not asked.

    Orthogonal. The coordinates that Loki chooses by (Singhania et al. 2024).
    """
    return np.linalg.eigh(C_K).eigenvectors[..., ::-1]


def balanced(C_Q: Matrices, C_K: Matrices, ridge: float = DEFAULT_RIDGE) -> Matrices:
    """A_K whose every prefix is the best approximation of its rank (ours, after KQ-SVD).

    With C_Q^½ C_K^½ = U Σ Wᵀ: A_K = C_K^-½ W Σ^½ and A_Q = C_Q^-½ U Σ^½, the inverse transpose of
    A_K. Both q' and k' get the second moments Σ. Eigenvalues of the moments below `ridge` times
    their mean are raised to it, so moments of deficient rank work and well-conditioned ones stay
    untouched.
    """
    values_q, vectors_q = _floored_eigh(C_Q, ridge)
    values_k, vectors_k = _floored_eigh(C_K, ridge)
    # F = √λ Xᵀ is as good a root of C = X λ Xᵀ as the symmetric one, and cheap to invert.
    root_q = np.sqrt(values_q)[..., None] * vectors_q.swapaxes(-1, -2)
    root_k = np.sqrt(values_k)[..., None] * vectors_k.swapaxes(-1, -2)
    _, sigma, W = np.linalg.svd(root_q @ root_k.swapaxes(-1, -2))
    inverse_root_k = vectors_k / np.sqrt(values_k)[..., None, :]
    return inverse_root_k @ W.swapaxes(-1, -2) * np.sqrt(sigma)[..., None, :]


def _floored_eigh(C: Matrices, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(C)
    mean = values.mean(-1, keepdims=True)
    # A head that is zero throughout has no preferred directions; any positive floor will do.
    return np.maximum(values, np.where(mean > 0, ridge * mean, 1.0)), vectors


def pairs(C_Q: Matrices, C_K: Matrices) -> Int32[np.ndarray, "*K h"]:
    """Rotary pairs (p, p + H/2) ordered by their energy, descending (ours).

    A pair's energy is the mean square of its part of the score, over its two dimensions:
    tr(C_Q[p, p] C_K[p, p]) of the 2×2 blocks.

    Raises:
      CalibrationError: H is odd.
    """
    H = C_Q.shape[-1]
    if H % 2:
        raise CalibrationError(f"rotary pairs need an even head dim, this model has {H}")
    blocks = (C_Q * C_K).reshape(*C_Q.shape[:-2], 2, H // 2, 2, H // 2)
    energy = np.einsum("...apbp->...p", blocks)
    return np.argsort(-energy, axis=-1, kind="stable").astype(np.int32)


def pair_map(order: Int32[np.ndarray, "*K h"]) -> Matrices:
    """A_K = A_Q, the permutation from half-split dimensions to interleaved pairs in this order."""
    half = order.shape[-1]
    columns = np.stack([order, order + half], axis=-1).reshape(*order.shape[:-1], 2 * half)
    return np.eye(2 * half)[columns].swapaxes(-1, -2)


def residual(C_Q: Matrices, C_K: Matrices, A_Q: Matrices, A_K: Matrices) -> Float64[np.ndarray, "*K H+1"]:
    """tr(C_Q E C_K Eᵀ) for every number r = 0…H of kept coordinates.

    As A_Q A_Kᵀ = I, E is made of the dropped columns alone, and the trace is the sum over dropped
    i, j of (A_Qᵀ C_Q A_Q)_ij (A_Kᵀ C_K A_K)_ij: no cancellation however small it gets.
    """
    energy = (A_Q.swapaxes(-1, -2) @ C_Q @ A_Q) * (A_K.swapaxes(-1, -2) @ C_K @ A_K)
    trailing = energy[..., ::-1, ::-1].cumsum(-1).cumsum(-2)
    sums = np.diagonal(trailing, axis1=-2, axis2=-1)[..., ::-1]
    return np.concatenate([np.maximum(sums, 0), np.zeros_like(sums[..., :1])], axis=-1)


def certificate(C_Q: Matrices, C_K: Matrices, A_Q: Matrices, A_K: Matrices) -> Float64[np.ndarray, "*K H+1"]:
    """Relative score error sqrt(tr(C_Q E C_K Eᵀ)/tr(C_Q C_K)) for r = 0…H kept coordinates (ours).

    Products that are zero throughout have no error.
    """
    squares = residual(C_Q, C_K, A_Q, A_K)
    total = squares[..., :1]
    return np.sqrt(np.divide(squares, total, out=np.zeros_like(squares), where=total > 0))


def make_basis(
    moments: Moments,
    output_weights: Sequence[np.ndarray],
    *,
    qk: QKKind = "balanced",
    vo: VOKind = "balanced",
    center: bool = False,
    ridge: float = DEFAULT_RIDGE,
) -> Basis:
    """The basis of a whole model.

    Args:
      moments: of the model's q, k, v and o.
      output_weights: W_O [N, H, D] of every layer, any float dtype.
      qk: `stacked`, `balanced`, `keys` or `pairs`.
      vo: `stacked` (rows of V and columns of W_O), `balanced`, or `output`: balanced with O's
        moments in place of V's, which is exact for the heads' outputs when G = 1 and pools the
        heads of a group otherwise.
      center: shift keys and values by their means first (values by O's mean for `output`); keys
        stay where they are for `pairs`, whose rotary embedding cannot carry a shift.
      ridge: floor of the eigenvalues in `balanced`, relative to their mean.

    Raises:
      CalibrationError: no tokens, moments or weights that are not finite (naming layer and KV
        head), weights of other shapes than the moments', an unknown kind, or `pairs` with an odd H.
    """
    _check_inputs(moments, output_weights, qk, vo)

    def solve(layer: int) -> dict[str, np.ndarray]:
        latent = {} if moments.k_before is None else {"k_latent": keys(moments.k_before[layer])}
        qk_side = _solve_qk(moments, layer, qk, center, ridge)
        return qk_side | _solve_vo(moments, layer, output_weights[layer], vo, center, ridge) | latent

    # Matrices are too small for BLAS's own threads: one thread each, layers side by side.
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        solved = list(pool.map(solve, range(len(output_weights))))
    arrays: dict[str, Any] = {name: np.stack([one[name] for one in solved]) for name in solved[0]}
    return Basis(
        **arrays,
        qk_kind=qk,
        vo_kind=vo,
        num_tokens=moments.num_tokens,
        context_length=moments.context_length,
        fingerprint=moments.fingerprint,
        record={"center": center, "ridge": ridge},
    )


def _solve_qk(
    moments: Moments, layer: int, kind: QKKind, center: bool, ridge: float
) -> dict[str, np.ndarray]:
    C_Q, C_K = moments.second("q", layer), moments.second("k", layer)
    extra: dict[str, np.ndarray] = {}
    if kind == "pairs":
        extra["pairs"] = pairs(C_Q, C_K)
        A_K = pair_map(extra["pairs"])
    else:
        if center:
            C_K = moments.covariance("k", layer)
            extra["key_mean"] = moments.mean("k", layer)
        match kind:
            case "stacked":
                A_K = stacked(moments.group_size * C_Q, C_K)
            case "keys":
                A_K = keys(C_K)
            case _:
                A_K = balanced(C_Q, C_K, ridge)
    A_Q = np.linalg.inv(A_K).swapaxes(-1, -2)
    extra |= {"k_map": A_K, "q_rms": _rms(C_Q, A_Q), "k_rms": _rms(C_K, A_K)}
    return extra | _measures("qk", C_Q, C_K, A_K, scale=1 / C_Q.shape[-1])


def _solve_vo(
    moments: Moments, layer: int, W_O: np.ndarray, kind: VOKind, center: bool, ridge: float
) -> dict[str, np.ndarray]:
    M = _group_moment(W_O, moments.group_size, layer)
    source: Quantity = "o" if kind == "output" else "v"
    extra: dict[str, np.ndarray] = {}
    C_V = moments.second(source, layer)
    seen = moments.second("v", layer)
    if center:
        C_V = moments.covariance(source, layer)
        shift, mean = moments.mean(source, layer), moments.mean("v", layer)
        extra["value_mean"] = shift
        seen = moments.covariance("v", layer) + (mean - shift)[:, :, None] * (mean - shift)[:, None, :]
    C = stacked(M / moments.num_tokens, C_V) if kind == "stacked" else balanced(M, C_V, ridge)
    return extra | {"v_map": C, "v_rms": _rms(seen, C)} | _measures("vo", M, C_V, C, scale=1.0)


def _rms(second: Matrices, A: Matrices) -> Float64[np.ndarray, "*K H"]:
    """Root mean square of each coordinate of x A, where `second` is the mean of xᵀx."""
    return np.sqrt(np.einsum("...HR,...HI,...IR->...R", A, second, A, optimize=True).clip(0))


def _group_moment(W_O: np.ndarray, group_size: int, layer: int) -> Matrices:
    """M = Σ_n W_O,n W_O,nᵀ over each group, float64 [K, H, H]."""
    N, H, D = W_O.shape
    grouped = np.asarray(W_O, np.float64).reshape(-1, group_size, H, D).swapaxes(1, 2)
    rows = grouped.reshape(N // group_size, H, group_size * D)
    _check_finite("W_O", rows[None], layer)
    return rows @ rows.swapaxes(-1, -2)


def _measures(
    side: str, C_Q: Matrices, C_K: Matrices, A_K: Matrices, *, scale: float
) -> dict[str, np.ndarray]:
    A_Q = np.linalg.inv(A_K).swapaxes(-1, -2)
    drops = -np.diff(residual(C_Q, C_K, A_Q, A_K), axis=-1)
    return {
        f"{side}_spectrum": np.sqrt(scale * np.maximum(drops, 0)),
        f"{side}_error": certificate(C_Q, C_K, A_Q, A_K),
        f"{side}_condition": np.linalg.cond(A_K),
    }


def _check_inputs(moments: Moments, output_weights: Sequence[np.ndarray], qk: QKKind, vo: VOKind) -> None:
    for name, kind, kinds in (("qk", qk, get_args(QKKind)), ("vo", vo, get_args(VOKind))):
        if kind not in kinds:
            raise CalibrationError(f"{name}={kind!r} must be one of {kinds}")
    if moments.num_tokens <= 0:
        raise CalibrationError(f"the moments are of num_tokens={moments.num_tokens}; give some text")
    for quantity in QUANTITIES:
        for name in (quantity, f"{quantity}_sum"):
            _check_finite(f"moments of {name}", getattr(moments, name))
    if moments.k_before is not None:
        _check_finite("moments of k_before", moments.k_before)
    L, K, H = moments.k.shape[:3]
    if len(output_weights) != L:
        raise CalibrationError(f"{len(output_weights)} output weights for moments of {L} layers")
    for layer, W_O in enumerate(output_weights):
        if W_O.shape[:-1] != (K * moments.group_size, H):
            raise CalibrationError(
                f"layer {layer}: W_O {W_O.shape} is not [{K * moments.group_size}, {H}, D]"
            )


def _check_finite(what: str, values: np.ndarray, first_layer: int = 0) -> None:
    """Names the first layer and KV head of `values` [L, K, ...] that is not finite."""
    bad = ~np.isfinite(values).reshape(*values.shape[:2], -1).all(-1)
    if bad.any():
        layer, head = np.argwhere(bad)[0]
        raise CalibrationError(
            f"layer {first_layer + layer}, KV head {head}: {what} not finite in every element"
        )
