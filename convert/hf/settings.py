"""Settings of `config.json` that several families share, read and written."""

from collections.abc import Mapping
from typing import Any

from zdc_jax.config import Activation, RopeConfig
from zdc_jax.errors import ConversionError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean setting, `default` where it is absent or null; raises `ConversionError` for another type."""
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConversionError(f"{name}={value!r:.80} must be true or false")
    return value


def activation(name: Any) -> Activation:
    """Our name of an activation; raises `ConversionError` for an unsupported one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConversionError(
            f"activation {name!r:.80} is not supported; supported are {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both the old form (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`).

    A missing setting raises `KeyError`, an unsupported type `ConversionError`.
    """
    settings = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_scaling") or {}),
    }
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=float(settings["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_max_positions=int(settings["original_max_position_embeddings"]),
        )
    raise ConversionError(
        f"rope type {kind!r:.80} is not supported; supported are ['default', 'linear', 'llama3']"
    )


def rope_settings(rope: RopeConfig | None) -> dict[str, Any]:
    """`rope_parameters`; inverse of `parse_rope`."""
    if rope is None:
        return {}
    settings: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        settings["factor"] = rope.factor
    if rope.kind == "llama3":
        settings |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return settings
