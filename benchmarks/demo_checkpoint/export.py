"""Parameters under Hugging Face's keys and in its layout, by the key tables of the conversion."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.hf.weights import TABLES, Entry, list_entries
from zdc_jax.config import ModelConfig


def export_tensors(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Return parameters `{"embeddings": …, "layers": […]}` under Hugging Face's keys and in its shapes."""
    trees = [(None, params["embeddings"]), *enumerate(params["layers"])]
    tensors: dict[str, list[np.ndarray]] = {}
    for layer, tree in trees:
        for entry in list_entries(config, layer):
            leaf = tree
            for name in entry.path:
                leaf = leaf[name]
            tensors.setdefault(entry.key, []).append(to_source(entry, np.asarray(leaf)))
    return {key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in tensors.items()}


def to_source(entry: Entry, ours: np.ndarray) -> np.ndarray:
    """Return a tensor in the layout of Hugging Face; inverse of `Entry.to_ours`."""
    if len(entry.source_shape) == 1 or entry.path[-1] in TABLES:
        return ours.reshape(entry.source_shape)
    return np.ascontiguousarray(ours.reshape(entry.source_shape[::-1]).T)
