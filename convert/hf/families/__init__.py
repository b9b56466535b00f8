"""Model families of Hugging Face, one file each, with all that conversion knows about a family.

A family is a module with a `FAMILY`. The module is named after Hugging Face's `model_type`, which is also
`ModelConfig.family`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: parsing of its settings in `config.json`, and its keys in the safetensors.

    Attributes:
      architecture: name of the family in `architectures` of `config.json`.
      parse: makes a `ModelConfig` from settings. The fields that all families read alike (`family`, `dtype`,
        `bos_id`, `eos_ids`) come as keywords. A missing setting may raise `KeyError`, a malformed one
        `TypeError` or `ValueError`. An unsupported one raises `ConversionError` with the supported values.
      prefixes: prefixes of every key but `lm_head`. All are read; the first is that of `Entry.key`.
      embeddings: key of each parameter outside the layers, by path (`embedding_shapes`).
      layer: key of each parameter of a layer, by path (`layer_shapes`), without the prefix `layers.{i}.`. A
        bias `*_bias` needs no entry: its key is that of its weight with `.bias`. Parameters with the same key
        are stored as one tensor, with rows stacked in the order of this table.
    """

    architecture: str
    parse: Callable[..., ModelConfig]
    prefixes: tuple[str, ...]
    embeddings: Mapping[str, str]
    layer: Mapping[str, str]


@cache
def list_families() -> tuple[str, ...]:
    """Return the names of all families in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def get_family(name: str) -> Family:
    """Return a family by name; raise `ConversionError` for an unknown name."""
    if name not in list_families():
        raise ConversionError(f"family={name!r:.80}: unknown; must be one of {list_families()}")
    return importlib.import_module(f"{__name__}.{name}").FAMILY


@cache
def list_architectures() -> dict[str, str]:
    """Return the name of the family of each architecture."""
    return {get_family(name).architecture: name for name in list_families()}
