"""Shapes of well-known models, and random weights of them that lie on every device of a mesh."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.bench_calibration import LLAMA_2_13B
from benchmarks.bench_generate import LLAMA_2_7B
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.model.block import Block
from zdc_jax.model.params import embedding_shapes, layer_shapes, random_tree
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.parallel.payload import Payload, scale_for
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.parallel.weights import WeightPlacement
from zdc_jax.plan import CompressionPlan

SHAPES = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-2-13b": replace(LLAMA_2_13B, max_positions=2**18),
    "llama-3-8b": replace(
        LLAMA_2_7B,
        ffn_dim=14336,
        num_kv_heads=8,
        vocab_size=128256,
        layers=LayerSpec(rope=RopeConfig(theta=500_000.0)).repeated(32),
    ),
    "tiny": replace(
        LLAMA_2_7B,
        layers=LLAMA_2_7B.layers[:2],
        embed_dim=64,
        ffn_dim=96,
        vocab_size=97,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
    ),
}
ShapeName = Literal[*SHAPES]


class Model:
    """Random weights with a random basis after the rotary embedding, the same on every device.

    Each device makes them for itself: nothing comes from the host, and no device holds them twice, for what
    the methods below give is made of these very arrays where it keeps their dtype and division. A plan says
    how many of the first layers there are; the basis is there only where it has a window.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        on_each = partial(
            jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        layer, ends = jax.jit(on_each(self._layer)), jax.jit(on_each(self._ends))
        self.embeddings = ends(np.int32(0))
        self.layers = [layer(np.int32(1 + index)) for index in range(config.num_layers)]
        jax.block_until_ready(self.layers)

    def on_mesh(
        self,
        plan: CompressionPlan,
        weights: WeightPlacement = "replicated",
        payload: Payload = "native",
        *,
        decodes: bool = False,
    ) -> ShardedTransformer:
        """For prompts, and for single tokens if it `decodes`; what `gathered` and tokens need lies beside the
        whole."""
        scales = random_scales(self.config) if payload == "float8" else {}
        scaled = ({**layer, "attention": layer["attention"] | scales} for layer in self._of(plan))
        spec = self.config.layers[0]
        layers = (Block(layer, self.config, spec) for layer in scaled)
        ends = Embeddings(self.embeddings, self.config)
        options: Any = {"weights": weights, "payload": payload, "decodes": decodes}
        return ShardedTransformer(self.config, plan, ends, layers, self.mesh, **options)

    def on_each(self, plan: CompressionPlan) -> Transformer:
        """Of arrays that every device of the mesh holds, to be put on one or another."""
        return Transformer(self._cut(plan), plan, self.embeddings, self._of(plan))

    def on_first(self, plan: CompressionPlan, dtype: str) -> Transformer:
        """On this process's first device; converted where `dtype` is not that of the weights."""

        def local(tree):
            return jax.tree.map(lambda x: x.addressable_data(0).astype(dtype), tree)

        config = replace(self._cut(plan), dtype=dtype)
        return Transformer(config, plan, local(self.embeddings), map(local, self._of(plan)))

    def _cut(self, plan: CompressionPlan) -> ModelConfig:
        """The model with as many layers as the plan has."""
        return replace(self.config, layers=self.config.layers[: len(plan.layers)])

    def _ends(self, seed: jax.Array) -> Any:
        return random_tree(embedding_shapes(self.config), self.config, jax.random.key(seed))

    def _layer(self, seed: jax.Array) -> Any:
        config, key = self.config, jax.random.key(seed)
        weights = random_tree(layer_shapes(config, 0), config, key)
        shape = (config.num_kv_heads, config.head_dim, config.head_dim)
        basis = jnp.linalg.qr(jax.random.normal(key, shape))[0].astype(jnp.float16)
        weights["attention"] |= {"q_rotation": basis, "k_rotation": basis}
        return weights

    def _of(self, plan: CompressionPlan) -> Iterator[Any]:
        for layer, _ in zip(self.layers, plan.layers, strict=False):
            attention = layer["attention"]
            if not any(plan.near(0)):
                attention = {name: x for name, x in attention.items() if "rotation" not in name}
            yield {**layer, "attention": attention}


def random_scales(config: ModelConfig) -> dict[str, jax.Array]:
    """Scales of a float8 payload for random weights: normal matrices give every coordinate this mean square.

    Inputs are normalised to a mean square of 1, weights are N(0, 0.02²), and the basis is orthogonal.
    """
    rms = np.full((config.num_kv_heads, config.head_dim), 0.02 * config.embed_dim**0.5)
    scale = jnp.asarray(scale_for(rms), config.dtype)
    return {"q_scale": scale, "k_scale": scale, "v_scale": scale}
