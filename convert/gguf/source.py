"""Source of `convert` for GGUF files."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from convert.gguf.reader import GGUF, read_gguf
from convert.gguf.settings import derive_settings
from convert.gguf.tokenizer import build_tokenizer, make_tokenizer_config
from convert.gguf.weights import GGUFWeights
from convert.hf.config import parse_settings
from zdc_jax.config import ModelConfig


class GGUFFile:
    """A GGUF file, or any part of a split one, as a `convert.source.Source`."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _file(self) -> GGUF:
        return read_gguf(self.path)

    def config(self, dtype: str) -> ModelConfig:
        return parse_settings(derive_settings(self._file), self.path, dtype=dtype)

    @cached_property
    def weights(self) -> GGUFWeights:
        """Tensors, dequantized when they are read."""
        return GGUFWeights(self._file, self.config("float32"))

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self._file)

    def files(self) -> dict[str, bytes]:
        """Return tokenizer_config.json with the special tokens and the chat template."""
        return {"tokenizer_config.json": json.dumps(make_tokenizer_config(self._file), indent=2).encode()}

    @property
    def origin(self) -> Mapping[str, Any]:
        """Name of the file, dtype of its weights, and number of tensors of each type."""
        return {"name": self.path.resolve().name, "dtype": self.weights.dtype, "types": self.weights.types}

    @property
    def reference(self) -> Mapping[str, Any]:
        return {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}
