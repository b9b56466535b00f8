"""The interface through which `convert` reads a model, whatever format it is published in."""

from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from convert.hf.weights import Weights
from zdc_jax.config import ModelConfig


class Source(Protocol):
    """A published model. Every member raises `ConversionError` for what cannot be converted."""

    def config(self, dtype: str) -> ModelConfig:
        """Return the architecture, with the `dtype` that the weights will be stored in."""

    @property
    def weights(self) -> Weights:
        """Tensors under Hugging Face's keys."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer as an object of the `tokenizers` library."""

    def files(self) -> Mapping[str, bytes]:
        """Return small files that the converted folder keeps, by name."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """Description of the source for the manifest, as JSON."""

    @property
    def reference(self) -> Mapping[str, Any]:
        """Arguments with which transformers loads the same model."""
