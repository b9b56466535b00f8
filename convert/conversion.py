"""Conversion of a published model (Hugging Face folder or GGUF file) to a folder of ours, layer by layer."""

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

from convert.gguf.source import GGUFFile
from convert.hf.folder import HFFolder
from convert.hf.weights import is_finite, list_entries, resolve
from convert.progress import track
from convert.source import Source
from zdc_jax.checkpoint import Checkpoint, CheckpointWriter
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as

logger = logging.getLogger("zdc_jax")

VERIFIED_SHAPE = (2, 64)
"""Sequences and tokens in the input of `verify_against_transformers`."""
MAX_SPARE_TOKENS = 1024
"""Most added tokens past the model's vocabulary. Gemma's tokenizer has one for images."""


def open_source(path: Path) -> Source:
    """Open a `.gguf` file or a Hugging Face folder."""
    if path.suffix == ".gguf" and not path.exists():
        raise ConversionError(f"{path} does not exist; give a GGUF file or a Hugging Face folder")
    return GGUFFile(path) if path.is_file() or path.suffix == ".gguf" else HFFolder(path)


def read_source(source: str | Path) -> tuple[ModelConfig, Tokenizer]:
    """Return architecture and tokenizer of a checkpoint, as its conversion will have them.

    The dtype is float32. The tokenizer has neither truncation nor padding.

    Raises:
      ConversionError: the source is not supported, or its tokenizer does not suit it.
    """
    model = open_source(Path(source))
    config = model.config("float32")
    tokenizer = Tokenizer.from_str(_tokenizer_json(model.tokenizer(), Path(source), config))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return config, tokenizer


def convert(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Checkpoint:
    """Convert a Hugging Face folder or a GGUF file.

    Headers are checked before anything is written. Weights stream: the embeddings, then one layer at a time.
    Peak memory is about three times the larger of the two, whatever the depth. The output appears complete or
    not at all.

    Args:
      source: folder with config.json, safetensors (one file or shards) and a tokenizer; or a `.gguf` file, or
        any part of a split one.
      output: folder to write.
      dtype: dtype to store; default that of most source tensors, or bfloat16 where most are quantized.
      overwrite: replace an existing converted folder, its calibration included.
      progress: show progress on standard error.

    Returns:
      The converted folder, opened.

    Raises:
      ConversionError: the source is not supported, damaged or incomplete, or lies in the output.
      CheckpointError: the output exists, or the disk is full.
    """
    path = Path(source)
    if path.resolve().is_relative_to(Path(output).resolve()):
        raise ConversionError(
            f"output={str(output)!r}: must not be or contain the source {str(source)!r}; choose another"
        )
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype={dtype!r}: must be one of {DTYPES}")
    model = open_source(path)
    model.config("float32")  # Refuses an unsupported model before reading its weights.
    weights = model.weights
    config = model.config(dtype or weights.dtype)
    keys = resolve(config, weights)
    files = {"tokenizer.json": _tokenizer_json(model.tokenizer(), path, config).encode(), **model.files()}

    def read_tree(layer: int | None) -> dict[str, Any]:
        tree = {}
        for entry in list_entries(config, layer):
            source = weights.read(keys[entry.key], entry.rows)
            tree[entry.path] = entry.to_ours(_cast(source, config.dtype, entry.key))
        return unflatten_dict(tree)

    with CheckpointWriter(output, overwrite=overwrite) as writer:
        for name, content in files.items():
            writer.write_file(name, content)
        writer.write_embeddings(read_tree(None))
        for index in track(range(config.num_layers), "layers", shown=progress):
            writer.write_layer(index, read_tree(index))
        return writer.finish(config, model.origin)


def _cast(value: np.ndarray, dtype: str, key: str) -> np.ndarray:
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(target)
    if not is_finite(cast):
        raise ConversionError(
            f"dtype={dtype!r}: {key!r} holds values beyond its range; choose 'bfloat16' or 'float32'"
        )
    return cast


def _tokenizer_json(tokenizer: Tokenizer, path: Path, config: ModelConfig) -> str:
    """Return the tokenizer as JSON, without added tokens past the model's vocabulary.

    Raises:
      ConversionError: other tokens lie past the vocabulary, or the tokenizer cannot be read.
    """
    with foreign_errors_as(ConversionError, f"cannot read the tokenizer of {path}"):

        def compute_size(with_added_tokens: bool) -> int:
            return max(tokenizer.get_vocab(with_added_tokens=with_added_tokens).values(), default=-1) + 1

        spare = compute_size(True) - config.vocab_size
        # Checked first: writing JSON visits all ids below the largest, used or not.
        if spare > MAX_SPARE_TOKENS or compute_size(False) > config.vocab_size:
            raise ConversionError(
                f"the tokenizer has {compute_size(True)} tokens, more than the {config.vocab_size} of "
                "the model's vocabulary"
            )
        content = tokenizer.to_str()
        if spare <= 0:
            return content
        parsed = json.loads(content)
        dropped = [token for token in parsed["added_tokens"] if token["id"] >= config.vocab_size]
        parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token not in dropped]
        logger.warning(
            "dropping the tokenizer's tokens %s, which lie past the model's vocabulary of %d",
            [token["content"] for token in dropped],
            config.vocab_size,
        )
        return json.dumps(parsed, ensure_ascii=False)


def check_torch() -> None:
    """Raise `ConversionError` where torch is missing, without which transformers runs no model."""
    if importlib.util.find_spec("torch") is None:
        raise ConversionError("--verify: needs torch, which is not installed; run: pip install torch")


def verify_against_transformers(
    source: str | Path,
    logits: Callable[[np.ndarray], np.ndarray],
    *,
    vocab_size: int,
    shape: tuple[int, int] = VERIFIED_SHAPE,
) -> float:
    """Compare logits with transformers in float32 on random tokens.

    Args:
      source: the Hugging Face folder or GGUF file.
      logits: the converted model, tokens [B, T] int32 → float32 [B, T, V].
      vocab_size: bound of the random token ids.
      shape: B and T.

    Returns:
      The largest absolute difference of logits, divided by the largest absolute logit.

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
