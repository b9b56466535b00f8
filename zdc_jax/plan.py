"""`CompressionPlan`: which coordinates of Q, K, V each layer keeps (near and far, nested ranks)."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np

from zdc_jax import methods
from zdc_jax.cache.classes import ClassBlocks
from zdc_jax.cache.kv_cache import cache_bytes
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.fields import MOST, check_names
from zdc_jax.files import load_json, whole_file
from zdc_jax.methods import MethodSettings

FORMAT_VERSION = 3
"""Version 1 did not name the basis, 2 knew no settings of single layers."""
RANK_STEP = 16
"""Ranks are multiples of this: it is the contraction step that tensor cores charge for."""


@dataclass(frozen=True)
class LayerRanks:
    """R (`qk`) and Z (`v`) of one layer: coordinates kept per head for keys outside the window.

    window: of this layer, in tokens, in the place of the plan's window and sinks; only without far keys
    (R = Z = 0). That is how a plan says what sliding-window layers keep.
    settings: of the plan's method for this layer, in the place of the plan's.
    """

    qk: int
    v: int
    window: int | None = None
    settings: MethodSettings | None = None


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

    def blocks(self, group: int) -> ClassBlocks:
        """How the tokens of the group of this index are divided."""
        return ClassBlocks(self.block, self.fraction[group])

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
    `fingerprint` names the calibrated model (empty: any model of this shape), `basis` the basis whose
    coordinates were chosen (`Basis.coordinates_hash`; empty: any of this model). Without `rotated` no basis
    is folded in: coordinates are those of the checkpoint, and layers keep all of them or none. `method` says
    how what is kept of far tokens is stored (`zdc_jax.methods`), `settings` are that method's.

    Raises:
      PlanError: on any impossible value, naming it and what is allowed.
    """

    layers: tuple[LayerRanks, ...]
    num_kv_heads: int
    head_dim: int
    sinks: int = 0
    window: int = 0
    fingerprint: str = ""
    basis: str = ""
    classes: TokenClasses | None = None
    rotated: bool = True
    method: str = "zdc"
    settings: MethodSettings = None  # type: ignore[assignment]  # The method's own, once it is known.

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            if not 0 <= _integer(name, value := getattr(self, name)) <= MOST:
                raise PlanError(f"{name}={value} must be 0 to {MOST} tokens")
        for name in ("num_kv_heads", "head_dim"):
            if not 1 <= _integer(name, value := getattr(self, name)) <= MOST:
                raise PlanError(f"{name}={value} must be 1 to {MOST}")
        for name in ("fingerprint", "basis"):
            if not isinstance(value := getattr(self, name), str):
                raise PlanError(f"{name}={value!r} must be a string")
        if not isinstance(self.method, str) or self.method not in methods.names():
            raise PlanError(f"method={self.method!r} must be one of {methods.names()}")
        if self.settings is None:
            object.__setattr__(self, "settings", methods.named(self.method).Settings())
        if not isinstance(self.settings, methods.named(self.method).Settings):
            raise PlanError(f"settings={self.settings!r} are not those of method {self.method!r}")
        if not self.layers:
            raise PlanError("layers=() must name the ranks of at least one layer")
        for index, ranks in enumerate(self.layers):
            self._check_ranks(index, ranks)
            if ranks.settings is not None and type(ranks.settings) is not type(self.settings):
                raise PlanError(
                    f"layer {index}: settings={ranks.settings!r} are not those of method {self.method!r}"
                )
        if self.classes is not None:
            self._check_classes(self.classes)
        self._check_rotated()
        self.layer_caches("bfloat16")  # The method refuses what it cannot keep.

    def _check_rotated(self) -> None:
        if type(self.rotated) is not bool:
            raise PlanError(f"rotated={self.rotated!r} must be true or false")
        if self.rotated:
            return
        if self.basis:
            raise PlanError(f"basis={self.basis!r}: a plan that is not rotated has none")
        H = self.head_dim
        for index, ranks in enumerate(self.layers):
            if ranks.qk not in (0, H) or ranks.v not in (0, H):
                raise PlanError(
                    f"layer {index}: qk={ranks.qk}, v={ranks.v}: without a basis a layer keeps all {H} "
                    "coordinates or none"
                )

    def _check_classes(self, classes: TokenClasses) -> None:
        if self.method != "zdc":
            raise PlanError(f"token classes are a mode of method 'zdc', not of {self.method!r}")
        leaders, count = classes.leaders, len(self.layers)
        for name, value in (("block", classes.block), *(("leaders", leader) for leader in leaders)):
            _integer(name, value)
        if not leaders or leaders[0] != 0 or list(leaders) != sorted({*leaders}) or leaders[-1] >= count:
            raise PlanError(f"{leaders=} must ascend from 0 and be below {count} layers")
        if len(classes.fraction) != len(leaders):
            raise PlanError(f"fraction={classes.fraction} must have one share for each of {leaders=}")
        if not all(isinstance(share, Real) and 0 < share < 1 for share in classes.fraction):
            raise PlanError(f"fraction={classes.fraction} must lie strictly between 0 and 1")
        if len(classes.important) != count:
            raise PlanError(f"important has {len(classes.important)} ranks, the plan {count} layers")
        if not 1 <= classes.block <= MOST:
            raise PlanError(f"block={classes.block} must be 1 to {MOST} positions")
        for index, (more, less) in enumerate(zip(classes.important, self.layers, strict=True)):
            self._check_ranks(index, more)
            if more.qk < less.qk or more.v < less.v:
                raise PlanError(f"layer {index}: important tokens keep {more}, less than the rest, {less}")
            if index not in leaders and less.qk == 0:
                raise PlanError(f"layer {index}: rank 0 is not for layers with token classes")

    def _check_ranks(self, index: int, ranks: LayerRanks) -> None:
        H = self.head_dim
        for name, rank in (("qk", ranks.qk), ("v", ranks.v)):
            _integer(f"layer {index}: rank {name}", rank)
            if not (rank == H or (0 <= rank < H and rank % RANK_STEP == 0)):
                raise PlanError(
                    f"layer {index}: rank {name}={rank} must be {H} or a multiple of {RANK_STEP} below it"
                )
        if (ranks.qk == 0) != (ranks.v == 0):
            raise PlanError(
                f"layer {index}: qk={ranks.qk}, v={ranks.v}: a layer without far attention needs both at 0"
            )
        if ranks.qk == 0 and self.window == 0 and ranks.window is None:
            raise PlanError(f"layer {index}: rank 0 leaves nothing to attend to with window=0")
        if ranks.window is not None:
            if not 1 <= _integer(f"layer {index}: window", ranks.window) <= MOST:
                raise PlanError(f"layer {index}: window={ranks.window} must be 1 to {MOST} tokens")
            if ranks.qk or self.classes is not None:
                raise PlanError(f"layer {index}: a window of its own needs rank 0 and no token classes")

    @classmethod
    def uniform(cls, config: ModelConfig, *, qk: int, v: int, window: int = 0, sinks: int = 0) -> Self:
        """The same R=`qk` and Z=`v` in every layer; sliding-window layers as in `of_layers`."""
        return cls.of_layers(config, [LayerRanks(qk, v)] * config.num_layers, window=window, sinks=sinks)

    @classmethod
    def of_layers(
        cls,
        config: ModelConfig,
        ranks: Sequence[LayerRanks],
        *,
        window: int = 0,
        sinks: int = 0,
        method: str = "zdc",
        settings: MethodSettings | None = None,
    ) -> Self:
        """These ranks, but for layers whose checkpoint has a sliding window: they keep it as it is.

        Where the plan keeps no far keys in such a layer, and a shorter window, that one is taken.
        """
        layers = []
        for spec, layer in zip(config.layers, ranks, strict=True):
            if spec.window is not None:
                kept = spec.window if layer.qk else min(spec.window, window or spec.window)
                layer = LayerRanks(0, 0, kept)
            layers.append(layer)
        return cls(
            tuple(layers),
            config.num_kv_heads,
            config.head_dim,
            sinks=sinks,
            window=window,
            method=method,
            settings=settings,  # type: ignore[arg-type]  # None is the method's own.
        )

    @classmethod
    def full(cls, config: ModelConfig) -> Self:
        """All coordinates: the calibrated basis is applied, nothing is dropped."""
        return cls.uniform(config, qk=config.head_dim, v=config.head_dim)

    def near(self, layer: int) -> tuple[int, int]:
        """Sinks and window of a layer, in tokens. With either, projections stay whole: some keys are near."""
        own = self.layers[layer].window
        return (self.sinks, self.window) if own is None else (0, own)

    def settings_of(self, layer: int) -> MethodSettings:
        """The method's settings for a layer."""
        return self.layers[layer].settings or self.settings

    def rotations(self, layer: int) -> methods.Rotations:
        """Blocks of a layer's coordinates that the method's turns are folded into."""
        ranks = self.layers[layer]
        return self.settings_of(layer).rotations(ranks.qk, ranks.v) if ranks.qk else ((), ())

    @property
    def mean_ranks(self) -> tuple[float, float]:
        """Mean over layers of (R, Z)."""
        return (
            float(np.mean([r.qk for r in self.layers])),
            float(np.mean([r.v for r in self.layers])),
        )

    def layer_caches(self, dtype: str) -> tuple[LayerCacheSpec, ...]:
        """How each layer keeps its tokens, for a model of this dtype."""
        return _layer_caches(self, dtype)

    def bytes(self, capacity: int, batch: int = 1, dtype: str = "bfloat16") -> int:
        """Bytes of a KV cache for `batch` rows of `capacity` tokens: the sum over layers, and the lengths."""
        return cache_bytes(self.layer_caches(dtype), capacity, batch)

    def bytes_read(self, tokens: int, dtype: str = "bfloat16") -> int:
        """Bytes of the cache of a row of `tokens` that decoding one more reads."""
        return sum(spec.bytes_read(tokens) for spec in self.layer_caches(dtype))

    def has_classes(self, layer: int) -> bool:
        """Whether tokens of two classes keep different ranks in this layer."""
        return self.classes is not None and layer not in self.classes.leaders

    def stored_ranks(self, layer: int) -> LayerRanks:
        """Ranks that a layer's weights are cut to: those of its important tokens, where it has classes."""
        if self.classes is not None and layer not in self.classes.leaders:
            return self.classes.important[layer]
        return self.layers[layer]

    def within(self, config: ModelConfig) -> Self:
        """The same plan for this model, whose sliding-window layers keep what `of_layers` says."""
        near = {"window": self.window, "sinks": self.sinks}
        plan = self.of_layers(config, self.layers, **near, method=self.method, settings=self.settings)
        return replace(self, layers=plan.layers)

    def check_model(self, config: ModelConfig, fingerprint: str) -> None:
        """Raises `PlanError` when this plan was made for another model."""
        for name, mine, theirs in (
            ("layers", len(self.layers), config.num_layers),
            ("num_kv_heads", self.num_kv_heads, config.num_kv_heads),
            ("head_dim", self.head_dim, config.head_dim),
        ):
            if mine != theirs:
                raise PlanError(f"the plan has {name}={mine}, the model {theirs}")
        for index, (spec, ranks) in enumerate(zip(config.layers, self.layers, strict=True)):
            if spec.window is not None and not (ranks.window and ranks.window <= spec.window):
                raise PlanError(
                    f"layer {index} of the model sees the last {spec.window} tokens: the plan must give it "
                    f"rank 0 and a window of its own, 1 to {spec.window}; got {ranks}"
                )
            read = getattr(self.settings_of(index), "read", 0)  # Of methods that choose what is read.
            if ranks.qk and read > config.max_positions:
                raise PlanError(
                    f"layer {index}: read={read} far tokens must be at most {config.max_positions}, "
                    "the positions of the model"
                )
        if self.fingerprint and self.fingerprint != fingerprint:
            raise PlanError(f"the plan was made for model {self.fingerprint!r}, this one is {fingerprint!r}")

    def check_basis(self, basis: str) -> None:
        """Raises `PlanError` when this plan's coordinates are of another basis than that of this hash."""
        if self.basis and self.basis != basis:
            raise PlanError(
                f"the plan chooses coordinates of basis {self.basis!r}, this one is {basis!r}: make the plan "
                "anew with zdc plan, or load the plan's own basis with basis="
            )

    def for_model(self, fingerprint: str, basis: str = "") -> Self:
        """The same plan bound to the model with this fingerprint and to the basis of this hash."""
        return replace(self, fingerprint=fingerprint, basis=basis)

    def to_json(self) -> dict[str, Any]:
        """Plain, versioned JSON value."""
        value = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}))
        for name, usual in (("rotated", True), ("settings", {})):
            if value[name] == usual:
                del value[name]
        value["layers"] = [_said(layer) for layer in value["layers"]]
        if self.classes is not None:
            value["classes"]["important"] = [_said(layer) for layer in value["classes"]["important"]]
        return value

    def save(self, path: str | Path) -> None:
        """Writes readable, versioned JSON (one line a layer), whole or not at all."""
        value = self.to_json()
        layers = ",\n".join(f"    {json.dumps(layer)}" for layer in value.pop("layers"))
        head = json.dumps(value, indent=2).removesuffix("\n}")
        with whole_file(Path(path)) as file:
            file.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote; raises `PlanError` on a missing, corrupt or foreign file.

        A calibrated plan of format version 1 comes with a warning.
        """
        try:
            value = load_json(Path(path))
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read plan {path}: {error}") from error
        return cls.from_json(value, path)

    @classmethod
    def from_json(cls, value: Any, path: str | Path) -> Self:
        """What `to_json` gave; raises `PlanError` naming `path` where it is no plan."""
        version = value.get("format_version") if isinstance(value, dict) else type(value).__name__
        if version not in range(1, FORMAT_VERSION + 1):
            raise PlanError(f"{path}: format_version={version!r}, this release reads 1 to {FORMAT_VERSION}")
        fields = {key: item for key, item in value.items() if key != "format_version"}
        try:
            check_names(cls, fields, "the plan")
            own = partial(methods.settings_from_json, fields.get("method", cls.method))
            layers = _layers_from_json("layers", fields.pop("layers"), own)
            if (classes := fields.pop("classes", None)) is not None:
                check_names(TokenClasses, classes, "classes")
                important = _layers_from_json("important", classes["important"], own)
                leaders, fraction = (tuple(_list(name, classes[name])) for name in ("leaders", "fraction"))
                given = {"leaders": leaders, "fraction": fraction, "important": important}
                classes = TokenClasses(**classes | given)
            if (settings := fields.pop("settings", None)) is not None:
                fields["settings"] = own(settings)
            plan = cls(layers, **fields, classes=classes)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"{path} is not a compression plan: {error}") from error
        if version == 1 and plan.fingerprint:
            warnings.warn(
                f"{path}: a plan of format version 1 does not name its basis, so a newer basis cannot be "
                "refused; make the plan anew with zdc plan (a search goes on from its journal)",
                stacklevel=3,
            )
        return plan


@lru_cache(maxsize=256)
def _layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    return methods.named(plan.method).layer_caches(plan, dtype)


def _said(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer as JSON, without what it does not choose."""
    return {name: value for name, value in layer.items() if value is not None}


def _layers_from_json(
    name: str, value: Any, settings: Callable[[Any], MethodSettings]
) -> tuple[LayerRanks, ...]:
    layers = []
    for index, layer in enumerate(_list(name, value)):
        check_names(LayerRanks, layer, f"{name}[{index}]")
        own = layer.get("settings")
        layers.append(LayerRanks(**layer | ({} if own is None else {"settings": settings(own)})))
    return tuple(layers)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}={value!r:.80} must be a list")
    return value


def _integer(name: str, value: Any) -> int:
    """`value`, of which JSON may have made anything."""
    if type(value) is not int:
        raise PlanError(f"{name}={value!r:.80} must be an int")
    return value


def allowed_ranks(head_dim: int) -> tuple[int, ...]:
    """0, 16, 32, … and the head dim itself."""
    return (*range(0, head_dim, RANK_STEP), head_dim)
