"""`convert`: a Hugging Face folder → a converted folder, layer by layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from convert.hf.config import DTYPES, parse_config, read_json
from convert.hf.weights import Entry, HFWeights, entries, is_finite, resolve
from convert.progress import track
from zdc_jax.checkpoint import Checkpoint, CheckpointWriter
from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as

COPIED = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja")


def convert(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Checkpoint:
    """Converts a Hugging Face folder; everything that headers can tell is checked before anything is written.

    Streams: the embeddings, then one layer at a time; the peak is about three times the larger of the two,
    whatever the depth. The output appears complete or not at all.

    Args:
      source: folder with config.json, safetensors (one file or shards) and a tokenizer.
      output: folder to write.
      dtype: dtype to store; default that of most source tensors.
      overwrite: replace an existing converted folder, its calibration included.
      progress: show how far it has come, on standard error.

    Raises:
      ConversionError: the source is not supported, damaged or incomplete, or lies in the output.
      CheckpointError: the output exists, or the disk is full.
    """
    source = Path(source)
    if source.resolve().is_relative_to(Path(output).resolve()):
        raise ConversionError(f"output={str(output)!r} must not be or hold the source {str(source)!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype={dtype!r} must be one of {DTYPES}")
    parse_config(source, "float32")  # An unsupported model is refused before its weights are looked at.
    weights = HFWeights(source)
    config = parse_config(source, dtype or weights.dtype)
    keys = resolve(config, weights)
    tokenizer = read_tokenizer(source, config)

    def read(layer: int | None) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for entry in entries(config, layer):
            _insert(tree, entry, _cast(weights.read(keys[entry.key], entry.rows), config.dtype, entry.key))
        return tree

    with CheckpointWriter(output, overwrite=overwrite) as writer:
        writer.write_file("tokenizer.json", tokenizer)
        for name in COPIED:
            if (source / name).is_file():
                writer.write_file(name, (source / name).read_bytes())
        writer.write_embeddings(read(None))
        for index in track(range(config.num_layers), "layers", shown=progress):
            writer.write_layer(index, read(index))
        version = read_json(source / "config.json").get("transformers_version")
        origin = {
            "name": source.resolve().name,
            "dtype": weights.dtype,
            "transformers_version": version if isinstance(version, str) else None,
        }
        return writer.finish(config, origin)


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


def read_tokenizer(source: Path, config: ModelConfig) -> str:
    """The folder's tokenizer as the JSON of the `tokenizers` library.

    Older formats (sentencepiece models, vocab.json with merges.txt) are read through transformers.

    Raises:
      ConversionError: no tokenizer, an unreadable one, or one with ids past the model's vocabulary.
    """
    path = source / "tokenizer.json"
    with foreign_errors_as(ConversionError, f"cannot read the tokenizer of {source}"):
        if path.exists():
            tokenizer = Tokenizer.from_file(str(path))
        elif (source / "tokenizer.model").exists() or (source / "vocab.json").exists():
            from transformers import AutoTokenizer  # Seconds to import, rarely needed.

            tokenizer = AutoTokenizer.from_pretrained(source).backend_tokenizer
        else:
            raise ConversionError(
                f"{source} has no tokenizer: expected tokenizer.json (or tokenizer.model, or vocab.json "
                "with merges.txt)"
            )
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if size > config.vocab_size:  # First: writing goes through all ids below the largest, used or not.
            raise ConversionError(
                f"the tokenizer has {size} tokens, more than the model's vocabulary of {config.vocab_size}"
            )
        return tokenizer.to_str()


def verify_against_transformers(
    source: str | Path,
    logits: Callable[[np.ndarray], np.ndarray],
    *,
    vocab_size: int,
    shape: tuple[int, int] = (2, 64),
    seed: int = 0,
) -> float:
    """Largest |Δ logit| from transformers in float32, over the largest |logit|, on random tokens.

    Args:
      source: the Hugging Face folder.
      logits: the converted model, tokens [B, T] int32 → float32 [B, T, V].

    Raises:
      ConversionError: torch is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConversionError(f"--verify needs torch: {error}") from error
    tokens = np.random.default_rng(seed).integers(vocab_size, size=shape, dtype=np.int32)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    return float(np.abs(logits(tokens) - expected).max() / np.abs(expected).max())
