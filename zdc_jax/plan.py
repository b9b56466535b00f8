"""Compression plans: how many coordinates of keys and values each layer stores (`CompressionPlan`).

Recent tokens (the plan's sinks and window) keep all coordinates; code and errors also call them near tokens.
All older tokens (far tokens) keep the ranks of their layer.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

from zdc_jax import methods
from zdc_jax.cache.kv_cache import cache_bytes
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError, describe_error
from zdc_jax.fields import MOST, check_names
from zdc_jax.files import load_json, whole_file
from zdc_jax.planned_layers import LayerRanks as LayerRanks
from zdc_jax.planned_layers import MethodSettings, PlannedLayers, Rotations

MAKE_PLAN = "make one for this model: run `zdc plan MODEL PLAN.json --preset 4bit`, or `zdc compress`"
"""Advice in errors about a plan of another model."""
FORMAT_VERSION = 3
"""Format version of plan files. Version 1 has no `basis`; version 2 has no `settings` of single layers."""
RANK_STEP = 16
"""Step of the ranks. It equals the contraction step of tensor cores, so ranks in between save no time."""


@dataclass(frozen=True)
class CompressionPlan(PlannedLayers):
    """Ranks of every layer, the recent tokens that keep all coordinates, and the storage method.

    `PlannedLayers` describes the values. This class checks them, and it creates the caches of the method.

    Raises:
      PlanError: a value is invalid.
    """

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            if not 0 <= _check_integer(name, value := getattr(self, name)) <= MOST:
                raise PlanError(f"{name}={value} must be 0 to {MOST} tokens")
        for name in ("num_kv_heads", "head_dim"):
            if not 1 <= _check_integer(name, value := getattr(self, name)) <= MOST:
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
        if not isinstance(self.layers, tuple):
            raise PlanError(f"layers={self.layers!r:.80} must be a tuple of LayerRanks")
        if not self.layers:
            raise PlanError("layers=() must name the ranks of at least one layer")
        for index, ranks in enumerate(self.layers):
            self._check_ranks(index, ranks)
            if ranks.settings is not None and type(ranks.settings) is not type(self.settings):
                raise PlanError(
                    f"layer {index}: settings={ranks.settings!r} are not those of method {self.method!r}"
                )
        self._check_rotated()
        self._check_shift(self.layer_caches("bfloat16"))  # The method rejects plans that it cannot serve.

    def _check_shift(self, specs: Sequence[LayerCacheSpec]) -> None:
        for index, (ranks, spec) in enumerate(zip(self.layers, specs, strict=True)):
            if type(ranks.shift) is not bool:
                raise PlanError(f"layer {index}: shift={ranks.shift!r} must be true or false")
            if ranks.shift and not (ranks.qk and "shift" in spec.clauses):
                raise PlanError(
                    f"layer {index}: shift=true needs qk above 0 and a method that stores whole keys, "
                    f"not method={self.method!r} with qk={ranks.qk}"
                )

    def _check_rotated(self) -> None:
        if type(self.rotated) is not bool:
            raise PlanError(f"rotated={self.rotated!r} must be true or false")
        if self.rotated:
            return
        if self.basis:
            raise PlanError(f"basis={self.basis!r} must be empty in a plan with rotated=False")
        H = self.head_dim
        for index, ranks in enumerate(self.layers):
            if ranks.qk not in (0, H) or ranks.v not in (0, H):
                raise PlanError(
                    f"layer {index}: qk={ranks.qk}, v={ranks.v} must be 0 or {H} in a plan with rotated=False"
                )

    def _check_ranks(self, index: int, ranks: LayerRanks) -> None:
        H = self.head_dim
        for name, rank in (("qk", ranks.qk), ("v", ranks.v)):
            _check_integer(f"layer {index}: {name}", rank)
            if not (rank == H or (0 <= rank < H and rank % RANK_STEP == 0)):
                raise PlanError(
                    f"layer {index}: {name}={rank} must be {H} or a smaller multiple of {RANK_STEP}"
                )
        if (ranks.qk == 0) != (ranks.v == 0):
            raise PlanError(f"layer {index}: qk={ranks.qk}, v={ranks.v} must both be 0 or both be > 0")
        if ranks.qk == 0 and self.window == 0 and ranks.window is None:
            raise PlanError(f"layer {index}: qk=0, v=0 needs a window, but the plan has window=0")
        if ranks.window is not None:
            if not 1 <= _check_integer(f"layer {index}: window", ranks.window) <= MOST:
                raise PlanError(f"layer {index}: window={ranks.window} must be 1 to {MOST} tokens")
            if ranks.qk:
                raise PlanError(f"layer {index}: window={ranks.window} needs qk=0, v=0")

    @classmethod
    def uniform(cls, config: ModelConfig, *, qk: int, v: int, window: int = 0, sinks: int = 0) -> Self:
        """Return a plan with the same ranks in every layer; sliding-window layers as in `of_layers`."""
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
        """Return a plan with these ranks, except in the sliding-window layers of the model.

        A sliding-window layer keeps its window, or gets the plan's window if that is shorter and the ranks of
        the layer are 0.
        """
        return cls(
            _fit_windows(config, ranks, window),
            config.num_kv_heads,
            config.head_dim,
            sinks=sinks,
            window=window,
            method=method,
            settings=settings,  # type: ignore[arg-type]  # None selects the default of the method.
        )

    @classmethod
    def full(cls, config: ModelConfig) -> Self:
        """Return the plan that stores all coordinates of the calibrated basis."""
        return cls.uniform(config, qk=config.head_dim, v=config.head_dim)

    def with_shift(self, shifted: Sequence[bool]) -> Self:
        """Return the plan with the shift of keys on in the layers where `shifted` is true.

        Layers that store no keys of older tokens stay as they are. `shifted` may be empty, which means no
        layer.
        """
        pairs = zip(self.layers, [*shifted] or [False] * len(self.layers), strict=True)
        layers = (replace(ranks, shift=bool(ranks.qk) and bool(shift)) for ranks, shift in pairs)
        return replace(self, layers=tuple(layers))

    def rotations(self, layer: int) -> Rotations:
        """Return the sizes of the coordinate blocks that the method rotates in a layer."""
        ranks = self.layers[layer]
        return self.settings_of(layer).rotations(ranks.qk, ranks.v) if ranks.qk else ((), ())

    def layer_caches(self, dtype: str) -> tuple[LayerCacheSpec, ...]:
        """Return the cache spec of each layer, for a model of this dtype."""
        return _layer_caches(self, dtype)

    @property
    def exchanges_quantized(self) -> bool:
        """Whether the devices of a mesh exchange quantized keys and values, in at least one layer."""
        return any(spec.exchange == "quantized" for spec in self.layer_caches("bfloat16"))

    def bytes(self, capacity: int, batch: int = 1, dtype: str = "bfloat16") -> int:
        """Return the bytes of a KV cache for `batch` sequences of `capacity` tokens.

        Raises:
          PlanError: `capacity` or `batch` is no integer of at least 1.
        """
        for name, value in (("capacity", capacity), ("batch", batch)):
            if _check_integer(name, value) < 1:
                raise PlanError(f"{name}={value} must be at least 1")
        return cache_bytes(self.layer_caches(dtype), capacity, batch)

    def bytes_read(self, tokens: int, dtype: str = "bfloat16") -> int:
        """Return the bytes of the cache that one decode step reads for a sequence of `tokens` tokens."""
        return sum(spec.bytes_read(tokens) for spec in self.layer_caches(dtype))

    def within(self, config: ModelConfig) -> Self:
        """Return the plan adapted to the sliding-window layers of a model, as in `of_layers`."""
        return replace(self, layers=_fit_windows(config, self.layers, self.window))

    def check_model(self, config: ModelConfig, fingerprint: str) -> None:
        """Raise `PlanError` if this plan was made for another model."""
        for name, value, expected in (
            ("layers", len(self.layers), config.num_layers),
            ("num_kv_heads", self.num_kv_heads, config.num_kv_heads),
            ("head_dim", self.head_dim, config.head_dim),
        ):
            if value != expected:
                raise PlanError(
                    f"the plan was made for another model: it has {name}={value}, the model has "
                    f"{name}={expected}; {MAKE_PLAN}"
                )
        for index, (spec, ranks) in enumerate(zip(config.layers, self.layers, strict=True)):
            if spec.window is not None and not (ranks.window and ranks.window <= spec.window):
                raise PlanError(
                    f"layer {index}: {ranks} does not fit the model, whose layer has a sliding window of "
                    f"{spec.window} tokens; set qk=0, v=0 and a window of 1 to {spec.window}"
                )
            read = getattr(self.settings_of(index), "read", 0)  # Only some methods choose the tokens to read.
            if ranks.qk and read > config.max_positions:
                raise PlanError(
                    f"layer {index}: read={read} far tokens must be at most {config.max_positions}, "
                    "the positions of the model"
                )
        if self.fingerprint and self.fingerprint != fingerprint:
            raise PlanError(
                f"the plan was made for another model, {self.fingerprint!r}; this model is {fingerprint!r}; "
                f"{MAKE_PLAN}"
            )

    def check_basis(self, basis: str) -> None:
        """Raise `PlanError` if this plan was made for another basis than the one with this hash."""
        if self.basis and self.basis != basis:
            raise PlanError(
                f"the plan was made for basis {self.basis!r}, this basis is {basis!r}; run `zdc plan` again, "
                "or pass the basis of the plan as basis="
            )

    def for_model(self, fingerprint: str, basis: str = "", shifted: Sequence[bool] = ()) -> Self:
        """Return the plan bound to a model, by fingerprint, and to a basis, by hash.

        Layers shift their keys where `shifted` (`Basis.shifted`) says that the basis was made for it, unless
        the plan's method stores whole keys.
        """
        bound = replace(self, fingerprint=fingerprint, basis=basis)
        specs = self.layer_caches("bfloat16")
        able = all(
            "shift" in spec.clauses for spec, ranks in zip(specs, self.layers, strict=True) if ranks.qk
        )
        return bound.with_shift(shifted) if shifted and able else bound

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object with a format version."""
        value = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}))
        for name, default in (("rotated", True), ("settings", {})):
            if value[name] == default:
                del value[name]
        value["layers"] = [
            {name: item for name, item in layer.items() if item is not None and item is not False}
            for layer in value["layers"]
        ]
        return value

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file atomically, with one line per layer."""
        value = self.to_json()
        layers = ",\n".join(f"    {json.dumps(layer)}" for layer in value.pop("layers"))
        head = json.dumps(value, indent=2).removesuffix("\n}")
        with whole_file(Path(path)) as file:
            file.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path, *, label: str | None = None) -> Self:
        """Load a plan from a JSON file.

        Plans of format version 1 that are bound to a model cause a warning, because they name no basis.

        Args:
          path: the file.
          label: name of the file in errors; default the path.

        Raises:
          PlanError: the file is missing, corrupt or not a plan.
        """
        try:
            value = load_json(Path(path))
        except OSError as error:
            raise PlanError(f"{label or path}: cannot be read: {describe_error(error)}") from error
        except ValueError as error:
            raise PlanError(
                f"{label or path}: is not a plan of `zdc plan`, but broken JSON: {error}"
            ) from error
        return cls.from_json(value, label or path)

    @classmethod
    def from_json(cls, value: Any, path: str | Path) -> Self:
        """Build a plan from the output of `to_json`.

        Args:
          value: the JSON value.
          path: file that contained the value; named in errors.

        Raises:
          PlanError: the value is not a valid plan.
        """
        if not isinstance(value, dict):
            raise PlanError(f"{path}: is not a plan of `zdc plan`: {value!r:.80} must be a JSON object")
        version = value.get("format_version")
        if version is None:
            raise PlanError(f"{path}: is not a plan of `zdc plan`: it has no format_version")
        if version not in range(1, FORMAT_VERSION + 1):
            raise PlanError(
                f"{path}: format_version={version!r} is not supported; "
                f"this release reads 1 to {FORMAT_VERSION}"
            )
        fields = {key: item for key, item in value.items() if key != "format_version"}
        if fields.pop("classes", None) is not None:  # Earlier releases wrote null for other plans.
            raise PlanError(
                f"{path}: classes: this form of token classes is no longer read; "
                "search again with `zdc plan --mode classes`"
            )
        try:
            check_names(cls, fields, "the plan")
            read_settings = partial(methods.settings_from_json, fields.get("method", cls.method))
            layers = _layers_from_json(fields.pop("layers"), read_settings)
            if (settings := fields.pop("settings", None)) is not None:
                fields["settings"] = read_settings(settings)
            plan = cls(layers, **fields)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"{path}: is not a plan of `zdc plan`: {error}") from error
        if version == 1 and plan.fingerprint:
            warnings.warn(
                f"{path}: format_version=1 does not name the basis of the plan, so a wrong basis cannot be "
                "detected; run `zdc plan` again (a search continues from its journal)",
                stacklevel=3,
            )
        return plan


def _fit_windows(config: ModelConfig, ranks: Sequence[LayerRanks], window: int) -> tuple[LayerRanks, ...]:
    """Return the layers of a plan with this window, as `CompressionPlan.of_layers` describes."""
    layers = []
    for spec, layer in zip(config.layers, ranks, strict=True):
        if spec.window is not None:
            layer = LayerRanks(0, 0, spec.window if layer.qk else min(spec.window, window or spec.window))
        layers.append(layer)
    return tuple(layers)


@lru_cache(maxsize=256)
def _layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    return methods.named(plan.method).layer_caches(plan, dtype)


def _layers_from_json(value: Any, read_settings: Callable[[Any], MethodSettings]) -> tuple[LayerRanks, ...]:
    if not isinstance(value, list):
        raise ValueError(f"layers={value!r:.80} must be a list")
    layers = []
    for index, layer in enumerate(value):
        check_names(LayerRanks, layer, f"layers[{index}]")
        if layer.get("settings") is not None:
            layer = {**layer, "settings": read_settings(layer["settings"])}
        layers.append(LayerRanks(**layer))
    return tuple(layers)


def _check_integer(name: str, value: Any) -> int:
    if type(value) is not int:
        raise PlanError(f"{name}={value!r:.80} must be an int")
    return value


def allowed_ranks(head_dim: int) -> tuple[int, ...]:
    """Return the ranks that a layer can have: 0, 16, 32, … and the head dim."""
    return (*range(0, head_dim, RANK_STEP), head_dim)
