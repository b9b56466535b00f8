"""Bases of Q/K and V/O from moments, ordered by how much each coordinate matters (ZDC §4.3, and ours).

All arrays are float64 stacks over heads, [*K, H, H]. C_X denotes the second moments of X. The same theory
serves both pairs of matrices:

- Scores are q kᵀ. Keeping r coordinates leaves the error q E kᵀ with E = I − A_Q,r A_K,rᵀ. Its mean square
  over independent q and k is tr(C_Q E C_K Eᵀ).
- A value contributes v W_O,n to the output. Keeping r coordinates leaves the error v Eᵀ W_O,n. Its mean
  square, summed over a group's heads, is tr(M E C_V Eᵀ) with M = Σ_n W_O,n W_O,nᵀ.

So for values, C_V replaces C_K, M replaces C_Q, C replaces A_K and C⁻ᵀ replaces A_Q.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
from jaxtyping import Float64, Int32
from threadpoolctl import threadpool_limits

from convert.calibration.moments import QUANTITIES, Moments
from zdc_jax.basis import Basis, QKKind, VOKind
from zdc_jax.errors import CalibrationError

logger = logging.getLogger("zdc_jax")

Matrices = Float64[np.ndarray, "*K H H"]

DEFAULT_RIDGE = 1e-6
"""Floor of eigenvalues in `solve_balanced`, relative to their mean."""
WORTH_SHIFTING = 0.9
"""Noise of scores with the shift over that without it, below which a layer's keys leave out their mean."""


def solve_stacked(C_Q: Matrices, C_K: Matrices) -> Matrices:
    """Return A_K = A_Q, the right singular vectors of the stacked rows [Q; K] by falling energy (ZDC §4.3).

    The two moments must be sums over the stacked rows, up to one common factor. Their ratio is the weight of
    Q's rows, of all G heads, against K's rows.
    """
    return np.linalg.eigh(C_Q + C_K).eigenvectors[..., ::-1]


def solve_components(C: Matrices) -> Matrices:
    """Return the orthogonal principal components of C by falling energy.

    Loki selects tokens by those of keys, where queries play no part (Singhania et al. 2024). OSCAR rotates
    keys by those of queries, and values by those of values weighted by their scores (Zhou et al. 2026).
    """
    return np.linalg.eigh(C).eigenvectors[..., ::-1]


def solve_balanced(C_Q: Matrices, C_K: Matrices, ridge: float = DEFAULT_RIDGE) -> Matrices:
    """Return the A_K whose every prefix is the best approximation of its rank (ours, after KQ-SVD).

    With C_Q^½ C_K^½ = U Σ Wᵀ, A_K = C_K^-½ W Σ^½, and its inverse transpose is A_Q = C_Q^-½ U Σ^½. Both q'
    and k' then have the second moments Σ. Eigenvalues of the moments below `ridge` times their mean are
    raised to it, so that moments of deficient rank work. Well-conditioned moments stay unchanged.
    """
    values_q, vectors_q = _floored_eigh(C_Q, ridge)
    values_k, vectors_k = _floored_eigh(C_K, ridge)
    # F = √λ Xᵀ serves as a root of C = X λ Xᵀ like the symmetric root, and is cheap to invert.
    root_q = np.sqrt(values_q)[..., None] * vectors_q.swapaxes(-1, -2)
    root_k = np.sqrt(values_k)[..., None] * vectors_k.swapaxes(-1, -2)
    _, sigma, W = np.linalg.svd(root_q @ root_k.swapaxes(-1, -2))
    inverse_root_k = vectors_k / np.sqrt(values_k)[..., None, :]
    return inverse_root_k @ W.swapaxes(-1, -2) * np.sqrt(sigma)[..., None, :]


def _floored_eigh(C: Matrices, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(C)
    mean = values.mean(-1, keepdims=True)
    # A head of zeros has no preferred directions, so any positive floor works.
    return np.maximum(values, np.where(mean > 0, ridge * mean, 1.0)), vectors


def order_pairs(C_Q: Matrices, C_K: Matrices) -> Int32[np.ndarray, "*K h"]:
    """Return the rotary pairs (p, p + H/2) by falling energy (ours).

    A pair's energy is the mean square of its part of the score: tr(C_Q[p, p] C_K[p, p]) of the 2×2 blocks.

    Raises:
      CalibrationError: H is odd.
    """
    H = C_Q.shape[-1]
    if H % 2:
        raise CalibrationError(
            f"qk='pairs': needs an even head dimension, this model has {H}; use 'balanced'"
        )
    blocks = (C_Q * C_K).reshape(*C_Q.shape[:-2], 2, H // 2, 2, H // 2)
    energy = np.einsum("...apbp->...p", blocks)
    return np.argsort(-energy, axis=-1, kind="stable").astype(np.int32)


def make_pair_map(order: Int32[np.ndarray, "*K h"]) -> Matrices:
    """Return A_K = A_Q, the permutation from half-split dimensions to interleaved pairs in this order."""
    half = order.shape[-1]
    columns = np.stack([order, order + half], axis=-1).reshape(*order.shape[:-1], 2 * half)
    return np.eye(2 * half)[columns].swapaxes(-1, -2)


def compute_residual(
    C_Q: Matrices, C_K: Matrices, A_Q: Matrices, A_K: Matrices
) -> Float64[np.ndarray, "*K H+1"]:
    """Compute tr(C_Q E C_K Eᵀ) for every number r = 0…H of coordinates kept.

    As A_Q A_Kᵀ = I, E consists of the dropped columns alone. The trace is the sum over dropped i, j of
    (A_Qᵀ C_Q A_Q)_ij (A_Kᵀ C_K A_K)_ij, which does not cancel however small it gets.
    """
    energy = (A_Q.swapaxes(-1, -2) @ C_Q @ A_Q) * (A_K.swapaxes(-1, -2) @ C_K @ A_K)
    trailing = energy[..., ::-1, ::-1].cumsum(-1).cumsum(-2)
    sums = np.diagonal(trailing, axis1=-2, axis2=-1)[..., ::-1]
    return np.concatenate([np.maximum(sums, 0), np.zeros_like(sums[..., :1])], axis=-1)


def compute_certificate(
    C_Q: Matrices, C_K: Matrices, A_Q: Matrices, A_K: Matrices
) -> Float64[np.ndarray, "*K H+1"]:
    """Compute the relative score error sqrt(tr(C_Q E C_K Eᵀ)/tr(C_Q C_K)) for r = 0…H coordinates (ours).

    Where all scores are zero, so is the error.
    """
    squares = compute_residual(C_Q, C_K, A_Q, A_K)
    total = squares[..., :1]
    return np.sqrt(np.divide(squares, total, out=np.zeros_like(squares), where=total > 0))


def make_basis(
    moments: Moments,
    output_weights: Sequence[np.ndarray],
    *,
    qk: QKKind = "balanced",
    vo: VOKind = "balanced",
    center: bool = False,
    shiftable: Sequence[bool] = (),
) -> Basis:
    """Make the basis of a whole model.

    Args:
      moments: moments of the model's q, k, v and o.
      output_weights: W_O [N, H, D] of every layer, any float dtype.
      qk: `stacked`, `balanced`, `keys`, `pairs` or `oscar`, the components of queries.
      vo: `stacked` (rows of V and columns of W_O), `balanced`, `output` or `oscar`, the components of values
        weighted by scores. `output` is balanced with O's moments instead of V's: exact for the heads'
        outputs when G = 1, pooled over a group otherwise.
      center: subtract the mean of values first, weighted by the attention to older tokens (for `output`, O's
        mean). Without `Moments.v_far`, it is the plain mean, and a warning is logged.
      shiftable: layers whose keys may leave out their mean (`zdc_jax.ops.shift`). They do if that lowers
        `predict_noise` below `WORTH_SHIFTING`; not for `pairs`, and not without `Moments.k_rest`.

    Raises:
      CalibrationError: no tokens; moments or weights that are not finite, with layer and KV head; weights
        whose shapes differ from the moments'; an unknown kind; `pairs` with an odd H; or `vo="oscar"` with
        `center`, or without `Moments.v_scored`.
    """
    _check_inputs(moments, output_weights, qk, vo)
    if vo == "oscar":
        _check_scored(moments, center)
    if center and vo != "output" and moments.v_far is None:
        logger.warning(
            "center=True: the moments do not know the attention to older tokens, so the plain mean of values "
            "is subtracted; `zdc calibrate MODEL TEXT --center --overwrite` weighs it"
        )

    can_shift = len(shiftable) > 0 and moments.k_rest is not None and qk != "pairs"

    def solve_shift(layer: int, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the shift, and the side of q and k without the mean of keys if it is worth it."""
        assert moments.k_rest is not None
        assert moments.key_shift is not None
        shifted = _solve_qk(moments, layer, qk, moments.k_rest[layer] / moments.num_tokens)
        noise = [predict_noise(side["q_rms"], side["k_rms"]).sum() for side in (whole, shifted)]
        worth = shiftable[layer] and bool(noise[1] < WORTH_SHIFTING * noise[0])
        own = {"key_shift": moments.key_shift[layer], "shifted": np.array(worth)}
        return own | (shifted if worth else {})

    def solve(layer: int) -> dict[str, np.ndarray]:
        latent = {} if moments.k_before is None else {"k_latent": solve_components(moments.k_before[layer])}
        qk_side = _solve_qk(moments, layer, qk)
        if can_shift:
            qk_side |= solve_shift(layer, qk_side)
        return qk_side | _solve_vo(moments, layer, output_weights[layer], vo, center) | latent

    # Matrices are too small for BLAS's own threads, so layers run in parallel with one thread each.
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        layers = list(pool.map(solve, range(len(output_weights))))
    arrays: dict[str, Any] = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    shifted = arrays.pop("shifted", np.zeros(0, bool)).tolist()
    return Basis(
        **arrays,
        shifted=shifted,
        qk_kind=qk,
        vo_kind=vo,
        num_tokens=moments.num_tokens,
        context_length=moments.context_length,
        fingerprint=moments.fingerprint,
        record={"center": center, "ridge": DEFAULT_RIDGE},
    )


def _solve_qk(
    moments: Moments, layer: int, kind: QKKind, C_K: Matrices | None = None
) -> dict[str, np.ndarray]:
    """Solve the side of q and k of one layer; `C_K` replaces the second moments of its keys."""
    C_Q = moments.second("q", layer)
    C_K = moments.second("k", layer) if C_K is None else C_K
    extra: dict[str, np.ndarray] = {}
    match kind:
        case "pairs":
            extra["pairs"] = order_pairs(C_Q, C_K)
            A_K = make_pair_map(extra["pairs"])
        case "stacked":
            A_K = solve_stacked(moments.group_size * C_Q, C_K)
        case "keys":
            A_K = solve_components(C_K)
        case "oscar":
            A_K = solve_components(C_Q)
        case _:
            A_K = solve_balanced(C_Q, C_K)
    A_Q = np.linalg.inv(A_K).swapaxes(-1, -2)
    extra |= {"k_map": A_K, "q_rms": _rms(C_Q, A_Q), "k_rms": _rms(C_K, A_K)}
    return extra | _measures("qk", C_Q, C_K, A_K, scale=1 / C_Q.shape[-1])


def predict_noise(
    q_rms: Float64[np.ndarray, "*K H"], k_rms: Float64[np.ndarray, "*K H"]
) -> Float64[np.ndarray, "*K"]:
    """Predict the variance of scaled scores if the noise of keys equals their signal (ours).

    Codes rotate the coordinates, which spreads the noise evenly. Codes of b bits have about 4⁻ᵇ of this
    variance.
    """
    return (q_rms**2).sum(-1) * (k_rms**2).mean(-1) / q_rms.shape[-1]


def _solve_vo(
    moments: Moments, layer: int, W_O: np.ndarray, kind: VOKind, center: bool
) -> dict[str, np.ndarray]:
    M = _group_moment(W_O, moments.group_size, layer)
    extra: dict[str, np.ndarray] = {}
    seen = moments.second("v", layer)
    C_V = moments.second("o", layer) if kind == "output" else seen
    if center:
        shift = moments.mean("o", layer) if kind == "output" else moments.far_mean(layer)
        rest = moments.mean("v", layer) - shift
        seen = moments.covariance("v", layer) + rest[:, :, None] * rest[:, None, :]
        C_V = moments.covariance("o", layer) if kind == "output" else seen
        extra["value_mean"] = shift
    match kind:
        case "stacked":
            C = solve_stacked(M / moments.num_tokens, C_V)
        case "oscar":
            assert moments.v_scored is not None  # `_check_scored` refuses moments without it.
            C = solve_components(moments.v_scored[layer])
        case _:
            C = solve_balanced(M, C_V)
    return extra | {"v_map": C, "v_rms": _rms(seen, C)} | _measures("vo", M, C_V, C, scale=1.0)


def _rms(second: Matrices, A: Matrices) -> Float64[np.ndarray, "*K H"]:
    """Compute the root mean square of each coordinate of x A, where `second` is the mean of xᵀx."""
    return np.sqrt(np.einsum("...HR,...HI,...IR->...R", A, second, A, optimize=True).clip(0))


def _group_moment(W_O: np.ndarray, group_size: int, layer: int) -> Matrices:
    """Compute M = Σ_n W_O,n W_O,nᵀ over each group, float64 [K, H, H]."""
    N, H, D = W_O.shape
    grouped = np.asarray(W_O, np.float64).reshape(-1, group_size, H, D).swapaxes(1, 2)
    rows = grouped.reshape(N // group_size, H, group_size * D)
    _check_finite("W_O", rows[None], layer)
    return rows @ rows.swapaxes(-1, -2)


def _measures(
    side: str, C_Q: Matrices, C_K: Matrices, A_K: Matrices, *, scale: float
) -> dict[str, np.ndarray]:
    A_Q = np.linalg.inv(A_K).swapaxes(-1, -2)
    drops = -np.diff(compute_residual(C_Q, C_K, A_Q, A_K), axis=-1)
    return {
        f"{side}_spectrum": np.sqrt(scale * np.maximum(drops, 0)),
        f"{side}_error": compute_certificate(C_Q, C_K, A_Q, A_K),
        f"{side}_condition": np.linalg.cond(A_K),
    }


def _check_inputs(moments: Moments, output_weights: Sequence[np.ndarray], qk: QKKind, vo: VOKind) -> None:
    for name, kind, kinds in (("qk", qk, get_args(QKKind)), ("vo", vo, get_args(VOKind))):
        if kind not in kinds:
            raise CalibrationError(f"{name}={kind!r}: must be one of {kinds}")
    if moments.num_tokens <= 0:
        raise CalibrationError(f"the moments cover num_tokens={moments.num_tokens}; calibrate on some text")
    required = [name for quantity in QUANTITIES for name in (quantity, f"{quantity}_sum")]
    for name in (*required, "k_before", "k_rest", "v_scored", "v_far"):
        if (values := getattr(moments, name)) is not None:
            _check_finite(f"moments of {name}", values)
    L, K, H = moments.k.shape[:3]
    if len(output_weights) != L:
        raise CalibrationError(f"{len(output_weights)} output weights, but moments of {L} layers")
    for layer, W_O in enumerate(output_weights):
        if W_O.shape[:-1] != (K * moments.group_size, H):
            raise CalibrationError(
                f"layer {layer}: W_O has shape {W_O.shape}, must be [{K * moments.group_size}, {H}, D]"
            )


def _check_scored(moments: Moments, center: bool) -> None:
    """Raise `CalibrationError` if the moments have no basis `vo="oscar"`."""
    if center:
        raise CalibrationError("center=True: is not supported with vo='oscar', whose values keep their mean")
    if moments.v_scored is None:
        raise CalibrationError(
            "vo='oscar': the moments have no values weighted by scores (K-means, or an older release); "
            "run `zdc calibrate MODEL TEXT --overwrite`"
        )


def _check_finite(name: str, values: np.ndarray, first_layer: int = 0) -> None:
    """Raise `CalibrationError` for the first layer and head of `values` [L, K, ...] that is not finite."""
    bad = ~np.isfinite(values).reshape(*values.shape[:2], -1).all(-1)
    if bad.any():
        layer, head = np.argwhere(bad)[0]
        raise CalibrationError(f"layer {first_layer + layer}, KV head {head}: {name} must be finite")
