"""Folder of a known shape with random weights, which `zdc serve` and `vllm serve` can both serve.

    python -m benchmarks.serving.random_folder --shape llama-3-8b --output model

The folder is a converted one, with a random basis, so that presets such as `3bit` run without calibration.
Its `config.json` lets vLLM serve it with `--load-format dummy`. The tokenizer has one word per token.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.model.models import ShapeName, find_shape, write_config
from benchmarks.random_weights import random_tree
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import TOKENIZER, CheckpointWriter
from zdc_jax.config import ModelConfig
from zdc_jax.model.params import embedding_shapes, layer_shapes


@dataclass(frozen=True)
class Options:
    """Options of the folder.

    Attributes:
      output: folder to write.
      layers: layers of the shape, fewer for a trial.
    """

    output: Path
    shape: ShapeName = "llama-3-8b"
    layers: int | None = None


def write_folder(options: Options) -> None:
    """Write the folder; it appears only once its weights are complete.

    Raises:
      CheckpointError: the folder exists or cannot be written.
    """
    config, key = find_shape(options.shape, options.layers), jax.random.key(0)
    make_layer = jax.jit(partial(random_tree, layer_shapes(config, 0), config))  # Layers are alike.
    with CheckpointWriter(options.output) as writer:
        write_config(options.shape, writer.partial, layers=options.layers, config=None)
        writer.write_file(TOKENIZER, make_tokenizer(config.vocab_size).to_str())
        # Without this file transformers would look for the tokenizer of the model's family.
        writer.write_file("tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        writer.write_embeddings(random_tree(embedding_shapes(config), config, key))
        for index in range(config.num_layers):
            writer.write_layer(index, make_layer(jax.random.fold_in(key, 1 + index)))
        checkpoint = writer.finish(config, {"name": options.shape, "weights": "random"})
    basis = make_random_basis(config, checkpoint.fingerprint)
    checkpoint.calibration_path.mkdir()
    basis.save(checkpoint.calibration_path / "basis")


def make_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of the words `w0`, `w1`, …, so that each token has a text of its own."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_random_basis(config: ModelConfig, fingerprint: str) -> Basis:
    """Return an orthogonal basis whose coordinates all have a root mean square of 1.

    Keys of all layers leave out a mean, the costliest case of a calibrated model.
    """
    rng = np.random.default_rng(0)
    heads, H = (config.num_layers, config.num_kv_heads), config.head_dim

    def draw_rotations() -> np.ndarray:
        return np.linalg.qr(rng.normal(size=(*heads, H, H)))[0]

    ones = np.ones((*heads, H))
    return replace(
        Basis.identity(*heads, H),
        k_map=draw_rotations(),
        v_map=draw_rotations(),
        key_shift=rng.normal(size=(*heads, H)),
        shifted=[True] * config.num_layers,
        q_rms=ones,
        k_rms=ones,
        v_rms=ones,
        num_tokens=1,
        context_length=config.max_positions,
        fingerprint=fingerprint,
    )


if __name__ == "__main__":
    write_folder(tyro.cli(Options))
