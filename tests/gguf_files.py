"""Tiny GGUF files of the variants in `hf_variants`, in the layout of llama.cpp's converter."""

import lzma
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    quantize,
)
from hf_variants import LLAMA, VARIANTS, VOCAB, Variant, weights
from tokenizers import pre_tokenizers

from convert.conversion import convert
from zdc_jax import Checkpoint

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "Phi3ForCausalLM": "phi3",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
VARIANTS_IN_GGUF = (
    *("llama-mha", "llama-gqa", "llama-mqa", "llama-tied", "llama-biases", "llama-linear-old"),
    *("llama-linear-new", "llama3-old", "llama3-new", "llama-yarn", "llama-head-dim-80", "mistral-whole"),
    *("qwen2", "qwen3", "gemma3", "granite", "phi3", "phi3-long", "phi3-short"),
)
"""All variants that files can describe. The scale of Gemma 3's scores follows from its size."""
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*SPECIAL, *BYTES[: VOCAB - 5], "Ġa", "ab"],
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
"""A tokenizer of some single bytes."""
PIECE = 1 << 16
"""Characters per topic that `texts` returns."""


def in_gguf(name: str) -> Variant:
    """Return a variant, as far as files can describe it."""
    variant = VARIANTS[name]
    scale = {"query_pre_attn_scalar": variant.config.get("head_dim")} if name == "gemma3" else {}
    return Variant(variant.config | scale, variant.max_positions)


def gguf_tensors(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Hugging Face's tensors under the names and in the layout of GGUF files."""
    kind = ARCHITECTURES[config["architectures"][0]]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for key, value in tensors.items():
        stem, _, suffix = key.rpartition(".")
        prefix, layer, name = "", "", stem
        if stem.startswith("model.layers."):
            _, _, layer, name = stem.split(".", 3)
            prefix = f"blk.{layer}."
        short = (GEMMA_NAMES if kind == "gemma3" else NAMES)[name]
        if kind in ("llama", "granite") and short in heads:
            halves = value.reshape(heads[short], 2, -1, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if kind == "gemma3" and name.endswith("norm"):
            value = value + np.float32(1)
        found[f"{prefix}{short}.{suffix}"] = value
    return found | rope_tensors(config)


def rope_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the factors of Llama 3's and Phi-3's rotary embeddings."""
    rope = _rope(config)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "long_factor" in rope:
        both = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{name}.weight": np.array(x, np.float32) for name, x in both.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    factors, original = [], rope["original_max_position_embeddings"]
    for index in range(dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * index / dim)
        share = (original / wave - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        share = min(max(share, 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of full attention, in the new form."""
    old = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_scaling") or {})}
    rope = dict(config.get("rope_parameters") or old)
    rope = rope.get("full_attention", rope)
    return rope | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}


def gguf_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an architecture; keys lack its name."""
    heads, rope = config["num_attention_heads"], _rope(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": VOCAB,
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = RopeScalingType(rope["rope_type"]).value
        values["rope.scaling.factor"] = float(rope["factor"])
    if original := config.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings")
    ):
        values["rope.scaling.original_context_length"] = original
    if config["model_type"] == "gemma3_text":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        values |= {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": float(local)}
        values["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config["layer_types"]
        ]
    if config["model_type"] == "granite":
        names = {"attention": "attention.scale", "embedding": "embedding_scale", "residual": "residual_scale"}
        values |= {key: float(config[f"{name}_multiplier"]) for name, key in names.items()}
        values["logit_scale"] = float(config["logits_scaling"])
    if config["model_type"] == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if "long_factor" in rope:
        scale, original = (
            config["max_position_embeddings"] / original,
            values["rope.scaling.original_context_length"],
        )
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return values


def write_gguf(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    tokenizer: Mapping[str, Any] = WORDS,
    kind: GGMLQuantizationType = F32,
    blocks: Mapping[str, tuple[GGMLQuantizationType, np.ndarray]] | None = None,
    parts: int = 1,
) -> Path:
    """Write a file or its parts, and return the path of the first.

    Args:
      path: path to write; parts are named after it.
      architecture: its name in files.
      values: metadata of the architecture; keys lack its name.
      tensors: tensors by their names in files; matrices are quantized to `kind`.
      tokenizer: metadata with whole keys.
      kind: type of matrices.
      blocks: tensors that are already quantized.
      parts: number of files; each has a run of tensors.
    """
    written = {
        name: (kind, quantize(value, kind)) if value.ndim > 1 else (F32, value)
        for name, value in tensors.items()
    } | dict(blocks or {})
    names = sorted(written)
    paths = [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    paths = [path] if parts == 1 else paths
    for index, part in enumerate(paths):
        writer = GGUFWriter(part, architecture)
        if index == 0:
            for key, value in [*((f"{architecture}.{k}", v) for k, v in values.items()), *tokenizer.items()]:
                add_value(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(names))
        for name in names[index * len(names) // parts : (index + 1) * len(names) // parts]:
            form, value = written[name]
            raw = None if value.dtype == np.float32 and form is F32 else form
            writer.add_tensor(name, value, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a value with the type that converters use."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    writer.add_array(key, value) if isinstance(value, list) else add[type(value)](key, value)


def write_variant_gguf(name: str, path: Path, **options: Any) -> Path:
    """Write one variant."""
    config = in_gguf(name).config
    tensors = gguf_tensors(config, weights(VARIANTS[name]))
    architecture = ARCHITECTURES[config["architectures"][0]]
    return write_gguf(path, architecture, gguf_values(config), tensors, **options)


def texts(corpus: Path) -> list[str]:
    """Return the start of the held-out text of each topic."""
    found = []
    for path in sorted(corpus.glob("*/heldout.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
            found.append(file.read(PIECE))
    return found


def converted(source: Path, **options: Any) -> Checkpoint:
    """Convert a source into a folder next to it."""
    return convert(source, source.with_name(f"{source.stem}-ours"), progress=False, **options)


WIDE = Variant(LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
"""A variant whose rows are whole blocks of every type."""


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """Return random blocks whose exponents lack their highest bits, so that no value is NaN or Inf."""
    rng = np.random.Generator(np.random.PCG64(int(kind)))
    block, size = GGML_QUANT_SIZES[kind]
    return rng.integers(256, size=(*shape[:-1], shape[-1] // block * size), dtype=np.uint8) & 0x3B
