"""Predicted time of attention on one H200, from a few constants fitted to measured kernels.

In layers that store older tokens, prefill pays for every pair of a query and a visible key. The price of such
a pair increases linearly with R and Z. Near pairs (a query and a recent key) cost an additional amount. In
the other layers there are only near pairs, which have a price of their own.

A decode step pays for a launch and for the bytes that it reads. If it reads a ring of recent tokens in
addition to older tokens, it also pays for a second pass.

The prediction leaves out projections, MLP and the rotary epilogue. It also leaves out the launches of
prefill, which are negligible at the measured lengths. It extrapolates to ranks below 32, which were not
measured. Not part of the ZDC paper.
"""

from dataclasses import dataclass

import numpy as np

from zdc_jax.plan import CompressionPlan, LayerRanks

ITEMSIZE = 2
"""Bytes per element of the measured caches (bfloat16)."""
BATCH = 16
"""Batch size that `request_seconds` assumes."""
GENERATED = 1 / 8
"""Generated tokens per prompt token that `request_seconds` assumes."""


@dataclass(frozen=True)
class AttentionCall:
    """Shape of the attention of one layer.

    Attributes:
      num_heads: number of query heads (N).
      num_kv_heads: number of KV heads (K).
      head_dim: width of a head (H).
      tokens: tokens per sequence. Prefill computes all of them; a decode step computes one more token.
      batch: number of sequences.
      window: window in tokens.
      sinks: sinks in tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens: int
    batch: int = 1
    window: int = 0
    sinks: int = 0

    def prefill_terms(self, ranks: LayerRanks) -> np.ndarray:
        """Return the counts that prefill pays for, in the order of the first five fields of `KernelCosts`."""
        heads, T = self.batch * self.num_heads, self.tokens
        near = min(self.window + self.sinks, T)
        pairs = heads * T * (T + 1) / 2 * (ranks.qk > 0)
        near_pairs = heads * (T * near - near * (near - 1) / 2) * self._has_ring(ranks)
        with_far, alone = (near_pairs, 0) if ranks.qk else (0, near_pairs)
        return np.array([pairs, pairs * ranks.qk, pairs * ranks.v, with_far, alone])

    def decode_terms(self, ranks: LayerRanks) -> np.ndarray:
        """Return the counts that a decode step pays for: launches, second passes over a ring, and bytes."""
        stored, ring = ranks.qk + ranks.v, 0
        if self._has_ring(ranks):
            ring = min(self.window + self.sinks, self.tokens)
        coordinates = self.tokens * stored + ring * (2 * self.head_dim - stored)
        nbytes = self.batch * self.num_kv_heads * coordinates * ITEMSIZE
        return np.array([1, ring > 0 and stored > 0, nbytes])

    def _has_ring(self, ranks: LayerRanks) -> bool:
        """Return whether recent tokens are stored in a ring. A layer at full rank has no ring."""
        return self.window + self.sinks > 0 and ranks != LayerRanks(self.head_dim, self.head_dim)


@dataclass(frozen=True)
class KernelCosts:
    """Prices of attention in seconds.

    Attributes:
      pair: pair of a query and a visible key in a layer that stores older tokens.
      pair_qk: addition to `pair` for each coordinate of q and k.
      pair_v: addition to `pair` for each coordinate of v.
      near_pair: addition to `pair` for a recent key.
      near_alone: pair in a layer that stores no older tokens.
      launch: launch of a decode step.
      ring: second pass of a decode step, over a ring of recent tokens.
      byte: byte that a decode step reads.
    """

    pair: float
    pair_qk: float
    pair_v: float
    near_pair: float
    near_alone: float
    launch: float
    ring: float
    byte: float

    def prefill(self, call: AttentionCall, ranks: LayerRanks) -> float:
        """Return the seconds of prefill in one layer."""
        prices = self.pair, self.pair_qk, self.pair_v, self.near_pair, self.near_alone
        return float(call.prefill_terms(ranks) @ np.array(prices))

    def decode(self, call: AttentionCall, ranks: LayerRanks) -> float:
        """Return the seconds of one decode step in one layer."""
        return float(call.decode_terms(ranks) @ np.array([self.launch, self.ring, self.byte]))


H200 = KernelCosts(
    pair=2.357e-13,
    pair_qk=1.574e-15,
    pair_v=1.684e-15,
    near_pair=1.129e-12,
    near_alone=1.329e-12,
    launch=1.298e-05,
    ring=1.052e-05,
    byte=2.222e-13,
)
"""Prices on one H200, fitted by `benchmarks/studies/fit_costs.py` to `benchmarks/results/kernels-h200.json`.

The fit covers 32 query heads of width 128. It is within 6 % of all measurements. `near_pair` relies on two.
"""


def request_seconds(plan: CompressionPlan, num_heads: int, tokens: int) -> float:
    """Return the seconds of attention in all layers for `BATCH` prompts and their answers.

    An answer has `GENERATED` times as many tokens as the prompt. Each decode step is priced with the cache of
    the prompt alone.

    Args:
      plan: plan to price.
      num_heads: number of query heads of the model.
      tokens: tokens per prompt.
    """
    seconds = 0.0
    for layer, ranks in enumerate(plan.layers):
        sinks, window = plan.near(layer)
        call = AttentionCall(
            num_heads=num_heads,
            num_kv_heads=plan.num_kv_heads,
            head_dim=plan.head_dim,
            tokens=tokens,
            batch=BATCH,
            window=window,
            sinks=sinks,
        )
        seconds += H200.prefill(call, ranks) + GENERATED * tokens * H200.decode(call, ranks)
    return seconds
