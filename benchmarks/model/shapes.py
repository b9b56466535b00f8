"""Models of well-known shapes with random weights, for timing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.sequence_models import SHAPES
from benchmarks.transferred_plans import transferred
from zdc_jax.cache.kv_cache import cache_bytes
from zdc_jax.config import ModelConfig
from zdc_jax.loading import LanguageModel, load
from zdc_jax.model.params import embedding_shapes, layer_shapes, random_tree
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan


def load_side(*, shape: str, folder: Path | None, plan: Path | None, layers: int | None) -> LanguageModel:
    """Return a converted folder's model, or one of a shape with random weights, under a plan or none."""
    if folder is not None:
        return load(folder, plan)
    config = find_shape(shape, layers)
    if plan is None:
        return LanguageModel(make_network(config, CompressionPlan.full(config), has_basis=False))
    chosen = transferred(CompressionPlan.load(plan), config, growth=1)
    return LanguageModel(make_network(config, chosen, has_basis=True))


def find_shape(name: str, layers: int | None) -> ModelConfig:
    """Return the configuration of a shape, cut to its first layers if a number is given."""
    config = SHAPES[name]
    return replace(config, layers=config.layers[:layers])


def make_network(config: ModelConfig, plan: CompressionPlan, *, has_basis: bool) -> Transformer:
    """Return a network with random weights made on the device, and a random orthogonal basis of q and k."""
    key = jax.random.key(0)

    @jax.jit
    def make_layer(key: jax.Array) -> Any:
        weights = random_tree(layer_shapes(config, 0), config, key)
        if has_basis:
            size = (config.num_kv_heads, config.head_dim, config.head_dim)
            basis = jnp.linalg.qr(jax.random.normal(key, size))[0].astype(jnp.float16)
            weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    layers = (make_layer(jax.random.fold_in(key, 1 + index)) for index in range(config.num_layers))
    return Transformer(config, plan, random_tree(embedding_shapes(config), config, key), layers)


def fits(plan: CompressionPlan, *, tokens: int, share: float) -> int:
    """Return the sequences of so many tokens whose caches fit into a share of the free memory.

    A device without memory statistics (a CPU) has room for one.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats:
        return 1
    free = share * (stats["bytes_limit"] - stats["bytes_in_use"])
    return int(free // cache_bytes(plan.layer_caches("bfloat16"), tokens))


def write_config(shape: str, folder: Path, *, layers: int | None, config: Path | None) -> int:
    """Write config.json of a Llama of this shape, or copy one, and return its vocabulary's size."""
    if config is not None:
        shutil.copy(config, folder / "config.json")
        return json.loads(config.read_text())["vocab_size"]
    model = find_shape(shape, layers)
    rope = model.layers[0].rope
    assert rope is not None
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.embed_dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return model.vocab_size
