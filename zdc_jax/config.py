"""`ModelConfig` and `LayerSpec`: everything about a model that is not a weight."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from zdc_jax.fields import MOST, check_fields

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Of weights that are stored, and of what models run in."""
DTYPES = get_args(Dtype)
MOST_LAYERS = 4096
"""Bound on what a configuration may ask for; deeper models do not exist."""


_POSITIVE = (
    *("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    *("attention_factor", "beta_fast", "beta_slow"),
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; `zdc_jax.ops.rotary.rope_frequencies` says what each kind computes.

    Attributes:
      theta: base of the frequencies.
      kind: how frequencies are scaled for contexts beyond those of training.
      factor: of contexts; all kinds but `default` and `longrope`.
      low_freq_factor, high_freq_factor: turns within the original positions between which `llama3` blends.
      original_max_positions: those of training; `llama3`, `yarn`, `longrope`, `dynamic`.
      attention_factor: q and k are longer by this factor each; `yarn`, `longrope`.
      beta_fast, beta_slow: turns between which `yarn` blends; `truncate`: at whole pairs.
      short_factors, long_factors: divisors of the frequencies [H/2] of `longrope`, for contexts within the
        original positions and for longer ones.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be > 0")
        for name in ("short_factors", "long_factors"):
            if not all(factor > 0 for factor in getattr(self, name)):
                raise ValueError(f"{name} must all be > 0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"{self.low_freq_factor=} must be below {self.high_freq_factor=}")
        if self.kind == "yarn" and not self.theta > 1:
            raise ValueError(f"{self.theta=} must be > 1 for 'yarn'")

    @property
    def reach(self) -> int:
        """Positions that the scaling is made for; 0 where it does not say."""
        return int(self.factor * self.original_max_positions) if self.kind in ("yarn", "dynamic") else 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; unknown fields raise `TypeError`."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items()}
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer computes, apart from its weights. The checkpoint says it; a plan may only narrow it.

    Attributes:
      window: tokens that a query sees, itself included; None: all before it.
      rope: rotary embedding of queries and keys; None: none.
      scale: factor on the scores q·k; None: 1/√H.
      qk_norm: queries and keys are RMS-normed over the head dim, before the rotary embedding.
      norms: `pre`: of what each half of the layer takes in; `post`: of the residual sum behind each half
        (OPT-350m); `sandwich`: of what each half takes in and of what it gives, before the sum (Gemma).
      mlp: `gated`: down(act(gate x) · up x); `plain`: down(act(up x)).
    """

    window: int | None = None
    rope: RopeConfig | None = None
    scale: float | None = None
    qk_norm: bool = False
    norms: Literal["pre", "post", "sandwich"] = "pre"
    mlp: Literal["gated", "plain"] = "gated"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window!r} must be an integer >= 1, or None")
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"scale={self.scale!r} must be a number > 0, or None")

    def score_scale(self, head_dim: int) -> float:
        """Factor on the scores q·k of heads of `head_dim` coordinates; q and k as `rotate` gives them."""
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return scale if self.rope is None else scale * self.rope.attention_factor**2

    def repeated(self, num_layers: int) -> "tuple[LayerSpec, ...]":
        """So many layers alike; raises `ValueError` for a count that no model has, before making any."""
        if type(num_layers) is not int or not 1 <= num_layers <= MOST_LAYERS:
            raise ValueError(f"{num_layers=!r} must be an integer from 1 to {MOST_LAYERS}")
        return (self,) * num_layers

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; unknown fields raise `TypeError`."""
        rope = value.get("rope")
        return cls(**{**value, "rope": None if rope is None else RopeConfig.from_json(rope)})


_COUNTS = (
    "embed_dim",
    "ffn_dim",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder-only model.

    Widths are counts of coordinates, `max_positions` counts tokens, `dtype` is that of the stored weights.
    `family` names the key table of conversion and nothing else. `norm` is the kind of all norms, `norm_eps`
    their ε, `norm_offset` what is added to their scales (Gemma: 1). Token embeddings are multiplied by
    `embed_scale`, rounded to their dtype, and what each half of a layer adds by `residual_scale`; logits are
    divided by `logit_divisor`. A model with learned positions has a `position_offset`: their table is read
    at `position + position_offset`; None: there is no table.
    """

    family: str
    layers: tuple[LayerSpec, ...]
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    dtype: Dtype
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    position_offset: int | None = None
    final_norm: bool = True
    token_embed_dim: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ValueError(f"layers has {len(self.layers)} of them, it must have 1 to {MOST_LAYERS}")
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise ValueError(f"{name}={value!r:.80} must be an integer from 1 to {MOST}")
        check_fields(self)
        for name, least in (("position_offset", 0), ("token_embed_dim", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value} must be >= {least}, or None")
        for name in ("norm_eps", "logit_divisor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: query heads share KV heads"
            )
        if self.is_rotary and self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: rotary embedding turns pairs")
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            _check_rope(rope, self.head_dim)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def is_rotary(self) -> bool:
        """Whether any layer turns its queries and keys by position."""
        return any(layer.rope is not None for layer in self.layers)

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_position_rows(self) -> int:
        """P, rows of the learned position table (0 without one)."""
        return 0 if self.position_offset is None else self.max_positions + self.position_offset

    @property
    def most_positions(self) -> int:
        """Tokens of the longest context that the model can be used with."""
        reach = max(layer.rope.reach if layer.rope else 0 for layer in self.layers)
        return self.max_positions if self.position_offset is not None else max(self.max_positions, reach)

    def without_idle_windows(self) -> Self:
        """The same model, whose windows that no context outgrows are none: plans may cut such layers."""
        longest = self.most_positions

        def is_idle(layer):
            return layer.window is not None and layer.window >= longest

        layers = (replace(layer, window=None) if is_idle(layer) else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def with_positions(self, max_positions: int) -> Self:
        """The model for contexts of so many tokens, on which frequencies of `longrope` and `dynamic` depend.

        Raises `ValueError` for more than it can be used with.
        """
        most = self.most_positions
        if type(max_positions) is not int or not 1 <= max_positions <= most:
            raise ValueError(f"{max_positions=!r:.80} must be an integer from 1 to the model's {most}")
        return replace(self, max_positions=max_positions)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; unknown or missing fields raise `TypeError`.

        Also reads what releases before `LayerSpec` wrote, which describe all layers at once.
        """
        value = dict(value) if "layers" in value else _described_by_layer(value)
        layers = tuple(LayerSpec.from_json(layer) for layer in value.pop("layers"))
        return cls(layers=layers, **{**value, "eos_ids": tuple(value["eos_ids"])})


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if rope.kind == "dynamic" and head_dim < 4:
        raise ValueError(f"{head_dim=} must be >= 4 for 'dynamic' rotary scaling")
    if rope.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            if (count := len(getattr(rope, name))) != head_dim // 2:
                raise ValueError(f"{name} has {count} numbers, {head_dim // 2} are needed, one for each pair")


def _described_by_layer(value: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of format version 1: `num_layers`, and one rope and order of norms for all."""
    gated = value["family"] == "llama"
    layer = LayerSpec.from_json(
        {
            "rope": value["rope"],
            "norms": "pre" if value["pre_norm"] else "post",
            "mlp": "gated" if gated else "plain",
        }
    )
    names = {field.name for field in fields(ModelConfig)}
    if unknown := value.keys() - names - {"num_layers", "rope", "pre_norm"}:
        raise TypeError(f"unknown fields {sorted(unknown)}")
    kept = {name: value[name] for name in names & value.keys()}
    offset = None if value["rope"] is not None else value["position_offset"]
    return kept | {
        "layers": [asdict(each) for each in layer.repeated(value["num_layers"])],
        "norm": "rms" if gated else "layer",
        "position_offset": offset,
    }
