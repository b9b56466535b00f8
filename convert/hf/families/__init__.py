"""Model families of Hugging Face, one file each: all that conversion and export know about one.

A family is a module here with a `FAMILY`; its name is that of the module, which is Hugging Face's
`model_type`, and a configuration says it (`ModelConfig.family`).
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: its settings in `config.json`, both ways, and its keys in the safetensors.

    Attributes:
      architecture: its name in `architectures` of `config.json`.
      parse: settings → `ModelConfig`. The fields that all families read alike (`family`, `dtype`, `bos_id`,
        `eos_ids`) come as keywords. A missing setting may raise `KeyError`, a malformed one `TypeError` or
        `ValueError`; one that is not supported raises `ConversionError` with what is.
      settings: `ModelConfig` → settings, without those that all families share (`hf_config`).
      prefixes: written before every key but `lm_head`; the first by export, any of them is read.
      embeddings: path of a parameter outside the layers (`embedding_shapes`) → key.
      layer: path of a parameter of a layer (`layer_shapes`) → key, relative to `layers.{i}.`. A bias
        `*_bias` needs no row: its key is that of its weight with `.bias`. Parameters with one key are stored
        as one, their rows stacked in the order of this table.
    """

    architecture: str
    parse: Callable[..., ModelConfig]
    settings: Callable[[ModelConfig], dict[str, Any]]
    prefixes: tuple[str, ...]
    embeddings: Mapping[str, str]
    layer: Mapping[str, str]


@cache
def names() -> tuple[str, ...]:
    """All families, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def named(name: str) -> Family:
    """The family of that name; raises `ConversionError` for an unknown one, with those that are known."""
    if name not in names():
        raise ConversionError(f"family={name!r:.80} must be one of {names()}")
    return importlib.import_module(f"{__name__}.{name}").FAMILY


@cache
def by_architecture() -> dict[str, str]:
    """Architecture → name of its family."""
    return {named(name).architecture: name for name in names()}
