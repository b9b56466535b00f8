"""Values of a compression plan that its cache method reads: ranks and settings (`PlannedLayers`).

Cache methods see only this module. `zdc_jax.plan` adds the checks and the caches, which need the methods.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

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
      reads_exactly: whether prompts may be read with exact attention (`Transformer.read_prompt`).
      prefers_basis: whether a calibrated basis makes the method more accurate even if it keeps all
        coordinates.
      reads_whole_keys: whether kernels that read prompts add means to keys that left them out
        (`Call.means_of_keys`).
      search: what a search of plans chooses in each layer; None if there is no search for the method.
    """

    latent_keys: ClassVar[bool] = False
    reads_exactly: ClassVar[bool] = True
    prefers_basis: ClassVar[bool] = False
    reads_whole_keys: ClassVar[bool] = False
    search: ClassVar[SearchKind | None] = None

    def rotations(self, R: int, Z: int) -> Rotations:
        """Return the block sizes into which the rotation `cache.codes.gaussian.turn` is folded.

        The blocks divide the R leading coordinates of keys and the Z leading coordinates of values.
        """
        return (), ()

    def __post_init__(self) -> None:
        check_fields(self, PlanError)


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
