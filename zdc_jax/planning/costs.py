"""Predicted seconds of attention on one H200: a few constants fitted to measured kernels (ours).

Prefill costs so much for each pair of a query and a key it may see, more by R and Z; pairs near each other,
so much again; without far attention near pairs are all there is, at a price of their own. A decode step costs
a launch, a second pass where there is a ring beside far keys, and the bytes it reads. Projections,
feed-forward and the rotary epilogue are left out, and so are launches of prefill, which do not show at the
measured lengths. Ranks that were not measured (below 32) follow the same lines. So do layers of two token
classes that have a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zdc_jax.plan import CompressionPlan, LayerRanks

ITEMSIZE = 2
"""Bytes of an element of the measured caches, bfloat16."""
BATCH = 16
"""Rows that `request_seconds` takes to run together."""
GENERATED = 1 / 8
"""Tokens that `request_seconds` generates, for each token of the prompt."""

Parts = Sequence[tuple[float, LayerRanks]]
"""Shares of a layer's tokens, 1 together, and the ranks they keep."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention for `batch` rows of `tokens` tokens each: N, K and H, window and sinks in tokens.

    Prefill computes all of the tokens, causally; a decode step one more on a cache of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens: int
    batch: int = 1
    window: int = 0
    sinks: int = 0

    def prefill_terms(self, ranks: LayerRanks) -> np.ndarray:
        """What prefill is charged for [5]: far pairs, these times R and Z, near pairs beside them, alone."""
        rows, T = self.batch * self.num_heads, self.tokens
        near = min(self.window + self.sinks, T)
        far_pairs = rows * T * (T + 1) / 2 * (ranks.qk > 0)
        near_pairs = rows * (T * near - near * (near - 1) / 2) * self._has_near(ranks)
        beside, alone = (near_pairs, 0) if ranks.qk else (0, near_pairs)
        return np.array([far_pairs, far_pairs * ranks.qk, far_pairs * ranks.v, beside, alone])

    def decode_terms(self, ranks: LayerRanks) -> np.ndarray:
        """What a decode step is charged for [3]: launch, a ring beside far keys, bytes of keys and values."""
        kept, ring = ranks.qk + ranks.v, 0
        if self._has_near(ranks):
            ring = min(self.window + self.sinks, self.tokens)
        coordinates = self.tokens * kept + ring * (2 * self.head_dim - kept)
        nbytes = self.batch * self.num_kv_heads * coordinates * ITEMSIZE
        return np.array([1, ring > 0 and kept > 0, nbytes])

    def _has_near(self, ranks: LayerRanks) -> bool:
        """A layer that keeps everything has nothing to keep apart."""
        return self.window + self.sinks > 0 and ranks != LayerRanks(self.head_dim, self.head_dim)


@dataclass(frozen=True)
class KernelCosts:
    """Seconds: of a far pair (`pair`), more for each coordinate of Q/K and of V, of a near pair beside far
    ones and where there are none; of a decode step's launch, of its pass over a ring, of a byte. `classes`:
    factor on prefill with two token classes.
    """

    pair: float
    pair_qk: float
    pair_v: float
    near_pair: float
    near_alone: float
    launch: float
    ring: float
    byte: float
    classes: float

    def prefill(self, call: AttentionCall, parts: Parts) -> float:
        """Seconds of prefill in one layer whose tokens keep these ranks."""
        terms = sum(share * call.prefill_terms(ranks) for share, ranks in parts)
        prices = self.pair, self.pair_qk, self.pair_v, self.near_pair, self.near_alone
        seconds = float(terms @ np.array(prices))
        return seconds * (self.classes if len(parts) > 1 else 1)

    def decode(self, call: AttentionCall, parts: Parts) -> float:
        """Seconds of one decode step in one layer whose tokens keep these ranks."""
        terms = sum(share * call.decode_terms(ranks) for share, ranks in parts)
        return float(terms @ np.array([self.launch, self.ring, self.byte]))


def layer_parts(plan: CompressionPlan, layer: int) -> Parts:
    """Ranks of a layer's tokens, by share; important ones first where there are two classes."""
    if plan.classes is None or not plan.has_classes(layer):
        return [(1.0, plan.layers[layer])]
    share = plan.classes.fraction[plan.classes.group_of(layer)]
    return [(share, plan.classes.important[layer]), (1 - share, plan.layers[layer])]


H200 = KernelCosts(
    pair=2.357e-13,
    pair_qk=1.574e-15,
    pair_v=1.684e-15,
    near_pair=1.129e-12,
    near_alone=1.329e-12,
    launch=1.298e-05,
    ring=1.052e-05,
    byte=2.222e-13,
    classes=1.167,
)
"""Fitted by `benchmarks/fit_costs.py` to `benchmarks/results/kernels-h200.json` (32 query heads, H = 128,
4096 to 131072 tokens), within 6 % of every row but decode over two token classes (8 % too low); `classes`
rests on one row, `near_pair` on two."""


def request_seconds(plan: CompressionPlan, num_heads: int, tokens: int) -> float:
    """Attention of all layers for `BATCH` prompts of `tokens` tokens and the tokens generated for them.

    Generated tokens are an eighth of the prompt's; each is priced on the prompt's cache.
    """
    seconds = 0.0
    for layer in range(len(plan.layers)):
        sinks, window = plan.near(layer)
        call = AttentionCall(num_heads, plan.num_kv_heads, plan.head_dim, tokens, BATCH, window, sinks)
        parts = layer_parts(plan, layer)
        seconds += H200.prefill(call, parts) + GENERATED * tokens * H200.decode(call, parts)
    return seconds
