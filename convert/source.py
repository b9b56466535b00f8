"""What `convert` needs of a model, whatever it comes in."""

from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from convert.hf.weights import Weights
from zdc_jax.config import ModelConfig


class Source(Protocol):
    """A model as others publish it. Everything raises `ConversionError` for what cannot be converted."""

    def config(self, dtype: str) -> ModelConfig:
        """The architecture; `dtype` is that the weights will be stored in."""

    @property
    def weights(self) -> Weights:
        """Its tensors under Hugging Face's keys."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, in the form of the `tokenizers` library."""

    def files(self) -> Mapping[str, bytes]:
        """Small files that the converted folder keeps, by name."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """What the manifest says about the source, as JSON."""

    @property
    def reference(self) -> Mapping[str, Any]:
        """Arguments with which transformers loads the same model."""
