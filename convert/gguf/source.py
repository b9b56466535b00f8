"""A GGUF file as a source of `convert`."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from convert.gguf.reader import GGUF, read_gguf
from convert.gguf.settings import hf_settings
from convert.gguf.tokenizer import build_tokenizer, tokenizer_config
from convert.gguf.weights import GGUFWeights
from convert.hf.config import parse_settings
from zdc_jax.config import ModelConfig


class GGUFFile:
    """One GGUF file, or one of the parts of a split one; see `convert.source.Source`."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _file(self) -> GGUF:
        return read_gguf(self.path)

    def config(self, dtype: str) -> ModelConfig:
        """The architecture of the metadata."""
        return parse_settings(hf_settings(self._file), self.path, dtype=dtype)

    @cached_property
    def weights(self) -> GGUFWeights:
        """The tensors, dequantised as they are read."""
        return GGUFWeights(self._file, self.config("float32"))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built from the metadata."""
        return build_tokenizer(self._file)

    def files(self) -> dict[str, bytes]:
        """tokenizer_config.json with the names of special tokens and the chat template."""
        return {"tokenizer_config.json": json.dumps(tokenizer_config(self._file), indent=2).encode()}

    @property
    def origin(self) -> Mapping[str, Any]:
        """Its name, the types of its tensors and how many have each."""
        return {"name": self.path.resolve().name, "dtype": self.weights.dtype, "types": self.weights.types}

    @property
    def reference(self) -> Mapping[str, Any]:
        """Its folder and its name there."""
        return {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}
