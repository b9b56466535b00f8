"""Trial books that measure plans of `coded` by a formula, and a search's best results by hand."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
from conftest import CONFIGS

from convert.search.coded_search import CHOICES, CodedBooks
from convert.search.trials import Trial
from zdc_jax import CompressionPlan
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import LayerRanks
from zdc_jax.planning.profile import WINDOWS, Profile

LAYERS, H, TOKENS = 3, 64, 4096
KEYS = (
    (64, 2, 0),
    (48, 2, 4),
    (48, 2, 5),
    (64, 2, 4),
    (64, 2, 5),
    (64, 2, 6),
    (64, 3, 5),
    (64, 3, 6),
    (64, 4, 6),
    (64, 6, 8),
    (64, 8, 0),
)
VALUES = (2, 3, 4, 8)
DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 6.44e-4, 8: 4.15e-5}
"""Mean square errors of a unit Gaussian with the best levels (Max 1960; Jayant and Noll 1984)."""
CHOICE_COSTS = (0.001, 0.02, 0.1, 0.2, 0.5, 1.5)
EVERY = [(k, v) for k in KEYS for v in VALUES]


def token_bytes(keys: tuple[int, int, int], values: int) -> float:
    """Count the bytes of a far token and head by hand: levels, scales of one byte, one more for an index."""
    rank, bits, first = keys
    return (16 * (first or bits) + (rank - 16) * bits + 64 * values) / 8 + (3 if first else 2)


def error(rank: int, bits: int, first: int, index: int, k: np.ndarray, q: np.ndarray) -> float:
    """Compute the error of scores, coordinate by coordinate.

    The rotation of a part spreads its mean error over all of its coordinates.
    """
    coded = sum(
        DISTORTION[b] * np.mean(k[:, start:end] ** 2, 1) @ np.sum(q[:, start:end] ** 2, 1)
        for start, end, b in ((0, index, first), (index, rank, bits))
        if end > start
    )
    return float(coded + np.sum((k[:, rank:] * q[:, rank:]) ** 2))


class FakeBook:
    """A trial book that measures by a formula.

    Costs of precisions and choices add up over layers; windows cost nothing. More bits cost less in
    proportion to their error.
    """

    windows = np.zeros((1, TOKENS), np.int32)

    def __init__(self, seed: int, layers=CONFIGS["llama"].layers[:1] * LAYERS):
        rng = np.random.default_rng(seed)
        self.config = replace(CONFIGS["llama"], layers=layers, head_dim=H)

        def falling():
            return -np.sort(-rng.lognormal(0, 0.5, (len(layers), self.config.num_kv_heads, H)))

        k, q = falling(), falling()
        self.basis = SimpleNamespace(k_map=np.zeros((*k.shape, H)), k_rms=k, q_rms=q)
        self.scale = rng.lognormal(0, 1, len(layers))
        self.most = rng.uniform(0.2, 1, (2, len(layers)))
        # Calibration's costs differ from measured costs.
        far, none = 2.5 * self.scale * rng.lognormal(0, 0.3, len(layers)), np.zeros((len(layers), 0))
        write, windows = np.ones((len(layers), len(WINDOWS))), np.array(WINDOWS)
        self.profile = Profile(far, write, none, none, windows, np.array([]), "made-up")
        self.measured = 0

    def cost(self, layer, ranks):
        """Return the cost of a layer in nats."""
        if ranks.qk == 0:
            return 0.0 if ranks.window else 2.5 * self.scale[layer]
        codes = ranks.settings
        of = partial(error, k=self.basis.k_rms[layer], q=self.basis.q_rms[layer])
        least = of(H, 8, 0, 0)
        keys = (of(ranks.qk, codes.bits_k, codes.bits_index, codes.index) - least) / of(H, 2, 0, 0)
        values = (DISTORTION[codes.bits_v] - DISTORTION[8]) / DISTORTION[2]
        cost = self.most[:, layer] @ (keys, values)
        if codes.read:
            assert codes.bits_index >= 4
            found = next(
                i
                for i, choice in enumerate(CHOICES)
                if choice.read == codes.read and choice.index <= codes.index
            )
            cost += CHOICE_COSTS[found]
        return self.scale[layer] * cost

    def share(self, plan):
        return plan.bytes(TOKENS) / CompressionPlan.full(self.config).bytes(TOKENS)

    def read_share(self, plan):
        return plan.bytes_read(TOKENS) / CompressionPlan.full(self.config).bytes_read(TOKENS)

    def measure(self, plan):
        self.measured += 1
        nats = sum(self.cost(layer, ranks) for layer, ranks in enumerate(plan.layers))
        shares = self.share(plan), self.read_share(plan)
        return Trial(plan, shares[0], float(np.expm1(nats)), (0.0, 0.0), {}, shares[1], kl=nats)

    def bind(self, plan):
        return plan


def books_of(book: FakeBook) -> CodedBooks:
    """Return books that measure everything by the same formula."""
    return CodedBooks(book, book, lambda: book)


class TaskBook(FakeBook):
    """A trial book with tasks, where far tokens of some layers do harm: without them, retention rises."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.worth = np.random.default_rng(seed).permutation([-1.0, 0.5, 1.5])

    def lost(self, layer, ranks):
        """Return the loss in log-probability of right answers."""
        return self.worth[layer] * self.cost(layer, ranks)

    def measure(self, plan):
        lost = sum(self.lost(i, ranks) for i, ranks in enumerate(plan.layers))
        return replace(super().measure(plan), retention={"task": float(np.exp(-lost))})


def layer(keys, values) -> LayerRanks:
    rank, bits, first = keys
    index = {"index": 16, "bits_index": first} if first else {"index": 0}
    return LayerRanks(rank, H, settings=Settings(bits_k=bits, bits_v=values, read=0, **index))


def every_plan(book) -> list[tuple[float, float]]:
    """List bytes per token and nats of all plans whose layers read and store far tokens."""
    choices = [(token_bytes(*pair), layer(*pair)) for pair in EVERY]
    of = [[(size, book.cost(i, ranks)) for size, ranks in choices] for i in range(LAYERS)]
    return [tuple(np.sum(each, 0)) for each in itertools.product(*of)]


def lower_hull(points) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for p in sorted(points):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (p[0] - hull[-2][0]) >= (p[1] - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        if not hull or p[0] > hull[-1][0]:
            hull.append(p)
    return hull


def held(plan) -> float:
    """Count the bytes of a far token and head over all layers, by hand."""
    far = [ranks for ranks in plan.layers if ranks.qk]

    def first(codes):
        return codes.bits_index if codes.index else 0

    def precision(ranks):
        return (ranks.qk, ranks.settings.bits_k, first(ranks.settings))

    return sum(token_bytes(precision(ranks), ranks.settings.bits_v) for ranks in far)
