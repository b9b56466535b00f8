"""Model architecture: `ModelConfig`, and `LayerSpec` and `RopeConfig` of its layers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from zdc_jax.fields import MOST, check_fields

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes of stored weights and of computation."""
DTYPES = get_args(Dtype)
MAX_LAYERS = 4096
"""Largest number of layers. It bounds the memory that a corrupt configuration can request."""


_POSITIVE = (
    *("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    *("attention_factor", "beta_fast", "beta_slow"),
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding, used by `zdc_jax.ops.rotary.rope_frequencies`.

    Attributes:
      theta: base of the frequencies.
      kind: scaling of the frequencies for contexts longer than those of training.
      factor: ratio of the extended context to that of training; all kinds except `default` and `longrope`.
      low_freq_factor, high_freq_factor: bounds of the blend of `llama3`, in full turns of a pair within
        `original_max_positions`.
      original_max_positions: context length of training, in tokens; `llama3`, `yarn`, `longrope`, `dynamic`.
      attention_factor: factor on q and on k; `yarn`, `longrope`.
      beta_fast, beta_slow: bounds of the blend of `yarn`, in full turns of a pair within
        `original_max_positions`.
      truncate: whether the blend of `yarn` begins and ends at whole pairs.
      short_factors, long_factors: divisors of the frequencies [H/2] of `longrope`, for contexts up to
        `original_max_positions` and for longer ones.
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
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.kind == "yarn" and not self.theta > 1:
            raise ValueError(f"theta={self.theta} must be > 1 for kind='yarn'")

    @property
    def extended_positions(self) -> int:
        """Context length that the scaling is designed for, in tokens; 0 for kinds that do not define it."""
        return int(self.factor * self.original_max_positions) if self.kind in ("yarn", "dynamic") else 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a `RopeConfig` from the output of `dataclasses.asdict`. Unknown fields raise `TypeError`."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items()}
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Architecture of one layer, as defined by the checkpoint. A plan can only shorten its window.

    Attributes:
      window: sliding window in tokens, including the query's own; None: full causal attention.
      rope: rotary embedding of queries and keys; None: no rotary embedding.
      scale: factor on the scores q·k; None: 1/√H.
      qk_norm: whether queries and keys are RMS-normalized over the head dim, before the rotary embedding.
      norms: position of the norms. `pre`: on the input of attention and MLP. `post`: on the residual sum
        after each of them (OPT-350m). `sandwich`: on the input and on the output, before the residual sum
        (Gemma).
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
        """Return the factor on the scores q·k for q and k returned by `zdc_jax.ops.rotary.rotate`."""
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return scale if self.rope is None else scale * self.rope.attention_factor**2

    def repeated(self, num_layers: int) -> "tuple[LayerSpec, ...]":
        """Return this layer `num_layers` times; raise `ValueError` unless the count is 1 to `MAX_LAYERS`."""
        if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
            raise ValueError(f"{num_layers=!r} must be an integer from 1 to {MAX_LAYERS}")
        return (self,) * num_layers

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a `LayerSpec` from the output of `dataclasses.asdict`. Unknown fields raise `TypeError`."""
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

    Attributes:
      family: name of the key table used for conversion.
      layers: architecture of each layer.
      embed_dim: width of the residual stream (D).
      ffn_dim: width of the MLP (F).
      vocab_size: number of token ids (V).
      num_heads: number of query heads (N).
      num_kv_heads: number of KV heads (K).
      head_dim: width of a head (H).
      max_positions: longest context, in tokens.
      norm: kind of all norms.
      norm_eps: ε of the norms.
      activation: activation function of the MLP.
      dtype: dtype of the stored weights.
      tie_embeddings: whether the output head shares the token embeddings.
      qkv_bias, out_bias, mlp_bias: whether these projections have biases.
      norm_offset: number added to the scales of the norms (Gemma: 1).
      embed_scale: factor on the token embeddings, rounded to their dtype.
      residual_scale: factor on the outputs of attention and MLP before they are added to the residual stream.
      logit_divisor: divisor of the logits.
      position_offset: offset into the table of learned positions, which is read at
        `position + position_offset`; None: no learned positions.
      final_norm: whether there is a norm before the output head.
      token_embed_dim: width of the token embeddings (E) if it differs from `embed_dim`.
      bos_id: beginning-of-sequence token id.
      eos_ids: end-of-sequence token ids.
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
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"layers has {len(self.layers)} entries, it must have 1 to {MAX_LAYERS}")
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
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        if self.is_rotary and self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: the rotary embedding rotates pairs of coordinates"
            )
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            _check_rope(rope, self.head_dim)

    @property
    def num_layers(self) -> int:
        """Number of layers (L)."""
        return len(self.layers)

    @property
    def is_rotary(self) -> bool:
        """Whether any layer has a rotary embedding."""
        return any(layer.rope is not None for layer in self.layers)

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_position_rows(self) -> int:
        """Length of the table of learned positions (P); 0 if the model has none."""
        return 0 if self.position_offset is None else self.max_positions + self.position_offset

    @property
    def most_positions(self) -> int:
        """Longest context that `with_positions` allows, in tokens."""
        if self.position_offset is not None:
            return self.max_positions
        ropes = (layer.rope for layer in self.layers if layer.rope is not None)
        return max([self.max_positions, *(rope.extended_positions for rope in ropes)])

    def without_idle_windows(self) -> Self:
        """Return the model without sliding windows that cover its longest context.

        Plans can reduce the ranks of such layers, unlike those of sliding-window layers.
        """
        longest = self.most_positions

        def is_idle(layer: LayerSpec) -> bool:
            return layer.window is not None and layer.window >= longest

        layers = (replace(layer, window=None) if is_idle(layer) else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def with_positions(self, max_positions: int) -> Self:
        """Return the model with another longest context, in tokens.

        The rotary frequencies of `longrope` and `dynamic` depend on it.

        Raises:
          ValueError: `max_positions` exceeds `most_positions`.
        """
        most = self.most_positions
        if type(max_positions) is not int or not 1 <= max_positions <= most:
            raise ValueError(f"{max_positions=!r:.80} must be an integer from 1 to the model's {most}")
        return replace(self, max_positions=max_positions)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a configuration from the output of `to_json`; raise `TypeError` for wrong field names.

        Objects without `layers` are of format version 1, which describes all layers at once.
        """
        value = dict(value) if "layers" in value else _convert_version_1(value)
        layers = tuple(LayerSpec.from_json(layer) for layer in value.pop("layers"))
        return cls(layers=layers, **{**value, "eos_ids": tuple(value["eos_ids"])})


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if rope.kind == "dynamic" and head_dim < 4:
        raise ValueError(f"{head_dim=} must be >= 4 for kind='dynamic'")
    if rope.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            if (count := len(getattr(rope, name))) != head_dim // 2:
                raise ValueError(
                    f"{name} has {count} numbers, it must have {head_dim // 2}, one per rotary pair"
                )


def _convert_version_1(value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration of format version 1: `num_layers`, with one rope and norm order for all."""
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
    common = {name: value[name] for name in names & value.keys()}
    offset = None if value["rope"] is not None else value["position_offset"]
    return common | {
        "layers": [asdict(each) for each in layer.repeated(value["num_layers"])],
        "norm": "rms" if gated else "layer",
        "position_offset": offset,
    }
