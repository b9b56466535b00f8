"""Hugging Face weights: keys by the family's tables, shards read lazily, every departure from it an error."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

from convert.hf.config import read_json
from convert.hf.families import named
from zdc_jax.config import ModelConfig
from zdc_jax.errors import ConversionError, foreign_errors_as
from zdc_jax.model.params import embedding_shapes, layer_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""
TABLES = ("tokens", "positions", "lm_head")
"""Not transposed: their rows are looked up."""


@dataclass(frozen=True)
class Entry:
    """One parameter: its path in our tree, its source key, and both shapes.

    A source matrix is [out, in] with heads merged; ours is [in, out] with heads apart. `rows` are those of
    the source that are this parameter's; None: all, nothing else is stored under the key.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    rows: slice | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of this parameter's rows in the checkpoint."""
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
        """Whether the source is one; ours may have heads apart, as biases of q, k and v do."""
        return len(self.shape) == 1 or self.path[-1].endswith("_bias")

    @property
    def _as_stored(self) -> bool:
        return self._is_vector or self.path[-1] in TABLES

    def to_ours(self, source: np.ndarray) -> np.ndarray:
        """Transposes and splits heads."""
        turned = source if self._as_stored else source.T
        return np.ascontiguousarray(turned).reshape(self.shape)

    def to_source(self, ours: np.ndarray) -> np.ndarray:
        """Inverse of `to_ours`."""
        if self._as_stored:
            return ours.reshape(self.source_shape)
        return np.ascontiguousarray(ours.reshape(self.source_shape[::-1]).T)


def entries(config: ModelConfig, layer: int | None) -> list[Entry]:
    """The table of one layer, or (None) of everything outside the layers, for this config."""
    family = named(config.family)
    prefix = family.prefixes[0]
    if layer is None:
        names, shapes = family.embeddings, embedding_shapes(config)
    else:
        names, shapes, prefix = family.layer, layer_shapes(config, layer), f"{prefix}layers.{layer}."
    order = list(names)

    def place(entry):
        return order.index("/".join(entry.path).removesuffix("_bias"))

    def key(path):
        return _source_key("/".join(path), names, prefix)

    return _stacked(sorted((Entry(path, key(path), shape) for path, shape in flatten(shapes)), key=place))


def _source_key(path: str, names: Mapping[str, str], prefix: str) -> str:
    key = names.get(path) or names[path.removesuffix("_bias")].removesuffix("weight") + "bias"
    return key if key.startswith("lm_head") else prefix + key


def _stacked(alone: list[Entry]) -> list[Entry]:
    """With the rows of those that share a key, which follow each other there."""
    count, first = Counter(entry.key for entry in alone), Counter[str]()
    stacked = []
    for entry in alone:
        start = first[entry.key]
        first[entry.key] += entry.source_shape[0]
        rows = slice(start, first[entry.key]) if count[entry.key] > 1 else None
        stacked.append(replace(entry, rows=rows))
    return stacked


def source_shapes(table: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Key → shape that the checkpoint must have."""
    return {
        entry.key: entry.source_shape if entry.rows is None else (entry.rows.stop, *entry.source_shape[1:])
        for entry in table
    }


def flatten(tree: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of a nested dict, in its order."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*at, name))
        else:
            yield (*at, name), value


class Weights(Protocol):
    """Tensors of a checkpoint under Hugging Face's keys, in its layout; `shapes` is known without reading.

    `dtype` is that to store the model in where none is asked for.
    """

    dtype: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Key → shape."""

    def read(self, key: str, rows: slice | None = None) -> np.ndarray:
        """One tensor, or some of its rows; raises `ConversionError` where it holds NaN or Inf."""


class HFWeights:
    """The tensors of a Hugging Face folder, checked by their headers, read one at a time.

    Raises:
      ConversionError: no safetensors (or only `.bin`), a shard missing, cut off or left as a Git-LFS
        pointer, no tensors at all, a key in two shards, a dtype that is not supported.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shard: dict[str, Path] = {}
        dtypes: Counter[str] = Counter()
        for shard in _shards(folder):
            dtypes += self._read_header(shard)
        if not self.shapes:
            raise ConversionError(f"{folder}: its safetensors hold no tensors")
        self.dtype = STORED_DTYPES[max(sorted(dtypes), key=lambda name: dtypes[name])]

    def _read_header(self, shard: Path) -> Counter[str]:
        """Notes what a shard holds; gives how often each dtype occurs."""
        dtypes: Counter[str] = Counter()
        with _opened(shard) as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
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
        """One tensor, or some of its rows; raises `ConversionError` where it holds NaN or Inf."""
        with _opened(self._shard[key]) as file:
            value = file.get_tensor(key) if rows is None else file.get_slice(key)[rows]
        if not is_finite(value):
            raise ConversionError(f"{self._shard[key].name}: {key!r} holds NaN or Inf")
        return value


def resolve(config: ModelConfig, weights: Weights) -> dict[str, str]:
    """Table key → key in the checkpoint, once all are known to be there, with their shapes, and no others.

    Raises:
      ConversionError: missing, unknown or duplicate keys, or a wrong shape, naming them.
    """
    layers = (None, *range(config.num_layers))
    wanted = source_shapes(entry for layer in layers for entry in entries(config, layer))
    found: dict[str, str] = {}
    for key in weights.shapes:
        name = _canonical(key, config)
        if name in found:
            raise ConversionError(f"duplicate key: {found[name]!r} and {key!r} are the same weight")
        found[name] = key
    ignored = {name for name in found if name.endswith(IGNORED_SUFFIXES)}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    if missing := [key for key in wanted if key not in found]:
        raise ConversionError(f"missing keys ({len(missing)}): {', '.join(missing[:5])}")
    if unknown := [key for name, key in found.items() if name not in wanted.keys() | ignored]:
        raise ConversionError(f"unknown keys ({len(unknown)}): {', '.join(sorted(unknown)[:5])}")
    for key, shape in wanted.items():
        if (there := weights.shapes[found[key]]) != shape:
            raise ConversionError(f"{found[key]!r} has shape {there}, the config asks for {shape}")
    return {key: found[key] for key in wanted}


def is_finite(value: np.ndarray) -> bool:
    """Whether an array of a supported dtype has no NaN or Inf (exponent all ones), in little memory."""
    bits, exponent = _EXPONENTS[str(value.dtype)]
    flat = value.reshape(-1).view(bits)
    pieces = range(0, len(flat), _PIECE)
    return not any(np.any(flat[at : at + _PIECE] & exponent == exponent) for at in pieces)


_EXPONENTS: dict[str, tuple[Any, int]] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_PIECE = 1 << 22


def _canonical(key: str, config: ModelConfig) -> str:
    """The key as the table writes it."""
    first, *others = named(config.family).prefixes
    for prefix in others:
        if key.startswith(prefix):
            return first + key.removeprefix(prefix)
    return key


def _shards(folder: Path) -> list[Path]:
    """The files of weights; one whole file comes before an index, as in transformers."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        if not is_map or not weight_map:
            raise ConversionError(f"{folder / INDEX}: weight_map must list keys and their shards")
        names, there = sorted(set(weight_map.values())), {path.name for path in folder.iterdir()}
        if absent := [name for name in names if name not in there]:
            raise ConversionError(f"{folder} lacks shards that {INDEX} lists: {', '.join(absent[:5])}")
        return [folder / name for name in names]
    if list(folder.glob("*.bin")):
        code = (
            f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r}, safe_serialization=True)"
        )
        raise ConversionError(
            f"{folder} holds only .bin weights; re-save them once, where torch is installed: "
            f"python -c {shlex.quote(code)}"
        )
    raise ConversionError(f"{folder} has neither {SINGLE} nor {INDEX}")


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    """A shard's safetensors; raises `ConversionError` naming it for whatever reading meets."""
    with foreign_errors_as(ConversionError, f"cannot read {shard}"), shard.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ConversionError(f"{shard} is a Git-LFS pointer, not weights; run `git lfs pull` in its folder")
    with (
        foreign_errors_as(ConversionError, f"{shard} is not a whole safetensors file"),
        safe_open(shard, framework="numpy") as tensors,
    ):
        yield tensors
