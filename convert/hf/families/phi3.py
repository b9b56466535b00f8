"""Phi-3: Llama with q, k and v stored as one matrix, gate and up as another; all layers may be sliding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.hf.families import llama
from convert.hf.settings import parse_rope
from zdc_jax.config import LayerSpec, ModelConfig

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


def _parse(raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    rope = parse_rope({"original_max_position_embeddings": 4096, **raw} | _rename_rope(raw))
    layer = LayerSpec(rope=rope, window=raw.get("sliding_window"))
    layers = layer.repeated(raw["num_hidden_layers"])
    return llama.parse_shared(raw, layers=layers, norm_eps=raw.get("rms_norm_eps", 1e-5), **common)


def _rename_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings with `longrope` for what early releases called `su` or `yarn`."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    settings = raw.get(name) or {}
    kind = settings.get("rope_type", settings.get("type"))
    return {name: settings | {"rope_type": "longrope"}} if kind in ("su", "yarn") else {}


FAMILY = replace(
    llama.FAMILY,
    architecture="Phi3ForCausalLM",
    parse=_parse,
    layer={
        **llama.FAMILY.layer,
        **dict.fromkeys(("attention/q", "attention/k", "attention/v"), QKV),
        **dict.fromkeys(("mlp/gate", "mlp/up"), GATE_UP),
    },
)
