"""Weights of a GGUF file under Hugging Face's keys, dequantised one tensor at a time."""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

from convert.gguf.reader import GGUF
from convert.gguf.settings import ROPE_TENSORS
from convert.gguf.tensors import PLAIN, is_supported, read_tensor
from convert.hf.weights import is_finite, list_entries
from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError

QUANTISED_DTYPE = "bfloat16"
"""What quantised weights are stored in where no dtype is asked for; it rounds, float32 keeps each value."""


class GGUFWeights:
    """The tensors of a GGUF file as Hugging Face has them; see `convert.hf.weights.Weights`.

    Tensors that the model lacks keep their own names, under which `resolve` refuses them.

    Raises:
      ConversionError: a type that cannot be dequantised.
    """

    def __init__(self, file: GGUF, config: ModelConfig):
        self._config = config
        self._architecture = file.metadata["general.architecture"]
        names = source_keys(self._architecture, config)
        self._tensors = {
            names.get(name, name): tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS
        }
        self.shapes = {key: tensor.shape for key, tensor in self._tensors.items()}
        for name, tensor in file.tensors.items():
            if not is_supported(tensor.kind):
                known = [kind.name for kind in GGMLQuantizationType if is_supported(kind)]
                raise ConversionError(
                    f"{tensor.path}: {name!r:.80} has type {tensor.kind.name}; supported are {known}"
                )
        # Vectors are float32 in every file.
        matrices = Counter(tensor.kind for tensor in self._tensors.values() if len(tensor.shape) > 1)
        dtypes = Counter[str]()
        for kind, count in matrices.items():
            dtypes[str(PLAIN.get(kind, QUANTISED_DTYPE))] += count
        self.types = {kind.name: count for kind, count in matrices.most_common()}
        self.dtype = max(sorted(dtypes), key=lambda name: dtypes[name], default="float32")

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        """One tensor, or some of its rows; raises `ConversionError` where it has NaN or Inf."""
        tensor = self._tensors[key]
        if change := CHANGES.get(self._architecture):
            value = change(key, read_tensor(tensor), self._config)
            value = value if rows is None else value[rows]
        else:
            value = read_tensor(tensor, rows)
        if not is_finite(value):
            raise ConversionError(f"{tensor.path.name}: {key!r} has NaN or Inf")
        return value


def source_keys(architecture: str, config: ModelConfig) -> dict[str, str]:
    """Name of a tensor in a file → Hugging Face's key, for all that a model has."""
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], config.num_layers)
    keys = {entry.key for layer in (None, *range(config.num_layers)) for entry in list_entries(config, layer)}
    table = {}
    for key in keys:
        stem, _, suffix = key.rpartition(".")
        if name := names.get_name(stem):
            table[f"{name}.{suffix}"] = key
    return table


def _heads_in_order(key: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Q and k: these files turn coordinates (0, 1) as a pair by position, Hugging Face (0, H/2)."""
    for name, heads in ((".q_proj.", config.num_heads), (".k_proj.", config.num_kv_heads)):
        if name in key:
            turned = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2)
            return turned.reshape(value.shape)
    return value


def _norms_around_zero(key: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Gemma's norms: files have the factor 1 + w, Hugging Face w."""
    return value - np.ones((), value.dtype) if key.endswith("norm.weight") else value


CHANGES: Mapping[str, Callable[[str, np.ndarray, ModelConfig], np.ndarray]] = {
    "llama": _heads_in_order,
    "granite": _heads_in_order,
    "gemma3": _norms_around_zero,
}
"""How the tensors of an architecture become Hugging Face's."""
