"""Headers of GGUF files: metadata and where tensors lie, every promise checked against the size of the file.

`gguf.GGUFReader` believes the counts of a header, cuts what is past the end short without a word, and takes
seconds and hundreds of megabytes for a vocabulary. So headers are read here. All numbers are little-endian:

    magic, version u32, number of tensors u64, number of values u64
    values   key, type u32, value
    tensors  name, number of axes u32, axes u64 (innermost first), type u32, offset u64 from the first tensor
    data     tensors in this order, each aligned
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from zdc_jax.errors import ConversionError, foreign_errors_as

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_ELEMENTS = 1 << 24
"""Bound on one string or array of a header; the largest vocabularies have a sixteenth of it."""
MOST_AXES = 4
SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file, its first byte there, its type and its shape [out, in]."""

    path: Path
    start: int
    kind: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Of one row; a vector is one."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return prod(self.shape[:-1]) * self.row_bytes


def as_written(values: np.ndarray) -> list[float]:
    """Float32 values [n] as the shortest decimals that round to them, which is what was meant: 1e-05."""
    return values.astype("U").astype(float).tolist()


@dataclass(frozen=True)
class GGUF:
    """What headers say: `metadata` by key, `tensors` by name. `path` is the file given, one of all parts."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_gguf(path: Path) -> GGUF:
    """Reads the header of a file, or those of all parts that it is split into; any part may be given.

    Raises:
      ConversionError: no GGUF file, one of another version or byte order, a damaged or cut off one, a key or
        a name twice, absent parts or parts of other models.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if count == 1:
        return first
    parts = [_read_part(part) for part in _part_paths(path, count)]
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number, count):
            raise ConversionError(
                f"{part.path}: split.no and split.count are {found}, expected {(number, count)}"
            )
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ConversionError(f"{part.path}: tensor {twice[0]!r} is in an earlier part too")
        tensors |= part.tensors
    if (promised := parts[0].metadata.get("split.tensors.count")) != len(tensors):
        raise ConversionError(
            f"{path}: its parts hold {len(tensors)} tensors, split.tensors.count is {promised!r:.80}"
        )
    return GGUF(path, parts[0].metadata, tensors)


def _part_paths(path: Path, count: Any) -> list[Path]:
    """All parts of the model of one, in order, once all are there."""
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ConversionError(
            f"{path}: a part of a model of split.count={count!r:.80} must be named as llama.cpp names it: "
            "-00001-of-00003.gguf at the end is the first of three"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in paths if not part.is_file()]:
        raise ConversionError(f"{path.parent} lacks parts ({len(absent)}): {', '.join(absent[:5])}")
    return paths


def _read_part(path: Path) -> GGUF:
    with foreign_errors_as(ConversionError, f"cannot read {path}"), path.open("rb") as file:
        header = _Header(path, file)
        num_tensors, num_values = header.start()
        metadata = header.metadata(num_values)
        return GGUF(path, metadata, header.tensors(num_tensors, metadata.get("general.alignment", 32)))


class _Header:
    """Reads forward through a header; what would pass the end of the file is not read but refused."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self._file, self._size = path, file, path.stat().st_size

    def _refuse(self, what: str) -> ConversionError:
        return ConversionError(f"{self.path}: {what}")

    def _check_left(self, size: int, what: str) -> None:
        if size > (left := self._size - self._file.tell()):
            raise self._refuse(f"{what} takes {size} bytes, the file has {left} left: damaged or cut off")

    def _take(self, size: int, what: str) -> bytes:
        self._check_left(size, what)
        return self._file.read(size)

    def _number(self, form: str, what: str) -> Any:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form), what))
        return value

    def _string(self, what: str) -> str:
        if (length := self._number("<Q", what)) > MOST_ELEMENTS:
            raise self._refuse(f"{what} has a string of {length} bytes, more than {MOST_ELEMENTS}: damaged")
        return self._take(length, what).decode()

    def start(self) -> tuple[int, int]:
        """The numbers of tensors and of values, once the file is one of a supported version."""
        start = self._file.read(4)
        if start != MAGIC:
            pointer = (start + self._file.read(60)).startswith(b"version https://git-lfs")
            raise self._refuse("a Git-LFS pointer; run `git lfs pull`" if pointer else "not a GGUF file")
        version = self._number("<I", "the version")
        if version and not version & 0xFFFF:
            raise self._refuse("written for big-endian machines; only little-endian files are supported")
        if version not in VERSIONS:
            raise self._refuse(f"GGUF version {version} is not supported; supported are {VERSIONS}")
        counts = self._number("<Q", "the header"), self._number("<Q", "the header")
        for count, least, what in zip(counts, (24, 13), ("tensors", "values"), strict=True):
            self._check_left(count * least, f"a header of {count} {what}")
        return counts

    def metadata(self, count: int) -> dict[str, Any]:
        """Values by key; arrays are lists."""
        values: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"key {index}")
            if key in values:
                raise self._refuse(f"duplicate key {key!r:.80}")
            values[key] = self._value(self._number("<I", key), key)
        return values

    def _value(self, number: int, key: str) -> Any:
        kind = self._kind(number, key)
        if kind is GGUFValueType.STRING:
            return self._string(key)
        if kind is GGUFValueType.ARRAY:
            return self._array(self._kind(self._number("<I", key), key), self._number("<Q", key), key)
        return self._scalars(SCALARS[kind], 1, key)[0]

    def _kind(self, number: int, key: str) -> GGUFValueType:
        if number not in set(GGUFValueType):
            raise self._refuse(f"{key!r:.80} has the unknown type {number}: damaged")
        return GGUFValueType(number)

    def _array(self, kind: GGUFValueType, length: int, key: str) -> list[Any]:
        if kind is GGUFValueType.ARRAY:
            raise self._refuse(f"{key!r:.80} is an array of arrays, which is not supported")
        if length > MOST_ELEMENTS:
            raise self._refuse(f"{key!r:.80} has {length} elements, more than {MOST_ELEMENTS}: damaged")
        if kind is GGUFValueType.STRING:
            self._check_left(8 * length, key)
            return [self._string(key) for _ in range(length)]
        return self._scalars(SCALARS[kind], length, key)

    def _scalars(self, form: str, count: int, key: str) -> list[Any]:
        dtype = np.dtype(form)
        values = np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
        return as_written(values) if form == "<f4" else values.tolist()

    def tensors(self, count: int, alignment: Any) -> dict[str, Tensor]:
        """Tensors by name, once all their data are known to lie in the file, one after the other."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._refuse(f"general.alignment={alignment!r:.80} must be a power of two")
        infos = [self._tensor_info() for _ in range(count)]

        def aligned(at):
            return at + -at % alignment

        data, end, tensors = aligned(self._file.tell()), 0, dict[str, Tensor]()
        for name, offset, place in infos:
            tensor = place(start=data + offset)
            if name in tensors:
                raise self._refuse(f"duplicate tensor {name!r:.80}")
            if offset != aligned(end):
                raise self._refuse(f"tensor {name!r:.80} lies at {offset}, expected {aligned(end)}: damaged")
            end = offset + tensor.bytes
            if data + end > self._size:
                raise self._refuse(
                    f"tensor {name!r:.80} ends at byte {data + end}, the file has {self._size}: cut off"
                )
            tensors[name] = tensor
        return tensors

    def _tensor_info(self) -> tuple[str, int, "partial[Tensor]"]:
        name = self._string("the name of a tensor")
        if not 1 <= (num_axes := self._number("<I", name)) <= MOST_AXES:
            raise self._refuse(f"tensor {name!r:.80} has {num_axes} axes, it must have 1 to {MOST_AXES}")
        axes = [self._number("<Q", name) for _ in range(num_axes)]
        number, offset = self._number("<I", name), self._number("<Q", name)
        if number not in set(GGMLQuantizationType):
            raise self._refuse(f"tensor {name!r:.80} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        block, _ = GGML_QUANT_SIZES[kind]
        if not all(axes) or axes[0] % block:
            raise self._refuse(
                f"tensor {name!r:.80} has axes {axes}; they must be > 0, and the first a multiple of {block} "
                f"({kind.name})"
            )
        return name, offset, partial(Tensor, path=self.path, kind=kind, shape=tuple(reversed(axes)))
