"""Values of a compression plan that its cache method reads: ranks, token classes, settings (`PlannedLayers`).

Cache methods see only this module. `zdc_jax.plan` adds the checks and the caches, which need the methods.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from zdc_jax.cache.specs.classes import ClassBlocks
from zdc_jax.errors import PlanError
from zdc_jax.fields import check_fields

Rotations = tuple[tuple[int, ...], tuple[int, ...]]
"""Block sizes of rotated coordinates: those of keys, and those of values."""
SearchKind = Literal["ranks", "bits"]
"""Quantity that a search of plans chooses in each layer."""


@dataclass(frozen=True)
class MethodSettings:
    """Options of a method besides ranks, sinks and window. Hashable, and with fields that JSON can represent.

    `PlanError` is raised here for values that are never valid, and in `layer_caches` for values that do not
    fit the rest of a plan.

    Attributes:
      latent_keys: whether far keys are stored in coordinates of keys before the rotary embedding
        (`Basis.k_latent`).
      token_classes: whether plans may have token classes (`zdc_jax.plan.TokenClasses`).
      prefers_basis: whether a calibrated basis makes the method more accurate even if it keeps all
        coordinates.
      search: what a search of plans chooses in each layer; None if there is no search for the method.
    """

    latent_keys: ClassVar[bool] = False
    token_classes: ClassVar[bool] = False
    prefers_basis: ClassVar[bool] = False
    search: ClassVar[SearchKind | None] = None

    def rotations(self, R: int, Z: int) -> Rotations:
        """Return the block sizes into which the rotation `cache.codes.gaussian.turn` is folded.

        The blocks divide the R leading coordinates of keys and the Z leading coordinates of values.
        """
        return (), ()

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise PlanError(str(error)) from error


@dataclass(frozen=True)
class LayerRanks:
    """Coordinates that one layer stores per head for older tokens.

    Attributes:
      qk: coordinates of keys (R).
      v: coordinates of values (Z).
      window: window of this layer in tokens, which replaces the window and sinks of the plan. It requires
        `qk = v = 0` and describes the sliding-window layers of a model.
      settings: settings of the plan's method for this layer, which replace those of the plan.
      shift: whether keys leave out their mean and scores regain it (`zdc_jax.ops.shift`). The mean comes from
        the basis; without a basis it is the bias of the keys.
    """

    qk: int
    v: int
    window: int | None = None
    settings: MethodSettings | None = None
    shift: bool = False


@dataclass(frozen=True)
class TokenClasses:
    """Token classes: important tokens store more coordinates than other tokens (ZDC §5.2).

    Consecutive layers form groups. The first layer of a group, its leader, stores all tokens at the plan's
    ranks and orders them by importance (its softmax denominators). In the other layers of the group, the most
    important tokens of every `block` positions have the ranks `important`; other tokens have the plan's
    ranks. Token classes can be combined with a window.

    Attributes:
      leaders: indices of the leaders, ascending from 0.
      fraction: share of important tokens in each group, in (0, 1).
      important: ranks of important tokens in each layer, at least the plan's ranks. Entries of leaders are
        not used.
      block: positions among which important tokens are chosen.
    """

    leaders: tuple[int, ...]
    fraction: tuple[float, ...]
    important: tuple[LayerRanks, ...]
    block: int = 512

    def blocks(self, group: int) -> ClassBlocks:
        """Return how the tokens of a group are divided."""
        return ClassBlocks(self.block, self.fraction[group])

    def members(self, group: int, layers: int) -> range:
        """Return the layers of a group after its leader; `layers` is the number of layers of the model."""
        ends = (*self.leaders[1:], layers)
        return range(self.leaders[group] + 1, ends[group])

    def group_of(self, layer: int) -> int:
        """Return the index of the group that contains a layer."""
        return sum(leader <= layer for leader in self.leaders) - 1


@dataclass(frozen=True)
class PlannedLayers:
    """Ranks of every layer, the recent tokens that keep all coordinates, and the storage method.

    Without recent tokens (`window == sinks == 0`), the projections and W_O shrink together with the cache.
    With recent tokens, every token is read at full width at first. The projections then keep their size, and
    only the cache and the attention to older tokens shrink.

    Attributes:
      layers: ranks of each layer.
      num_kv_heads: number of KV heads of the model (K).
      head_dim: width of a head (H).
      sinks: first tokens of a sequence that keep all coordinates.
      window: latest tokens of a sequence that keep all coordinates.
      fingerprint: fingerprint of the calibrated model; empty: any model of this shape.
      basis: hash of the basis whose coordinates were chosen (`Basis.coordinates_hash`); empty: any
        basis of this model.
      classes: token classes; None: all older tokens are treated alike.
      rotated: whether a basis is folded in. Without a basis the coordinates are those of the checkpoint, and
        a layer stores all of them or none.
      method: name of the method that stores older tokens (`zdc_jax.methods`).
      settings: settings of the method. Default: `Settings()` of the method.
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
    settings: MethodSettings = None  # type: ignore[assignment]  # `CompressionPlan` sets the default.

    def near(self, layer: int) -> tuple[int, int]:
        """Return the sinks and the window of a layer, in tokens."""
        window = self.layers[layer].window
        return (self.sinks, self.window) if window is None else (0, window)

    def settings_of(self, layer: int) -> MethodSettings:
        """Return the settings of the method for a layer."""
        return self.layers[layer].settings or self.settings

    def has_classes(self, layer: int) -> bool:
        """Return whether important tokens have ranks of their own in a layer."""
        return self.classes is not None and layer not in self.classes.leaders
