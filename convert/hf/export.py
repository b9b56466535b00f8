"""Export of parameters to a Hugging Face folder, with the key tables of the conversion."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.hf.config import export_config
from convert.hf.weights import SINGLE, list_entries
from zdc_jax.config import ModelConfig
from zdc_jax.files import whole_file


def export_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Return parameters `{"embeddings": …, "layers": […]}` under Hugging Face's keys and in its shapes."""
    trees = [(None, params["embeddings"]), *enumerate(params["layers"])]
    tensors: dict[str, list[np.ndarray]] = {}
    for layer, tree in trees:
        for entry in list_entries(config, layer):
            leaf = tree
            for name in entry.path:
                leaf = leaf[name]
            tensors.setdefault(entry.key, []).append(entry.to_source(np.asarray(leaf)))
    return {key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in tensors.items()}


def export_hf(params: Mapping[str, Any], config: ModelConfig, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`; each file appears complete or not at all.

    The caller writes the tokenizer.

    Raises:
      ConversionError: Hugging Face's settings for the family cannot describe the model.
    """
    folder = Path(folder)
    raw_config = export_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / SINGLE) as file:
        save_file(export_tensors(params, config), file, metadata={"format": "pt"})
    with whole_file(folder / "config.json") as file:
        file.write_text(json.dumps(raw_config, indent=2) + "\n")
