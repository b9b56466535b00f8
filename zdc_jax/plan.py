"""`CompressionPlan`: which coordinates of Q, K, V each layer keeps (DESIGN: near and far, nested ranks)."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.files import load_json, whole_file
from zdc_jax.planning.certificate import Certificate, least_ranks

FORMAT_VERSION = 1
RANK_STEP = 16
"""Ranks are multiples of this: it is the contraction step that tensor cores charge for."""
MAX_DISTINCT_RANKS = 6
"""Distinct (R, Z) pairs `from_spectrum` may use; each is compiled separately."""
MOST_TOKENS = 2**31 - 1
"""Positions are int32."""
LENGTH_BYTES = 4
"""Every row of a cache stores its length as one int32."""


@dataclass(frozen=True)
class LayerRanks:
    """R (`qk`) and Z (`v`) of one layer: coordinates kept per head for keys outside the window."""

    qk: int
    v: int


@dataclass(frozen=True)
class TokenClasses:
    """Important tokens keep more (ZDC §5.2): a mode beside or on top of the window.

    Consecutive layers form groups. The first of a group, its leader, treats all tokens alike, at the plan's
    own ranks, and ranks them by its softmax denominators; in the others of the group the most important of
    every `block` positions keep the ranks `important`, the rest the plan's own.

    leaders: ascending, from 0. fraction: of each group, share of important tokens, in (0, 1). important: of
    each layer, no smaller than the plan's own ranks (those of leaders are not used).
    """

    leaders: tuple[int, ...]
    fraction: tuple[float, ...]
    important: tuple[LayerRanks, ...]
    block: int = 512

    def slots(self, group: int, tokens: int) -> int:
        """Important tokens among `tokens` of one block, in the group of this index."""
        return math.ceil(self.fraction[group] * tokens - 1e-9)

    def segment_slots(self, group: int, capacity: int) -> tuple[int, int]:
        """Slots of the important segment and of the rest, for a cache of `capacity` tokens.

        Both are rounded up to the 8 rows that a GPU copies at a time.
        """
        blocks, slots = -(-capacity // self.block), self.slots(group, self.block)
        rounded = lambda rows: -(-rows // 8) * 8
        return rounded(blocks * slots), rounded(blocks * (self.block - slots))

    def important_in(self, group: int, tokens: int) -> int:
        """Important tokens of a piece that begins with a block; 1 for a decoded token, of whichever class."""
        if tokens == 1:
            return 1
        whole, more = divmod(tokens, self.block)
        return whole * self.slots(group, self.block) + self.slots(group, more)

    def members(self, group: int, layers: int) -> range:
        """The layers of a group behind its leader."""
        ends = (*self.leaders[1:], layers)
        return range(self.leaders[group] + 1, ends[group])

    def group_of(self, layer: int) -> int:
        """Index of the group that a layer is in."""
        return sum(leader <= layer for leader in self.leaders) - 1


@dataclass(frozen=True)
class CompressionPlan:
    """Per-layer ranks, and the sinks and recent window (in tokens) that keep all coordinates.

    Without a window (`window == sinks == 0`) the projections and W_O shrink with the cache. With one, every
    token is near somebody once, so projections stay full and the cache and far attention shrink.
    `fingerprint` names the calibrated model (empty: any model of this shape).

    Raises:
      PlanError: on any impossible value, naming it and what is allowed.
    """

    layers: tuple[LayerRanks, ...]
    num_kv_heads: int
    head_dim: int
    sinks: int = 0
    window: int = 0
    fingerprint: str = ""
    classes: TokenClasses | None = None

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            if not 0 <= _whole(name, value := getattr(self, name)) <= MOST_TOKENS:
                raise PlanError(f"{name}={value} must be 0 to {MOST_TOKENS} tokens")
        for name in ("num_kv_heads", "head_dim"):
            if not 1 <= _whole(name, value := getattr(self, name)) <= MOST_TOKENS:
                raise PlanError(f"{name}={value} must be 1 to {MOST_TOKENS}")
        if not isinstance(self.fingerprint, str):
            raise PlanError(f"fingerprint={self.fingerprint!r} must be a string")
        if not self.layers:
            raise PlanError("layers=() must name the ranks of at least one layer")
        for index, ranks in enumerate(self.layers):
            self._check_ranks(index, ranks)
        if self.classes is not None:
            self._check_classes(self.classes)

    def _check_classes(self, classes: TokenClasses) -> None:
        leaders, count = classes.leaders, len(self.layers)
        for name, value in (("block", classes.block), *(("leaders", leader) for leader in leaders)):
            _whole(name, value)
        if not leaders or leaders[0] != 0 or list(leaders) != sorted({*leaders}) or leaders[-1] >= count:
            raise PlanError(f"{leaders=} must ascend from 0 and be below {count} layers")
        if len(classes.fraction) != len(leaders):
            raise PlanError(f"fraction={classes.fraction} must have one share for each of {leaders=}")
        if not all(0 < share < 1 for share in classes.fraction):
            raise PlanError(f"fraction={classes.fraction} must lie strictly between 0 and 1")
        if len(classes.important) != count:
            raise PlanError(f"important has {len(classes.important)} ranks, the plan {count} layers")
        if not 1 <= classes.block <= MOST_TOKENS:
            raise PlanError(f"block={classes.block} must be 1 to {MOST_TOKENS} positions")
        for index, (more, less) in enumerate(zip(classes.important, self.layers, strict=True)):
            self._check_ranks(index, more)
            if more.qk < less.qk or more.v < less.v:
                raise PlanError(f"layer {index}: important tokens keep {more}, less than the rest, {less}")
            if index not in leaders and less.qk == 0:
                raise PlanError(f"layer {index}: rank 0 is not for layers with token classes")

    def _check_ranks(self, index: int, ranks: LayerRanks) -> None:
        H = self.head_dim
        for name, rank in (("qk", ranks.qk), ("v", ranks.v)):
            _whole(f"layer {index}: rank {name}", rank)
            if not (rank == H or (0 <= rank < H and rank % RANK_STEP == 0)):
                raise PlanError(
                    f"layer {index}: rank {name}={rank} must be {H} or a multiple of {RANK_STEP} below it"
                )
        if (ranks.qk == 0) != (ranks.v == 0):
            raise PlanError(
                f"layer {index}: qk={ranks.qk}, v={ranks.v}: a layer without far attention needs both at 0"
            )
        if ranks.qk == 0 and self.window == 0:
            raise PlanError(f"layer {index}: rank 0 leaves nothing to attend to with window=0")

    @classmethod
    def uniform(cls, config: ModelConfig, *, qk: int, v: int, window: int = 0, sinks: int = 0) -> Self:
        """The same R=`qk` and Z=`v` in every layer."""
        return cls(
            (LayerRanks(qk, v),) * config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            sinks=sinks,
            window=window,
        )

    @classmethod
    def full(cls, config: ModelConfig) -> Self:
        """All coordinates: the calibrated basis is applied, nothing is dropped."""
        return cls.uniform(config, qk=config.head_dim, v=config.head_dim)

    @classmethod
    def from_spectrum(
        cls,
        qk_spectrum: np.ndarray,
        vo_spectrum: np.ndarray,
        *,
        budget: float,
        qk_share: float = 0.4,
        window: int = 0,
        sinks: int = 0,
        far: Sequence[bool] | None = None,
        fingerprint: str = "",
    ) -> Self:
        """Per-layer ranks by greedy choice of the largest σ² over all layers (ours).

        Every layer that attends beyond the window keeps at least 16 coordinates: σ² says how sharply a layer
        scores, not whether it needs distant tokens, so it cannot choose layers to cut off.

        Args:
          qk_spectrum, vo_spectrum: σ [L, K, H] of a calibrated basis, comparable between layers.
          budget: share of the dense K and V coordinates to keep outside the window, in (0, 1].
          qk_share: share of the kept coordinates given to Q/K; the rest goes to V/O.
          window, sinks, fingerprint: as in the plan.
          far: [L] which layers attend beyond the window at all; default every one.
        """
        if not 0 < budget <= 1:
            raise PlanError(f"budget={budget} must lie in (0, 1], a share of the dense KV coordinates")
        if not 0 < qk_share < 1:
            raise PlanError(f"qk_share={qk_share} must lie strictly between 0 and 1")
        num_layers, num_kv_heads, head_dim = qk_spectrum.shape
        total = round(budget * 2 * head_dim * num_layers)
        qk_total = min(round(total * qk_share), head_dim * num_layers)
        v_total = min(total - qk_total, head_dim * num_layers)
        open_layers = np.ones(num_layers, bool) if far is None else np.array(far, bool)
        if open_layers.shape != (num_layers,):
            raise PlanError(f"far must name {num_layers} layers, got {len(open_layers)}")
        qk = _greedy_ranks(qk_spectrum, qk_total, open_layers)
        v = _greedy_ranks(vo_spectrum, v_total, open_layers)
        ranks = _merge_ranks([LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True)])
        return cls(ranks, num_kv_heads, head_dim, sinks, window, fingerprint)

    @classmethod
    def from_error(
        cls,
        basis: Basis,
        *,
        max_score_error: float,
        max_value_error: float | None = None,
        window: int = 0,
        sinks: int = 0,
    ) -> Self:
        """The fewest coordinates within limits on the calibrated relative errors of far pairs (ours).

        Args:
          max_score_error: limit for every head's scores (`Certificate.score`), in (0, 1).
          max_value_error: limit for every head's values; default that of the scores.
          window, sinks: as in the plan.

        Raises:
          PlanError: a limit outside (0, 1).
        """
        limits = {
            "max_score_error": max_score_error,
            "max_value_error": max_score_error if max_value_error is None else max_value_error,
        }
        for name, limit in limits.items():
            if not 0 < limit < 1:
                raise PlanError(f"{name}={limit} must lie strictly between 0 and 1")
        _, K, H = basis.qk_spectrum.shape
        allowed = np.array(allowed_ranks(H)[1:])
        qk = least_ranks(basis.qk_error, limits["max_score_error"], allowed)
        v = least_ranks(basis.vo_error, limits["max_value_error"], allowed)
        layers = tuple(LayerRanks(int(r), int(z)) for r, z in zip(qk, v, strict=True))
        return cls(layers, K, H, sinks, window, basis.fingerprint)

    def certificate(self, basis: Basis) -> Certificate:
        """What far pairs lose at these ranks, per layer and KV head, as calibrated."""
        ranks = np.array([[layer.qk, layer.v] for layer in self.layers])
        return Certificate.of(basis, ranks[:, 0], ranks[:, 1])

    @property
    def keeps_full_width(self) -> bool:
        """Whether projections stay full because some keys are near (a window or sinks)."""
        return self.window > 0 or self.sinks > 0

    @property
    def mean_ranks(self) -> tuple[float, float]:
        """Mean over layers of (R, Z)."""
        return (
            float(np.mean([r.qk for r in self.layers])),
            float(np.mean([r.v for r in self.layers])),
        )

    def ring_slots(self, capacity: int) -> int:
        """Slots of the ring of trailing coordinates for a cache of `capacity` tokens.

        The window's and, rounded up to the 8 rows that a GPU copies at a time, the sinks'.
        """
        return min(self.window, capacity) + -(-min(self.sinks, capacity) // 8) * 8

    def bytes(self, capacity: int, batch: int = 1, itemsize: int = 2) -> int:
        """Bytes of a KV cache for `batch` rows of `capacity` tokens, lengths included."""
        ring, whole = self.ring_slots(capacity), 2 * self.head_dim
        alike = [r.qk + r.v for index, r in enumerate(self.layers) if not self.has_classes(index)]
        coordinates = sum(capacity * kept + ring * (whole - kept) for kept in alike)
        extra = 0
        if self.classes is not None:
            groups = range(len(self.classes.leaders))
            slots = [self.classes.segment_slots(group, capacity) for group in groups]
            for index, less in enumerate(self.layers):
                if self.has_classes(index):
                    important, rest = slots[self.classes.group_of(index)]
                    more = self.classes.important[index]
                    coordinates += important * (more.qk + more.v) + rest * (less.qk + less.v) + ring * whole
            # Positions of all slots, and the importance of one block, once a group.
            extra = 4 * sum(sum(each) + self.classes.block for each in slots)
        return batch * (coordinates * self.num_kv_heads * itemsize + LENGTH_BYTES + extra)

    def has_classes(self, layer: int) -> bool:
        """Whether tokens of two classes keep different ranks in this layer."""
        return self.classes is not None and layer not in self.classes.leaders

    def stored_ranks(self, layer: int) -> LayerRanks:
        """Ranks that a layer's weights are cut to: those of its important tokens, where it has classes."""
        if self.classes is not None and layer not in self.classes.leaders:
            return self.classes.important[layer]
        return self.layers[layer]

    def check_model(self, config: ModelConfig, fingerprint: str) -> None:
        """Raises `PlanError` when this plan was made for another model."""
        for name, mine, theirs in (
            ("layers", len(self.layers), config.num_layers),
            ("num_kv_heads", self.num_kv_heads, config.num_kv_heads),
            ("head_dim", self.head_dim, config.head_dim),
        ):
            if mine != theirs:
                raise PlanError(f"the plan has {name}={mine}, the model {theirs}")
        if self.fingerprint and self.fingerprint != fingerprint:
            raise PlanError(f"the plan was made for model {self.fingerprint!r}, this one is {fingerprint!r}")

    def for_model(self, fingerprint: str) -> Self:
        """The same plan bound to the model with this fingerprint."""
        return replace(self, fingerprint=fingerprint)

    def to_json(self) -> dict[str, Any]:
        """Plain, versioned JSON value."""
        return json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}))

    def save(self, path: str | Path) -> None:
        """Writes readable, versioned JSON (one line a layer), whole or not at all."""
        value = self.to_json()
        layers = ",\n".join(f"    {json.dumps(layer)}" for layer in value.pop("layers"))
        head = json.dumps(value, indent=2).removesuffix("\n}")
        with whole_file(Path(path)) as file:
            file.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote; raises `PlanError` on a missing, corrupt or foreign file."""
        try:
            value = load_json(Path(path))
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read plan {path}: {error}") from error
        return cls.from_json(value, path)

    @classmethod
    def from_json(cls, value: Any, path: str | Path) -> Self:
        """What `to_json` gave; raises `PlanError` naming `path` where it is no plan."""
        if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
            found = value.get("format_version") if isinstance(value, dict) else type(value).__name__
            raise PlanError(f"{path}: format_version={found!r}, this release reads {FORMAT_VERSION}")
        fields = {key: item for key, item in value.items() if key != "format_version"}
        try:
            layers = tuple(LayerRanks(**layer) for layer in fields.pop("layers"))
            if (classes := fields.pop("classes", None)) is not None:
                important = tuple(LayerRanks(**ranks) for ranks in classes.pop("important"))
                leaders, fraction = (tuple(classes.pop(name)) for name in ("leaders", "fraction"))
                classes = TokenClasses(leaders, fraction, important, **classes)
            plan = cls(layers, **fields, classes=classes)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} is not a compression plan: {error}") from error
        return plan


def _whole(name: str, value: Any) -> int:
    """`value`, of which JSON may have made anything."""
    if type(value) is not int:
        raise PlanError(f"{name}={value!r:.80} must be an int")
    return value


def allowed_ranks(head_dim: int) -> tuple[int, ...]:
    """0, 16, 32, … and the head dim itself."""
    return (*range(0, head_dim, RANK_STEP), head_dim)


def _greedy_ranks(spectrum: np.ndarray, total: int, open_layers: np.ndarray) -> np.ndarray:
    """Ranks [L] within `total`, raised step by step where a step adds most σ² per coordinate."""
    num_layers, _, head_dim = spectrum.shape
    steps = np.array(allowed_ranks(head_dim))
    energy = np.concatenate([np.zeros((num_layers, 1)), np.cumsum((spectrum**2).sum(1), axis=1)], 1)
    level = open_layers.astype(int)
    if steps[level].sum() > total:
        raise PlanError(
            f"the budget gives {total} coordinates to {open_layers.sum()} layers that attend beyond the "
            f"window; the least possible is {steps[level].sum()} ({steps[1]} a layer)"
        )
    while True:
        raised = np.minimum(level + 1, len(steps) - 1)
        rows = np.arange(num_layers)
        cost = steps[raised] - steps[level]
        gain = np.where(
            open_layers & (cost > 0) & (steps[level].sum() + cost <= total),
            (energy[rows, steps[raised]] - energy[rows, steps[level]]) / np.maximum(cost, 1),
            -np.inf,
        )
        best = int(np.argmax(gain))
        if gain[best] == -np.inf:
            return steps[level]
        level[best] += 1


def _merge_ranks(layers: list[LayerRanks]) -> tuple[LayerRanks, ...]:
    """Moves the rarest rank pairs to their nearest neighbour until few distinct pairs are left."""
    while len(set(layers)) > MAX_DISTINCT_RANKS:
        rarest = min(sorted(set(layers), key=lambda r: (r.qk, r.v)), key=layers.count)
        others = [r for r in set(layers) if r != rarest and (r.qk == 0) == (rarest.qk == 0)]
        pool = others or [r for r in set(layers) if r != rarest]
        nearest = min(
            pool,
            key=lambda r: (abs(r.qk - rarest.qk) + abs(r.v - rarest.v), r.qk + r.v, r.qk),
        )
        layers = [nearest if ranks == rarest else ranks for ranks in layers]
    return tuple(layers)
