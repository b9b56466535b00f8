"""Tiny random Hugging Face checkpoints of every supported variant; needs numpy and safetensors only."""

import json
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Variant:
    """A `config.json`, and what each layer has that Llama's have not: source key → length of the vector."""

    config: dict[str, Any]
    vectors: dict[str, int] = field(default_factory=dict)


VARIANTS = {
    "llama-mha": Variant(LLAMA),
    "llama-gqa": Variant(LLAMA | {"num_key_value_heads": 2}),
    "llama-mqa": Variant(LLAMA | {"num_key_value_heads": 1}),
    "llama-tied": Variant(LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": Variant(LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-old": Variant(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-linear-new": Variant(
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}
    ),
    "llama3-old": Variant(LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}),
    "llama3-new": Variant(
        LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3_ROPE}}
    ),
    "llama-head-dim-80": Variant(LLAMA | {"head_dim": 80, "num_key_value_heads": 2}),
    "llama-gelu": Variant(LLAMA | {"hidden_act": "gelu"}),
    "opt": Variant(OPT),
    "opt-350m-like": Variant(OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": Variant(OPT | {"enable_bias": False}),
    "opt-no-final-norm": Variant(OPT | {"_remove_final_layer_norm": True}),
}


def shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Source key → shape, written from the architectures' definitions, not from our key tables."""
    config = variant.config
    if config["model_type"] == "opt":
        return _opt_shapes(config)
    layers = range(config["num_hidden_layers"])
    more = {f"model.layers.{i}.{key}": (size,) for i in layers for key, size in variant.vectors.items()}
    return _llama_shapes(config) | more


def _llama_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, F, N, K = (
        c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    H = c.get("head_dim", D // N)
    keys: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        keys["lm_head.weight"] = (VOCAB, D)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        keys |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
        for name, out, into, bias in (
            ("self_attn.q_proj", N * H, D, "attention_bias"),
            ("self_attn.k_proj", K * H, D, "attention_bias"),
            ("self_attn.v_proj", K * H, D, "attention_bias"),
            ("self_attn.o_proj", D, N * H, "attention_bias"),
            ("mlp.gate_proj", F, D, "mlp_bias"),
            ("mlp.up_proj", F, D, "mlp_bias"),
            ("mlp.down_proj", D, F, "mlp_bias"),
        ):
            keys[f"{at}{name}.weight"] = (out, into)
            if c.get(bias):
                keys[f"{at}{name}.bias"] = (out,)
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
    """Deterministic float32 weights, large enough that logits are far from flat."""
    values = {}
    for index, (key, shape) in enumerate(sorted(shapes(variant).items())):
        draw = np.random.Generator(np.random.PCG64(index)).standard_normal(shape)
        scale = 0.2 if len(shape) == 2 else 0.1
        around = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        values[key] = (around + scale * draw).astype(np.float32)
    return values


def write_variant(name: str, folder: Path) -> Path:
    """Writes one variant as a Hugging Face folder with a tiny tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    variant = VARIANTS[name]
    (folder / "config.json").write_text(json.dumps(variant.config))
    save_file(weights(variant), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_sharded(folder: Path, tensors: dict[str, np.ndarray], count: int) -> None:
    """Writes `count` shards, keys dealt round robin, and their index."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {key: names[i % count] for i, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key, shard in weight_map.items() if shard == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_tokenizer(folder: Path, size: int = VOCAB) -> None:
    """A word-level tokenizer of `size` tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def token_ids(vocab: int, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Deterministic token ids [B, T], int64."""
    return np.random.Generator(np.random.PCG64(seed)).integers(3, vocab, shape)
