"""What `convert` needs of a model, whatever it comes in."""

from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from convert.hf.weights import Weights
from zdc_jax.config import ModelConfig


class Source(Protocol):
    """A model as others publish it. Everything raises `ConversionError` for what cannot be converted.

    Attributes:
      weights: its tensors under Hugging Face's keys.
      files: small files that the converted folder keeps, by name.
      origin: what the manifest says about the source.
      reference: arguments with which transformers loads the same model.
    """

    def config(self, dtype: str) -> ModelConfig:
        """The architecture; `dtype` is that the weights will be stored in."""

    @property
    def weights(self) -> Weights: ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, in the form of the `tokenizers` library."""

    def files(self) -> Mapping[str, bytes]: ...

    @property
    def origin(self) -> Mapping[str, Any]: ...

    @property
    def reference(self) -> Mapping[str, Any]: ...
