"""Comparison of a GGUF file with its Hugging Face folder, and of both with transformers, in float32.

    python -m benchmarks.quality.compare_gguf MODEL.gguf …

transformers dequantizes the file and saves a folder. `zdc convert` converts the folder and the file. All
three models compute logits of one prompt. Converted models with the same fingerprint have equal weights. The
script needs torch and accelerate.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer

from benchmarks.common import RESULTS, write_result
from convert.conversion import convert
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.loading import load

PROMPT = (
    "def mean(values: list[float]) -> float:\n"
    '    """Return the arithmetic mean of a list of numbers."""\n'
    "    return sum(values) / len(values)\n\n"
    "The tower was finished in 1889. It is 330 metres tall, about as high as an 81-storey building, and was "
    "the tallest structure in the world for 41 years. Visitors climb 674 steps to its second level."
)
"""Text of the prompt, of which the first tokens are used."""
SAMPLES = (
    "Gravity is the force that",
    "In 1889, 12345.678 tokens; don't split we'll, I'm or it's!",
    "naïve café — Привет, 世界 🙂",
    "  two spaces\n\n\ttab and\r\nlines  ",
    "<|im_start|>user\nHello<|im_end|>\n",
)
"""Texts whose token ids are compared."""


@dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      models: GGUF files.
      tokens: length of the prompt, in tokens.
      name: stem of the JSON file.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    tokens: int = 64
    name: str = "gguf-and-hf"
    results: Path = RESULTS


def main(options: Options) -> None:
    """Compare the models one after the other and write the figures."""
    rows = []
    for model in options.models:
        with TemporaryDirectory() as scratch:
            rows.append(compare(model, Path(scratch), options.tokens))
        print(rows[-1])
    write_result(options.name, {"tokens": options.tokens, "dtype": "float32"}, rows, options.results)


def compare(model: Path, scratch: Path, tokens: int) -> dict[str, Any]:
    """Return the largest differences of logits, and the texts that tokenizers divide differently."""
    folder = scratch / "folder"
    direct = convert(model, scratch / "from-gguf", dtype="float32", progress=False)
    tokenizer = _tokenizer(direct)
    ids = np.asarray([tokenizer.encode(PROMPT).ids[:tokens]], np.int32)
    truth = export(model, folder, ids)
    exported = convert(folder, scratch / "from-folder", dtype="float32", progress=False)
    ours = {"gguf": logits(direct, ids), "folder": logits(exported, ids)}
    theirs = _tokenizer(exported)
    return {
        "model": model.stem,
        "tokens": ids.shape[1],
        "largest_logit": float(np.abs(truth).max()),
        "gguf_and_folder": float(np.abs(ours["gguf"] - ours["folder"]).max()),
        "gguf_and_transformers": float(np.abs(ours["gguf"] - truth).max()),
        "folder_and_transformers": float(np.abs(ours["folder"] - truth).max()),
        "same_fingerprint": direct.fingerprint == exported.fingerprint,
        "same_first_token": float(np.mean(ours["gguf"].argmax(-1) == truth.argmax(-1))),
        "texts": len(SAMPLES),
        "other_ids": [text for text in SAMPLES if tokenizer.encode(text).ids != theirs.encode(text).ids],
    }


def export(model: Path, folder: Path, ids: np.ndarray) -> np.ndarray:
    """Write the Hugging Face folder of a GGUF file, dequantized by transformers.

    Args:
      model: the GGUF file.
      folder: folder to write.
      ids: token ids [B, T].

    Returns:
      The logits of transformers, float32 [B, T, V].
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    network = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    with torch.no_grad():
        found = network(torch.from_numpy(ids).long()).logits.numpy()
    # transformers refuses to save a model that came from a GGUF file, although it is dequantized.
    network.hf_quantizer = None
    del network.config.quantization_config
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return found


def logits(checkpoint: Checkpoint, ids: np.ndarray) -> np.ndarray:
    """Return the logits of a converted model, float32 [B, T, V]."""
    found = np.asarray(load(checkpoint.path, dtype="float32").network(jnp.asarray(ids)))
    gc.collect()
    return found


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None  # Both sources have one.
    return tokenizer


if __name__ == "__main__":
    main(tyro.cli(Options))
