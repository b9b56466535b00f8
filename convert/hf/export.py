"""Our parameters → a Hugging Face folder, through the same key table as the other way."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.hf.config import hf_config
from convert.hf.weights import SINGLE, entries
from zdc_jax.config import ModelConfig
from zdc_jax.files import whole_file


def source_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters `{"embeddings": …, "layers": […]}` under their source keys, in source shapes."""
    trees = [(None, params["embeddings"]), *enumerate(params["layers"])]
    tensors: dict[str, list[np.ndarray]] = {}
    for layer, tree in trees:
        for entry in entries(config, layer):
            leaf = tree
            for name in entry.path:
                leaf = leaf[name]
            tensors.setdefault(entry.key, []).append(entry.to_source(np.asarray(leaf)))
    return {key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in tensors.items()}


def export_hf(params: Mapping[str, Any], config: ModelConfig, folder: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which `convert` reads, each whole or not at all.

    The tokenizer is the caller's.

    Raises:
      ConversionError: a model that Hugging Face's configuration of the family cannot describe.
    """
    folder = Path(folder)
    described = hf_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / SINGLE) as file:
        save_file(source_tensors(params, config), file, metadata={"format": "pt"})
    with whole_file(folder / "config.json") as file:
        file.write_text(json.dumps(described, indent=2) + "\n")
