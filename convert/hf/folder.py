"""Source of `convert` for Hugging Face folders."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from convert.hf.config import parse_config, read_json
from convert.hf.weights import HFWeights
from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as

COPIED_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class HFFolder:
    """Folder with config.json, safetensors and a tokenizer, as a `convert.source.Source`."""

    def __init__(self, path: Path):
        self.path = path

    def config(self, dtype: str) -> ModelConfig:
        return parse_config(self.path, dtype)

    @cached_property
    def weights(self) -> HFWeights:
        """Tensors of the safetensors."""
        return HFWeights(self.path)

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer; transformers converts sentencepiece models and vocab.json with merges.txt.

        Raises:
          ConversionError: the tokenizer is missing or unreadable.
        """
        path = self.path / "tokenizer.json"
        with foreign_errors_as(ConversionError, f"cannot read the tokenizer of {self.path}"):
            if path.exists():
                return Tokenizer.from_file(str(path))
            if (self.path / "tokenizer.model").exists() or (self.path / "vocab.json").exists():
                from transformers import AutoTokenizer  # Imported here because it takes seconds.

                return AutoTokenizer.from_pretrained(self.path).backend_tokenizer
            raise ConversionError(
                f"{self.path} has no tokenizer; add tokenizer.json (or tokenizer.model, or vocab.json with "
                "merges.txt)"
            )

    def files(self) -> dict[str, bytes]:
        paths = (self.path / name for name in COPIED_FILES)
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    @property
    def origin(self) -> Mapping[str, Any]:
        """Name of the folder, dtype of its weights, and the release of transformers that wrote it."""
        version = read_json(self.path / "config.json").get("transformers_version")
        return {
            "name": self.path.resolve().name,
            "dtype": self.weights.dtype,
            "transformers_version": version if isinstance(version, str) else None,
        }

    @property
    def reference(self) -> Mapping[str, Any]:
        return {"pretrained_model_name_or_path": self.path}
