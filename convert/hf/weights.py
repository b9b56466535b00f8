"""Hugging Face weights: lazy reading of shards, and a strict check of keys against the family's tables."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import safe_open

from convert.hf.config import read_json
from convert.hf.families import get_family
from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as
from zdc_jax.model.params import embedding_shapes, layer_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Suffixes of buffers in old checkpoints, whose values follow from the config."""
TABLES = ("tokens", "positions", "lm_head")
"""Parameters with a row per token or position, which are not transposed."""


@dataclass(frozen=True)
class Entry:
    """One parameter: its path in our tree, and its key and layout in the checkpoint.

    A matrix in the checkpoint is [out, in] with heads merged; ours is [in, out] with heads apart.

    Attributes:
      path: path in our tree.
      key: key in the checkpoint.
      shape: shape of ours.
      rows: rows of the checkpoint's tensor that belong to this parameter; None for all.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    rows: slice | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of this parameter's rows in the checkpoint."""
        if self.path[-1] in TABLES:
            return self.shape
        if self._is_vector:
            return (int(np.prod(self.shape)),)
        if self.path[-1] == "o":
            N, H, D = self.shape
            return (D, N * H)
        return (int(np.prod(self.shape[1:])), self.shape[0])

    @property
    def _is_vector(self) -> bool:
        """Whether the checkpoint has a vector, which may have heads apart in our tree, as biases of q do."""
        return len(self.shape) == 1 or self.path[-1].endswith("_bias")

    def to_ours(self, source: np.ndarray) -> np.ndarray:
        """Transpose a tensor of the checkpoint and split its heads."""
        oriented = source if self._is_vector or self.path[-1] in TABLES else source.T
        return np.ascontiguousarray(oriented).reshape(self.shape)


def list_entries(config: ModelConfig, layer: int | None) -> list[Entry]:
    """Return the entries of one layer or, for None, of all parameters outside the layers."""
    family = get_family(config.family)
    prefix = family.prefixes[0]
    if layer is None:
        names, shapes = family.embeddings, embedding_shapes(config)
    else:
        names, shapes, prefix = family.layer, layer_shapes(config, layer), f"{prefix}layers.{layer}."
    order = list(names)

    def position(entry: Entry) -> int:
        return order.index("/".join(entry.path).removesuffix("_bias"))

    table = (
        Entry(path, _make_source_key("/".join(path), names, prefix), shape)
        for path, shape in flatten_dict(shapes).items()
    )
    return _add_rows(sorted(table, key=position))


def _make_source_key(path: str, names: Mapping[str, str], prefix: str) -> str:
    key = names.get(path) or names[path.removesuffix("_bias")].removesuffix("weight") + "bias"
    return key if key.startswith("lm_head") else prefix + key


def _add_rows(table: list[Entry]) -> list[Entry]:
    """Set the rows of entries that share a key; their rows are stacked in order."""
    count, end = Counter(entry.key for entry in table), Counter[str]()
    with_rows = []
    for entry in table:
        start = end[entry.key]
        end[entry.key] += entry.source_shape[0]
        rows = slice(start, end[entry.key]) if count[entry.key] > 1 else None
        with_rows.append(replace(entry, rows=rows))
    return with_rows


def list_source_shapes(table: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Return the shape that the checkpoint must have under each key."""
    return {
        entry.key: entry.source_shape if entry.rows is None else (entry.rows.stop, *entry.source_shape[1:])
        for entry in table
    }


class Weights(Protocol):
    """Tensors of a checkpoint under Hugging Face's keys and in its layout.

    Attributes:
      dtype: dtype to store the model in unless another is requested.
    """

    dtype: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, known without reading it."""

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        """Read a tensor or some of its rows; raise `ConversionError` where it has NaN or Inf."""


class HFWeights:
    """Tensors of a Hugging Face folder, read one at a time after a check of all headers.

    Raises:
      ConversionError: the folder has no safetensors; a shard is missing, cut off or a Git-LFS pointer; there
        are no tensors; a key is in two shards; or a dtype is not supported.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shard: dict[str, Path] = {}
        dtypes: Counter[str] = Counter()
        for shard in _list_shards(folder):
            dtypes += self._read_header(shard)
        if not self.shapes:
            raise ConversionError(f"{folder}: the safetensors have no tensors")
        self.dtype = STORED_DTYPES[max(sorted(dtypes), key=lambda name: dtypes[name])]

    def _read_header(self, shard: Path) -> Counter[str]:
        """Record the tensors of a shard and return how often each dtype occurs."""
        dtypes: Counter[str] = Counter()
        with _open_shard(shard) as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if key in self._shard:
                    raise ConversionError(
                        f"duplicate key {key!r}: in {self._shard[key].name} and in {shard.name}"
                    )
                view = file.get_slice(key)
                dtype = view.get_dtype()
                if dtype not in STORED_DTYPES:
                    raise ConversionError(
                        f"{shard.name}: {key!r} has dtype {dtype}; supported are {sorted(STORED_DTYPES)}"
                    )
                self._shard[key], self.shapes[key] = shard, tuple(view.get_shape())
                dtypes[dtype] += 1
        return dtypes

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        with _open_shard(self._shard[key]) as file:
            value = file.get_tensor(key) if rows is None else file.get_slice(key)[rows]
        if not is_finite(value):
            raise ConversionError(f"{self._shard[key].name}: {key!r} has NaN or Inf")
        return value


def resolve(config: ModelConfig, weights: Weights) -> dict[str, str]:
    """Map the keys of the family's tables to the keys of a checkpoint, which must match exactly.

    Raises:
      ConversionError: keys are missing, unknown or duplicate, or a shape is wrong.
    """
    layers = (None, *range(config.num_layers))
    expected = list_source_shapes(entry for layer in layers for entry in list_entries(config, layer))
    actual: dict[str, str] = {}
    for key in weights.shapes:
        name = _canonicalize(key, config)
        if name in actual:
            raise ConversionError(f"duplicate key: {actual[name]!r} and {key!r} are the same weight")
        actual[name] = key
    ignored = {name for name in actual if name.endswith(IGNORED_SUFFIXES)}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    if missing := [key for key in expected if key not in actual]:
        raise ConversionError(f"missing keys ({len(missing)}): {', '.join(missing[:5])}")
    if unknown := [key for name, key in actual.items() if name not in expected.keys() | ignored]:
        raise ConversionError(f"unknown keys ({len(unknown)}): {', '.join(sorted(unknown)[:5])}")
    for key, shape in expected.items():
        if (actual_shape := weights.shapes[actual[key]]) != shape:
            raise ConversionError(
                f"{actual[key]!r} has shape {actual_shape}, but the config requires {shape}"
            )
    return {key: actual[key] for key in expected}


def is_finite(value: np.ndarray) -> bool:
    """Return whether an array of a supported dtype has no NaN or Inf.

    Both have an exponent of ones. The check runs in chunks, so that it needs little memory.
    """
    bits, exponent = _EXPONENTS[str(value.dtype)]
    flat = value.reshape(-1).view(bits)
    starts = range(0, len(flat), _CHUNK)
    return not any(np.any(flat[start : start + _CHUNK] & exponent == exponent) for start in starts)


_EXPONENTS: dict[str, tuple[Any, int]] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_CHUNK = 1 << 22


def _canonicalize(key: str, config: ModelConfig) -> str:
    """Return a key with the prefix that the table uses."""
    first, *others = get_family(config.family).prefixes
    for prefix in others:
        if key.startswith(prefix):
            return first + key.removeprefix(prefix)
    return key


def _list_shards(folder: Path) -> list[Path]:
    """Return the files of weights; as in transformers, a single file takes precedence over an index."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        if not is_map or not weight_map:
            raise ConversionError(f"{folder / INDEX}: weight_map must map keys to their shards")
        names, existing = sorted(set(weight_map.values())), {path.name for path in folder.iterdir()}
        if absent := [name for name in names if name not in existing]:
            raise ConversionError(
                f"{folder} lacks shards that {INDEX} lists: {', '.join(absent[:5])}; download them"
            )
        return [folder / name for name in names]
    if list(folder.glob("*.bin")):
        code = (
            f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r}, safe_serialization=True)"
        )
        raise ConversionError(
            f"{folder} has only .bin weights; save them as safetensors, where torch is installed, with: "
            f"python -c {shlex.quote(code)}"
        )
    raise ConversionError(f"{folder} has neither {SINGLE} nor {INDEX}")


@contextmanager
def _open_shard(shard: Path) -> Iterator[Any]:
    """Open a shard; raise `ConversionError` with its name for any failure to read it."""
    with foreign_errors_as(ConversionError, f"cannot read {shard}"), shard.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ConversionError(f"{shard} is a Git-LFS pointer, not weights; run `git lfs pull` in its folder")
    with (
        foreign_errors_as(ConversionError, f"{shard} is damaged or not a safetensors file"),
        safe_open(shard, framework="numpy") as tensors,
    ):
        yield tensors
