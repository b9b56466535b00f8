"""`ModelConfig`: everything about a model that is not a weight."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from zdc_jax.fields import MOST, check_fields

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
MOST_LAYERS = 4096
"""Bound on what a configuration may ask for; deeper models do not exist."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; `factor` is used by `linear` and `llama3`, the last three by `llama3` only."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be > 0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"{self.low_freq_factor=} must be below {self.high_freq_factor=}")


_COUNTS = (
    "num_layers",
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
    """Architecture of one decoder-only model (Llama or OPT family).

    Widths are counts of coordinates, `max_positions` counts tokens, `dtype` is that of the stored weights.
    `rope is None` means learned positions, whose table is read at `position + position_offset`.
    """

    family: Literal["llama", "opt"]
    num_layers: int
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    dtype: Literal["float32", "bfloat16", "float16"]
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig | None = None
    position_offset: int = 0
    pre_norm: bool = True
    final_norm: bool = True
    token_embed_dim: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else MOST
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r:.80} must be an integer from 1 to {most}")
        check_fields(self)
        if self.position_offset < 0 or (self.token_embed_dim is not None and self.token_embed_dim < 1):
            raise ValueError(f"{self.position_offset=} must be >= 0 and {self.token_embed_dim=} >= 1 or None")
        if not isinstance(self.norm_eps, float) or not self.norm_eps > 0:
            raise ValueError(f"norm_eps={self.norm_eps!r} must be a number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: query heads share KV heads"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: rotary embedding turns pairs")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_position_rows(self) -> int:
        """P, rows of the learned position table (0 for rotary models)."""
        return 0 if self.rope is not None else self.max_positions + self.position_offset

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Inverse of `to_json`; unknown or missing fields raise `TypeError`."""
        rope = value["rope"]
        return cls(
            **{
                **value,
                "rope": None if rope is None else RopeConfig(**rope),
                "eos_ids": tuple(value["eos_ids"]),
            }
        )
