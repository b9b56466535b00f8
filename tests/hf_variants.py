"""Tiny random Hugging Face checkpoints of every supported variant, by numpy and safetensors alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 96
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 48,
    "activation_function": "relu",
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


RELATIVE = {name: LLAMA[name] for name in LLAMA if name != "rope_theta"} | {
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MISTRAL = RELATIVE | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 16,
    "sliding_window": 8,
}
QWEN2 = RELATIVE | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 1,
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
GEMMA3 = {name: RELATIVE[name] for name in RELATIVE if name not in ("hidden_act", "rope_parameters")} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
GRANITE = RELATIVE | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
PHI3 = RELATIVE | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "pad_token_id": 0,
    "sliding_window": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SHORT_FACTORS = [1.0 + 0.05 * pair for pair in range(6)]
LONG_FACTORS = [1.0 + 1.5 * pair for pair in range(6)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT_FACTORS,
    "long_factor": LONG_FACTORS,
}


@dataclass(frozen=True)
class Variant:
    """A `config.json`, and the context length to load it for (None: all positions)."""

    config: dict[str, Any]
    max_positions: int | None = None


def rope(**settings: Any) -> dict[str, Any]:
    """Return rotary settings in the new form."""
    return {"rope_parameters": settings}


VARIANTS = {
    "llama-mha": Variant(LLAMA),
    "llama-gqa": Variant(LLAMA | {"num_key_value_heads": 2}),
    "llama-mqa": Variant(LLAMA | {"num_key_value_heads": 1}),
    "llama-tied": Variant(LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": Variant(LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-old": Variant(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-linear-new": Variant(LLAMA | rope(rope_type="linear", factor=4.0, rope_theta=5000.0)),
    "llama3-old": Variant(LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}),
    "llama3-new": Variant(LLAMA | rope(rope_type="llama3", rope_theta=500.0, **LLAMA3_ROPE)),
    "llama-yarn": Variant(LLAMA | rope(**YARN)),
    "llama-yarn-untruncated": Variant(
        LLAMA | rope(**YARN, truncate=False, mscale=0.7, mscale_all_dim=1.1, beta_fast=4, beta_slow=2)
    ),
    # Its positions are those of training, and contexts of 24 are longer.
    "llama-dynamic": Variant(
        LLAMA | {"max_position_embeddings": 16} | rope(rope_type="dynamic", factor=4.0, rope_theta=1e4), 24
    ),
    "llama-dynamic-short": Variant(LLAMA | rope(rope_type="dynamic", factor=4.0, rope_theta=1e4)),
    "llama-longrope": Variant(LLAMA | rope(**LONGROPE, original_max_position_embeddings=16)),
    "llama-head-dim-80": Variant(LLAMA | {"head_dim": 80, "num_key_value_heads": 2}),
    "llama-gelu": Variant(LLAMA | {"hidden_act": "gelu"}),
    "mistral": Variant(MISTRAL),
    "mistral-whole": Variant(MISTRAL | {"sliding_window": None}),
    "mistral-idle-window": Variant(MISTRAL | {"sliding_window": 128}),
    "qwen2": Variant(QWEN2),
    "qwen2-sliding": Variant(QWEN2 | {"use_sliding_window": True}),
    "qwen3": Variant(QWEN3 | rope(**YARN)),
    "qwen3-sliding": Variant(
        QWEN3 | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gemma3": Variant(
        GEMMA3
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | rope(
            sliding_attention={"rope_type": "default", "rope_theta": 500.0},
            full_attention={"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        )
    ),
    "gemma3-old": Variant(
        GEMMA3
        | {"sliding_window_pattern": 3, "rope_theta": 2e4, "rope_local_base_freq": 700.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ),
    "granite": Variant(GRANITE),
    "phi3": Variant(PHI3 | {"sliding_window": 12}),
    "phi3-long": Variant(
        PHI3
        | {"original_max_position_embeddings": 16}
        | rope(**LONGROPE, original_max_position_embeddings=16)
    ),
    "phi3-short": Variant(PHI3 | rope(**LONGROPE, original_max_position_embeddings=32), max_positions=32),
    "phi3-old": Variant(PHI3 | {"rope_scaling": LONGROPE}, max_positions=24),
    "opt": Variant(OPT),
    "opt-350m-like": Variant(OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": Variant(OPT | {"enable_bias": False}),
    "opt-no-final-norm": Variant(OPT | {"_remove_final_layer_norm": True}),
}


def shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Return shapes by source key, from the architectures' definitions rather than our key tables."""
    config = variant.config
    return _opt_shapes(config) if config["model_type"] == "opt" else _llama_shapes(config)


def _llama_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Llama and related architectures."""
    D, F, N, K = (
        c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    H, kind = c.get("head_dim", D // N), c["model_type"]
    keys: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        keys["lm_head.weight"] = (VOCAB, D)
    matrices = {
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    if kind == "phi3":
        qkv, gate_up = ((N + 2 * K) * H, D), (2 * F, D)
        kept = {name: matrices[name] for name in ("self_attn.o_proj", "mlp.down_proj")}
        matrices = kept | {"self_attn.qkv_proj": qkv, "mlp.gate_up_proj": gate_up}
    biased = [name for name in matrices if c.get("mlp_bias" if "mlp" in name else "attention_bias")]
    if kind == "qwen2":
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    vectors = {f"{name}.bias": matrices[name][0] for name in biased}
    vectors |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), D)
    if kind in ("qwen3", "gemma3_text"):
        vectors |= {"self_attn.q_norm.weight": H, "self_attn.k_norm.weight": H}
    if kind == "gemma3_text":
        vectors |= dict.fromkeys(("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), D)
    for i in range(c["num_hidden_layers"]):
        keys |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
        keys |= {f"model.layers.{i}.{name}": (size,) for name, size in vectors.items()}
    return keys


def _opt_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, F, E = c["hidden_size"], c["ffn_dim"], c["word_embed_proj_dim"]
    at = "model.decoder."
    keys: dict[str, tuple[int, ...]] = {
        at + "embed_tokens.weight": (VOCAB, E),
        at + "embed_positions.weight": (c["max_position_embeddings"] + 2, D),
    }
    if E != D:
        keys |= {at + "project_in.weight": (D, E), at + "project_out.weight": (E, D)}
    norms = []
    if c["do_layer_norm_before"] and not c.get("_remove_final_layer_norm"):
        norms.append(at + "final_layer_norm")
    for i in range(c["num_hidden_layers"]):
        layer = f"{at}layers.{i}."
        norms += [layer + "self_attn_layer_norm", layer + "final_layer_norm"]
        matrices = {f"self_attn.{name}_proj": (D, D) for name in ("q", "k", "v", "out")}
        for name, shape in (matrices | {"fc1": (F, D), "fc2": (D, F)}).items():
            keys[f"{layer}{name}.weight"] = shape
            if c.get("enable_bias", True):
                keys[f"{layer}{name}.bias"] = shape[:1]
    for norm in norms:
        keys |= {norm + ".weight": (D,), norm + ".bias": (D,)}
    return keys


def weights(variant: Variant) -> dict[str, np.ndarray]:
    """Return deterministic float32 weights, large enough for logits far from uniform."""
    values = {}
    for index, (key, shape) in enumerate(sorted(shapes(variant).items())):
        draw = np.random.Generator(np.random.PCG64(index)).standard_normal(shape)
        scale = 0.2 if len(shape) == 2 else 0.1
        is_norm = "norm" in key and key.endswith("weight")
        around = 1.0 if is_norm and variant.config["model_type"] != "gemma3_text" else 0.0
        values[key] = (around + scale * draw).astype(np.float32)
    return values


def write_variant(name: str, folder: Path) -> Path:
    """Write one variant as a Hugging Face folder with a tiny tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    variant = VARIANTS[name]
    (folder / "config.json").write_text(json.dumps(variant.config))
    save_file(weights(variant), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_sharded(folder: Path, tensors: dict[str, np.ndarray], count: int) -> None:
    """Write `count` shards, with keys dealt round-robin, and their index."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {key: names[i % count] for i, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key, shard in weight_map.items() if shard == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_tokenizer(folder: Path, size: int = VOCAB) -> None:
    """Write a word-level tokenizer of `size` tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def token_ids(vocab: int, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return deterministic token ids [B, T], int64."""
    return np.random.Generator(np.random.PCG64(seed)).integers(3, vocab, shape)
