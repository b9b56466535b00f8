"""Hugging Face `config.json` → `ModelConfig`, and back; every unsupported setting is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.hf.families import by_architecture, named
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.errors import ConversionError
from zdc_jax.files import load_json


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `ConversionError` naming the file."""
    try:
        value = load_json(path)
    except FileNotFoundError:
        raise ConversionError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def parse_config(folder: Path, dtype: str) -> ModelConfig:
    """The architecture of a Hugging Face folder; `dtype` is that the weights will be stored in.

    Raises:
      ConversionError: no config, a missing or malformed setting, or one that is not supported (with what is).
    """
    if not folder.is_dir():
        raise ConversionError(
            f"{folder} is not a folder; give one with config.json and *.safetensors, or a .gguf file"
        )
    path, generation = folder / "config.json", folder / "generation_config.json"
    if (folder / "manifest.json").exists():
        raise ConversionError(f"{folder} is already converted; give what it was converted from")
    if not path.exists() and (files := sorted(folder.glob("*.gguf"))):
        raise ConversionError(f"{folder} has no config.json; give one of its files, such as {files[0]}")
    return parse_settings(
        read_json(path), path, dtype=dtype, generation=read_json(generation) if generation.exists() else {}
    )


def parse_settings(
    raw: Mapping[str, Any], path: Path, *, dtype: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The architecture that settings in the words of `config.json` describe.

    Args:
      raw: the settings.
      path: the file that they come from, for errors.
      dtype: that the weights will be stored in.
      generation: settings of generation_config.json; chat models list more end-of-sequence ids there.

    Raises:
      ConversionError: a missing or malformed setting, or one that is not supported (with what is).
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConversionError(f"architectures={names!r:.200} must be a list of names")
    supported = by_architecture()
    family = next((supported[name] for name in names if name in supported), None)
    if family is None:
        raise ConversionError(f"architectures={names} is not supported; supported are {sorted(supported)}")
    if raw.get("is_causal") is False:
        raise ConversionError("is_causal=false is not supported: the model reads what follows a token, too")
    if quantization := raw.get("quantization_config"):
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConversionError(
            f"quantization_config (quant_method={kind!r:.80}) is not supported; convert the unquantised "
            f"model, whose weights are one of {DTYPES}"
        )
    try:
        return _parse(family, raw, dtype=dtype, eos_ids=_eos(raw, generation or {}))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConversionError):
            raise
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ConversionError(f"{path}: {what}") from error


def _eos(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """All their end-of-sequence ids."""
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids))


def _parse(family: str, raw: Mapping[str, Any], **common: Any) -> ModelConfig:
    config = named(family).parse(raw, family=family, bos_id=raw.get("bos_token_id"), **common)
    return config.without_idle_windows()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a model of ours; inverse of `parse_config`.

    Raises:
      ConversionError: a model that Hugging Face's configuration of the family cannot describe.
    """
    family = named(config.family)
    raw = {
        "bos_token_id": config.bos_id,
        "dtype": config.dtype,
        "eos_token_id": list(config.eos_ids),
        "hidden_size": config.embed_dim,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "architectures": [family.architecture],
        "model_type": config.family,
    } | family.settings(config)
    ours = config.to_json()
    described = _parse(config.family, raw, dtype=config.dtype, eos_ids=config.eos_ids).to_json()
    if lost := {name: value for name, value in ours.items() if described[name] != value}:
        raise ConversionError(f"{config.family} models of Hugging Face have no setting for {lost}")
    return raw
