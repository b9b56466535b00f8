"""Which KV heads retrieve, measured without labels (ours, in the place of DuoAttention's trained gates).

Random tokens come twice. A head that retrieves finds, at each token of the second time, what followed it the
first time (induction; Olsson et al. 2022). Nothing but far tokens says that, and no text is needed.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.axes import Array
from zdc_jax.errors import PlanError
from zdc_jax.model.observe import Seen, observe
from zdc_jax.model.transformer import Transformer


def retrieving_heads(
    network: Transformer, share: float, *, length: int = 256, sequences: int = 4, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The KV heads of each layer that retrieve, as the settings of the method `duo` take them.

    Args:
      network: unmodified, or only rotated.
      share: of all KV heads of all layers, those that score best, in (0, 1]; layers that slide have none.
      length: tokens that are repeated. sequences: of them, over which scores are means. seed: draws them.

    Raises:
      PlanError: a share outside (0, 1], or twice the length exceeds the model's positions.
    """
    if not 0 < share <= 1:
        raise PlanError(f"share={share} must lie in (0, 1], of the KV heads")
    scores = induction_scores(network, length=length, sequences=sequences, seed=seed)
    return best_heads(scores, share, slides=[spec.window is not None for spec in network.config.layers])


def induction_scores(
    network: Transformer, *, length: int = 256, sequences: int = 4, seed: int = 0
) -> Float[np.ndarray, "L K"]:
    """How strongly each KV head looks to what followed a token's first occurrence; as `retrieving_heads`."""
    config = network.config
    if not 2 <= length <= config.max_positions // 2:
        raise PlanError(
            f"length={length} must be 2 to {config.max_positions // 2} tokens, half the model's positions"
        )
    once = np.random.default_rng(seed).integers(config.vocab_size, size=(sequences, length), dtype=np.int32)
    return np.stack(jax.device_get(observe(network, jnp.asarray(np.tile(once, 2)), induction)))


def induction(seen: Seen) -> Float[Array, " K"]:
    """Mean attention probability, from tokens of the second half of sequences, of what followed the first.

    Of T tokens, T/2 and a repetition, t ≥ T/2 looks to t - T/2 + 1; over rows, tokens and the query group.
    """
    B, T, K, H = seen.k.shape
    half = T // 2
    q = seen.q[:, half:].reshape(B, half, K, -1, H).astype(jnp.float32)
    k = seen.k[:, 1 : half + 1].astype(jnp.float32)
    scores = seen.attention.scale * jnp.einsum("BTKGH,BTKH->BKGT", q, k)
    lse = seen.lse[:, :, half:].reshape(B, K, -1, half)
    return jnp.exp(scores - lse).mean((0, 2, 3))


def best_heads(
    scores: Float[np.ndarray, "L K"], share: float, slides: list[bool]
) -> tuple[tuple[int, ...], ...]:
    """The heads of each layer that are among the best `share` of all L·K, none of layers that slide.

    Of equal scores the first.
    """
    K = scores.shape[1]
    order = np.argsort(-scores, axis=None, kind="stable").tolist()
    seeing = [head for head in order if not slides[head // K]]
    best = seeing[: round(share * scores.size)]
    return tuple(
        tuple(sorted(head % K for head in best if head // K == layer)) for layer in range(len(scores))
    )
