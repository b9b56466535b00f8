"""Parsing of Hugging Face's `config.json` to a `ModelConfig`; unsupported settings are errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.hf.families import get_family, list_architectures
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as
from zdc_jax.files import load_json


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
      ConversionError: the file is missing, unreadable or no JSON object.
    """
    with foreign_errors_as(ConversionError, f"cannot read {path}"):
        if not path.exists():
            raise ConversionError(f"{path.parent} has no {path.name}")
        value = load_json(path)
    if not isinstance(value, dict):
        raise ConversionError(f"{path} must contain a JSON object, found {type(value).__name__}")
    return value


def parse_config(folder: Path, dtype: str) -> ModelConfig:
    """Parse the config of a Hugging Face folder.

    Args:
      folder: the folder.
      dtype: dtype that the weights will be stored in.

    Raises:
      ConversionError: the config is missing; or a setting is missing, malformed or not supported.
    """
    if not folder.is_dir():
        raise ConversionError(
            f"{folder} is not a folder; give one with config.json and *.safetensors, or a .gguf file"
        )
    path, generation = folder / "config.json", folder / "generation_config.json"
    if (folder / "manifest.json").exists():
        raise ConversionError(f"{folder} is already converted; give the folder it was converted from")
    _refuse_adapter(folder)
    if not path.exists():
        files = sorted(folder.glob("*.gguf"))
        advice = f"one of its files, such as {files[0]}" if files else "a Hugging Face folder or a GGUF file"
        raise ConversionError(f"{folder} has no config.json; give {advice}")
    return parse_settings(
        read_json(path), path, dtype=dtype, generation=read_json(generation) if generation.exists() else {}
    )


def _refuse_adapter(folder: Path) -> None:
    """Raise `ConversionError` for a folder with an adapter, such as LoRA, and without a model's weights."""
    path = folder / "adapter_config.json"
    weights = ("model*.safetensors*", "pytorch_model*")
    if not path.exists() or any(any(folder.glob(name)) for name in weights):
        return
    settings = read_json(path)
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    raise ConversionError(
        f"{folder} is an adapter (peft_type={kind!r:.80}) of the model {base!r:.200}, not a model itself; "
        "merge it, then convert the merged folder. In Python, with the package peft: AutoPeftModelForCausalLM"
        f".from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('merged'). Copy the tokenizer "
        "of the model to the merged folder"
    )


def parse_settings(
    raw: Mapping[str, Any], path: Path, *, dtype: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Parse the settings of a `config.json`.

    Args:
      raw: the settings.
      path: the file of the settings, for errors.
      dtype: dtype that the weights will be stored in.
      generation: settings of generation_config.json, where chat models list further end-of-sequence ids.

    Raises:
      ConversionError: a setting is missing, malformed or not supported.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConversionError(f"architectures={names!r:.200} must be a list of names")
    supported = list_architectures()
    family = next((supported[name] for name in names if name in supported), None)
    if family is None:
        raise ConversionError(f"architectures={names} is not supported; supported are {sorted(supported)}")
    if raw.get("is_causal") is False:
        raise ConversionError("is_causal=false is not supported; only models with causal attention are")
    if quantization := raw.get("quantization_config"):
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConversionError(
            f"quantization_config (quant_method={kind!r:.80}) is not supported; convert the unquantized "
            f"model, with weights of a dtype in {DTYPES}"
        )
    try:
        config = get_family(family).parse(
            raw,
            family=family,
            dtype=dtype,
            bos_id=raw.get("bos_token_id"),
            eos_ids=_list_eos_ids(raw, generation or {}),
        )
        return config.without_idle_windows()
    except ConversionError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ConversionError(f"{path}: {reason}") from error


def _list_eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids))
