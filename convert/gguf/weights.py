"""Weights of a GGUF file under Hugging Face's keys, dequantized one tensor at a time."""

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

QUANTIZED_DTYPE = "bfloat16"
"""Default dtype to store quantized weights in. It rounds; float32 would store each value exactly."""


class GGUFWeights:
    """Tensors of a GGUF file in Hugging Face's layout, as `convert.hf.weights.Weights`.

    Tensors that the model does not have keep their own names, so that `resolve` refuses them.

    Raises:
      ConversionError: a tensor has a type that cannot be dequantized.
    """

    def __init__(self, file: GGUF, config: ModelConfig):
        self._config = config
        self._architecture = file.metadata["general.architecture"]
        names = map_source_keys(self._architecture, config)
        self._tensors = {
            names.get(name, name): tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS
        }
        self.shapes = {key: tensor.shape for key, tensor in self._tensors.items()}
        for name, tensor in file.tensors.items():
            if not is_supported(tensor.kind):
                supported = [kind.name for kind in GGMLQuantizationType if is_supported(kind)]
                raise ConversionError(
                    f"{tensor.path}: {name!r:.80} has type {tensor.kind.name}; supported are {supported}"
                )
        # Vectors are float32 in every file.
        matrices = [tensor.kind for tensor in self._tensors.values() if len(tensor.shape) > 1]
        dtypes = Counter(str(PLAIN.get(kind, QUANTIZED_DTYPE)) for kind in matrices)
        self.types = {kind.name: count for kind, count in Counter(matrices).most_common()}
        self.dtype = max(sorted(dtypes), key=lambda name: dtypes[name], default="float32")

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        tensor = self._tensors[key]
        if change := TENSOR_CHANGES.get(self._architecture):
            value = change(key, read_tensor(tensor), self._config)
            value = value if rows is None else value[rows]
        else:
            value = read_tensor(tensor, rows)
        if not is_finite(value):
            raise ConversionError(f"{tensor.path.name}: {key!r} has NaN or Inf")
        return value


def map_source_keys(architecture: str, config: ModelConfig) -> dict[str, str]:
    """Map the names of a model's tensors in GGUF to Hugging Face's keys."""
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], config.num_layers)
    keys = {entry.key for layer in (None, *range(config.num_layers)) for entry in list_entries(config, layer)}
    table = {}
    for key in keys:
        stem, _, suffix = key.rpartition(".")
        if name := names.get_name(stem):
            table[f"{name}.{suffix}"] = key
    return table


def _reorder_heads(key: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Reorder q and k, whose rotary pairs are coordinates (0, 1), … here and (0, H/2), … in Hugging Face."""
    for name, heads in ((".q_proj.", config.num_heads), (".k_proj.", config.num_kv_heads)):
        if name in key:
            reordered = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2)
            return reordered.reshape(value.shape)
    return value


def _subtract_one(key: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Return w for norms of Gemma, which GGUF stores as 1 + w."""
    return value - np.ones((), value.dtype) if key.endswith("norm.weight") else value


TENSOR_CHANGES: Mapping[str, Callable[[str, np.ndarray, ModelConfig], np.ndarray]] = {
    "llama": _reorder_heads,
    "granite": _reorder_heads,
    "gemma3": _subtract_one,
}
"""Changes to the tensors of some architectures that lead to Hugging Face's layout."""
