"""`convert`: a model as others publish it → a converted folder, layer by layer."""

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from convert.gguf.source import GGUFFile
from convert.hf.folder import HFFolder
from convert.hf.weights import Entry, entries, is_finite, resolve
from convert.progress import track
from convert.source import Source
from zdc_jax.checkpoint import Checkpoint, CheckpointWriter
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as

logger = logging.getLogger("zdc_jax")

VERIFIED_SHAPE = (2, 64)
"""Rows and tokens that `verify_against_transformers` gives both models."""
MOST_SPARE_TOKENS = 1024
"""Added tokens past a model's vocabulary: Gemma's tokenizer has one for images."""


def open_source(path: Path) -> Source:
    """A `.gguf` file, or a Hugging Face folder."""
    return GGUFFile(path) if path.is_file() or path.suffix == ".gguf" else HFFolder(path)


def convert(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Checkpoint:
    """Converts a Hugging Face folder or a GGUF file; all that headers tell is checked before writing.

    Streams: the embeddings, then one layer at a time; the peak is about three times the larger of the two,
    whatever the depth. The output appears complete or not at all.

    Args:
      source: folder with config.json, safetensors (one file or shards) and a tokenizer; or a `.gguf` file, or
        one of the parts of a split one.
      output: folder to write.
      dtype: dtype to store; default that of most source tensors, and bfloat16 where these are quantised.
      overwrite: replace an existing converted folder, its calibration included.
      progress: show how far it has come, on standard error.

    Raises:
      ConversionError: the source is not supported, damaged or incomplete, or lies in the output.
      CheckpointError: the output exists, or the disk is full.
    """
    path = Path(source)
    if path.resolve().is_relative_to(Path(output).resolve()):
        raise ConversionError(f"output={str(output)!r} must not be or hold the source {str(source)!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype={dtype!r} must be one of {DTYPES}")
    model = open_source(path)
    model.config("float32")  # An unsupported model is refused before its weights are looked at.
    weights = model.weights
    config = model.config(dtype or weights.dtype)
    keys = resolve(config, weights)
    files = {"tokenizer.json": _tokenizer_json(model.tokenizer(), path, config).encode(), **model.files()}

    def read(layer: int | None) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for entry in entries(config, layer):
            _insert(tree, entry, _cast(weights.read(keys[entry.key], entry.rows), config.dtype, entry.key))
        return tree

    with CheckpointWriter(output, overwrite=overwrite) as writer:
        for name, content in files.items():
            writer.write_file(name, content)
        writer.write_embeddings(read(None))
        for index in track(range(config.num_layers), "layers", shown=progress):
            writer.write_layer(index, read(index))
        return writer.finish(config, model.origin)


def _insert(tree: dict[str, Any], entry: Entry, source: np.ndarray) -> None:
    *parents, name = entry.path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = entry.to_ours(source)


def _cast(value: np.ndarray, dtype: str, key: str) -> np.ndarray:
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(target)
    if not is_finite(cast):
        raise ConversionError(
            f"{key!r} holds values beyond the range of dtype={dtype!r}; choose 'bfloat16' or 'float32'"
        )
    return cast


def _tokenizer_json(tokenizer: Tokenizer, path: Path, config: ModelConfig) -> str:
    """The tokenizer as JSON, without added tokens past the model's vocabulary, which it cannot read.

    Raises `ConversionError` for other tokens past it.
    """
    with foreign_errors_as(ConversionError, f"cannot read the tokenizer of {path}"):

        def size(added):
            return max(tokenizer.get_vocab(with_added_tokens=added).values(), default=-1) + 1

        spare = size(True) - config.vocab_size
        # First: writing goes through all ids below the largest, used or not.
        if spare > MOST_SPARE_TOKENS or size(False) > config.vocab_size:
            raise ConversionError(
                f"the tokenizer has {size(True)} tokens, more than the model's vocabulary of "
                f"{config.vocab_size}"
            )
        content = tokenizer.to_str()
        if spare <= 0:
            return content
        parsed = json.loads(content)
        lost = [token for token in parsed["added_tokens"] if token["id"] >= config.vocab_size]
        parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token not in lost]
        logger.warning(
            "the tokenizer's %s lie past the model's vocabulary of %d and are left out",
            [token["content"] for token in lost],
            config.vocab_size,
        )
        return json.dumps(parsed, ensure_ascii=False)


def check_torch() -> None:
    """Raises `ConversionError` where transformers cannot run models."""
    if importlib.util.find_spec("torch") is None:
        raise ConversionError("--verify needs torch, which is not installed")


def verify_against_transformers(
    source: str | Path,
    logits: Callable[[np.ndarray], np.ndarray],
    *,
    vocab_size: int,
    shape: tuple[int, int] = VERIFIED_SHAPE,
) -> float:
    """Largest |Δ logit| from transformers in float32, over the largest |logit|, on random tokens.

    Args:
      source: the Hugging Face folder or GGUF file.
      logits: the converted model, tokens [B, T] int32 → float32 [B, T, V].

    Raises:
      ConversionError: torch is not installed.
    """
    check_torch()
    import torch
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(0).integers(vocab_size, size=shape, dtype=np.int32)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(
            **open_source(Path(source)).reference, dtype=torch.float32
        ).eval()
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    return float(np.abs(logits(tokens) - expected).max() / np.abs(expected).max())
