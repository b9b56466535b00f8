"""Reader of GGUF headers: metadata and positions of tensors, all checked against the size of the file.

`gguf.GGUFReader` trusts the counts in a header, silently truncates data past the end, and needs seconds and
hundreds of megabytes for a vocabulary. So this module has its own reader. All numbers are little-endian:

    start:   magic, version u32, number of tensors u64, number of values u64
    values:  key, type u32, value
    tensors: name, number of axes u32, axes u64 (innermost first), type u32, offset u64 from the first tensor
    data:    tensors in this order, each aligned
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from zdc_jax.errors import ConversionError, foreign_errors_as

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ELEMENTS = 1 << 24
"""Longest string or array in a header, in bytes or elements; large vocabularies have a sixteenth of it."""
MAX_AXES = 4
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""File name of a part of a split model: stem, number and count."""


@dataclass(frozen=True)
class Tensor:
    """Position and type of one tensor.

    Attributes:
      path: file of the tensor.
      start: first byte in the file.
      kind: type, which may be quantized.
      shape: shape, for a matrix [out, in].
    """

    path: Path
    start: int
    kind: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; a vector has one row."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return prod(self.shape[:-1]) * self.row_bytes


def to_shortest_decimals(values: np.ndarray) -> list[float]:
    """Return float32 values [n] as the shortest decimals that round to them, such as 1e-05.

    These are the numbers that the writer of the file meant.
    """
    return values.astype("U").astype(float).tolist()


@dataclass(frozen=True)
class GGUF:
    """Headers of a GGUF file, or of all parts of a split one.

    Attributes:
      path: the file, or any one of the parts.
      metadata: values by key.
      tensors: tensors by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_gguf(path: Path) -> GGUF:
    """Read the header of a file or, given any part of a split model, those of all parts.

    Raises:
      ConversionError: the file is not GGUF, has another version or byte order, or is damaged or cut off; a
        key or name occurs twice; or parts are missing or belong to another model.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if count == 1:
        return first
    parts = [_read_part(part) for part in _list_parts(path, count)]
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        actual = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if actual != (number, count):
            raise ConversionError(
                f"{part.path}: split.no and split.count are {actual}, expected {(number, count)}"
            )
        if duplicates := sorted(tensors.keys() & part.tensors.keys()):
            raise ConversionError(f"{part.path}: tensor {duplicates[0]!r} is in an earlier part too")
        tensors |= part.tensors
    if (expected := parts[0].metadata.get("split.tensors.count")) != len(tensors):
        raise ConversionError(
            f"{path}: the parts have {len(tensors)} tensors, but split.tensors.count is {expected!r:.80}"
        )
    return GGUF(path, parts[0].metadata, tensors)


def _list_parts(path: Path, count: Any) -> list[Path]:
    """Return the paths of all parts of a split model, in order.

    Raises:
      ConversionError: the file is not named like a part, or parts are missing.
    """
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ConversionError(
            f"{path}: a part of a model with split.count={count!r:.80} must be named like "
            "MODEL-00001-of-00003.gguf, the first of three parts"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in paths if not part.is_file()]:
        raise ConversionError(f"{path.parent} lacks parts ({len(absent)}): {', '.join(absent[:5])}")
    return paths


def _read_part(path: Path) -> GGUF:
    with foreign_errors_as(ConversionError, f"cannot read {path}"), path.open("rb") as file:
        header = _Header(path, file)
        num_tensors, num_values = header.read_start()
        metadata = header.read_metadata(num_values)
        return GGUF(path, metadata, header.read_tensors(num_tensors, metadata.get("general.alignment", 32)))


class _Header:
    """Forward reader of a header that raises `ConversionError` where data would pass the end of the file."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self._file, self._size = path, file, path.stat().st_size

    def _make_error(self, reason: str) -> ConversionError:
        return ConversionError(f"{self.path}: {reason}")

    def _check_left(self, size: int, item: str) -> None:
        if size > (left := self._size - self._file.tell()):
            raise self._make_error(f"{item} takes {size} bytes, the file has {left} left: damaged or cut off")

    def _read_bytes(self, size: int, item: str) -> bytes:
        self._check_left(size, item)
        return self._file.read(size)

    def _read_number(self, form: str, item: str) -> Any:
        (value,) = struct.unpack(form, self._read_bytes(struct.calcsize(form), item))
        return value

    def _read_string(self, item: str) -> str:
        if (length := self._read_number("<Q", item)) > MAX_ELEMENTS:
            raise self._make_error(
                f"{item} has a string of {length} bytes, more than {MAX_ELEMENTS}: damaged"
            )
        return self._read_bytes(length, item).decode()

    def read_start(self) -> tuple[int, int]:
        """Read magic and version, and return the numbers of tensors and of values."""
        start = self._file.read(4)
        if start != MAGIC:
            pointer = (start + self._file.read(60)).startswith(b"version https://git-lfs")
            raise self._make_error("a Git-LFS pointer; run `git lfs pull`" if pointer else "not a GGUF file")
        version = self._read_number("<I", "the version")
        if version and not version & 0xFFFF:
            raise self._make_error("written for big-endian machines; only little-endian files are supported")
        if version not in VERSIONS:
            raise self._make_error(f"GGUF version {version} is not supported; supported are {VERSIONS}")
        counts = self._read_number("<Q", "the header"), self._read_number("<Q", "the header")
        for count, least_bytes, items in zip(counts, (24, 13), ("tensors", "values"), strict=True):
            self._check_left(count * least_bytes, f"a header of {count} {items}")
        return counts

    def read_metadata(self, count: int) -> dict[str, Any]:
        """Read values by key; arrays become lists."""
        values: dict[str, Any] = {}
        for index in range(count):
            key = self._read_string(f"key {index}")
            if key in values:
                raise self._make_error(f"duplicate key {key!r:.80}")
            values[key] = self._read_value(self._read_number("<I", key), key)
        return values

    def _read_value(self, number: int, key: str) -> Any:
        kind = self._parse_kind(number, key)
        if kind is GGUFValueType.STRING:
            return self._read_string(key)
        if kind is GGUFValueType.ARRAY:
            element_kind = self._parse_kind(self._read_number("<I", key), key)
            return self._read_array(element_kind, self._read_number("<Q", key), key)
        return self._read_scalars(kind, 1, key)[0]

    def _parse_kind(self, number: int, key: str) -> GGUFValueType:
        if number not in set(GGUFValueType):
            raise self._make_error(f"{key!r:.80} has the unknown type {number}: damaged")
        return GGUFValueType(number)

    def _read_array(self, kind: GGUFValueType, length: int, key: str) -> list[Any]:
        if kind is GGUFValueType.ARRAY:
            raise self._make_error(f"{key!r:.80} is an array of arrays, which is not supported")
        if length > MAX_ELEMENTS:
            raise self._make_error(f"{key!r:.80} has {length} elements, more than {MAX_ELEMENTS}: damaged")
        if kind is GGUFValueType.STRING:
            self._check_left(8 * length, key)
            return [self._read_string(key) for _ in range(length)]
        return self._read_scalars(kind, length, key)

    def _read_scalars(self, kind: GGUFValueType, count: int, key: str) -> list[Any]:
        dtype = np.dtype(GGUFReader.gguf_scalar_to_np[kind]).newbyteorder("<")
        values = np.frombuffer(self._read_bytes(count * dtype.itemsize, key), dtype)
        return to_shortest_decimals(values) if kind is GGUFValueType.FLOAT32 else values.tolist()

    def read_tensors(self, count: int, alignment: Any) -> dict[str, Tensor]:
        """Read tensors by name, and check that their data follow each other within the file."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._make_error(f"general.alignment={alignment!r:.80} must be a power of two")
        infos = [self._read_tensor_info() for _ in range(count)]

        def align(offset: int) -> int:
            return offset + -offset % alignment

        data, end, tensors = align(self._file.tell()), 0, dict[str, Tensor]()
        for name, offset, kind, shape in infos:
            tensor = Tensor(self.path, data + offset, kind, shape)
            if name in tensors:
                raise self._make_error(f"duplicate tensor {name!r:.80}")
            if offset != align(end):
                raise self._make_error(
                    f"tensor {name!r:.80} lies at {offset}, expected {align(end)}: damaged"
                )
            end = offset + tensor.bytes
            if data + end > self._size:
                raise self._make_error(
                    f"tensor {name!r:.80} ends at byte {data + end}, the file has {self._size}: cut off"
                )
            tensors[name] = tensor
        return tensors

    def _read_tensor_info(self) -> tuple[str, int, GGMLQuantizationType, tuple[int, ...]]:
        """Read name, offset from the first tensor, type and shape of a tensor."""
        name = self._read_string("the name of a tensor")
        if not 1 <= (num_axes := self._read_number("<I", name)) <= MAX_AXES:
            raise self._make_error(f"tensor {name!r:.80} has {num_axes} axes, it must have 1 to {MAX_AXES}")
        axes = [self._read_number("<Q", name) for _ in range(num_axes)]
        number, offset = self._read_number("<I", name), self._read_number("<Q", name)
        if number not in set(GGMLQuantizationType):
            raise self._make_error(f"tensor {name!r:.80} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        block, _ = GGML_QUANT_SIZES[kind]
        if not all(axes) or axes[0] % block:
            raise self._make_error(
                f"tensor {name!r:.80} has axes {axes}; they must be > 0, and the first a multiple of {block} "
                f"({kind.name})"
            )
        return name, offset, kind, tuple(reversed(axes))
