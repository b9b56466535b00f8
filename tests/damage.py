"""Random damage to bytes, JSON values and GGUF files."""

import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Type

from convert.gguf.reader import read_gguf

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 4096, 4097, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**30, 10**400),
    *(0.5, -0.5, 2.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "1", "\0", "\ud800", "../config.json", "/dev/zero", "x" * 5000, "float16", "linear"),
    *([], {}, [[]], [None], [1, "a"], {"a": 1}, {"factor": 2.0, "type": "linear"}, ["LlamaForCausalLM"]),
    *("yarn", "longrope", "dynamic", "sliding_attention", ["full_attention"] * 2, [1.0] * 6, 1e-300, 1e300),
)
"""Junk values for a place in JSON."""
NUMBERS = (0, 1, 2, 3, 31, 33, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
"""Junk numbers for a place in a header."""
EDGE = 24
"""Bytes of magic, version and counts."""


# --- Bytes and JSON ---------------------------------------------------------------------------------------


def mutated_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip, overwrite, cut, repeat or fill one stretch of the data, or truncate or drop the data."""
    at, length = int(rng.integers(len(data) + 1)), int(rng.integers(1, 64))
    head, piece, tail = data[:at], data[at : at + length], data[at + length :]
    random = rng.bytes(len(piece))
    flipped = bytes([piece[0] ^ 1 << rng.integers(8)]) + piece[1:] if piece else b""
    choices = (flipped, random, b"", piece * 2, bytes(len(piece)), piece + random)
    return [*(head + choice + tail for choice in (flipped, *choices)), head, head, b""][rng.integers(10)]


def mutated_json(value: Any, rng: np.random.Generator) -> Any:
    """Return the value with junk, a deletion, another of its values or more nesting at one place."""
    value = [deepcopy(value)]
    places = list(_places(value))
    holder, key = places[rng.integers(len(places))]
    other, its_key = places[rng.integers(len(places))]
    match rng.integers(10):
        case 0:
            del holder[key]
            return value[0] if value else None
        case 1:
            holder[key] = deepcopy(other[its_key])
        case 2:
            holder[key] = [holder[key]]
        case 3 if isinstance(holder, dict):
            holder[str(JUNK[rng.integers(len(JUNK))])] = holder.pop(key)
        case 4 if isinstance(holder[key], int | float):
            holder[key] = holder[key] * [-1, 2, 0.5, 1000, 10**12][rng.integers(5)]
        case _:
            holder[key] = JUNK[rng.integers(len(JUNK))]
    return value[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


# --- GGUF -------------------------------------------------------------------------------------------------


def mutate_gguf(path: Path, rng: np.random.Generator) -> None:
    """Damage the metadata, the header, the data or all of a GGUF file."""
    data, file = path.read_bytes(), read_gguf(path)
    infos = data.index(_text(next(iter(file.tensors))))
    end = next(iter(file.tensors.values())).start
    start, values, tensors, body = data[:EDGE], data[EDGE:infos], data[infos:end], data[end:]
    match rng.integers(7):
        case 0 | 1:
            packed = _pack_all(mutated_json(dict(file.metadata), rng))
            start = data[:16] + struct.pack("<Q", len(packed))
            values, tensors = b"".join(packed), data[infos : infos + _size_of(data, infos, len(file.tensors))]
            tensors += bytes(-(EDGE + len(values) + len(tensors)) % 32)
        case 2:
            start = _with_number(start, rng)
        case 3:
            tensors = _with_number(tensors, rng) if rng.random() < 0.7 else mutated_bytes(tensors, rng)
        case 4:
            values = _with_number(values, rng) if rng.random() < 0.5 else mutated_bytes(values, rng)
        case 5:
            body = mutated_bytes(body, rng)
        case _:
            start, values, tensors, body = mutated_bytes(data, rng), b"", b"", b""
    path.write_bytes(start + values + tensors + body)


def _with_number(data: bytes, rng: np.random.Generator) -> bytes:
    form = ("<I", "<Q")[rng.integers(2)]
    size = struct.calcsize(form)
    at = int(rng.integers(len(data) - size + 1))
    number = NUMBERS[rng.integers(len(NUMBERS))] % 256**size
    return data[:at] + struct.pack(form, number) + data[at + size :]


def _size_of(data: bytes, at: int, count: int) -> int:
    """Count the bytes of `count` tensor descriptions."""
    start = at
    for _ in range(count):
        (name,) = struct.unpack_from("<Q", data, at)
        (axes,) = struct.unpack_from("<I", data, at + 8 + name)
        at += 8 + name + 4 + 8 * axes + 4 + 8
    return at - start


def _pack_all(values: Any) -> list[bytes]:
    """Pack keys and values; skip those that a GGUF file cannot represent."""
    packed = []
    for key, value in values.items() if isinstance(values, dict) else ():
        try:
            packed.append(_text(key) + _packed(value))
        except (TypeError, UnicodeError, struct.error):
            continue
    return packed


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _packed(value: Any) -> bytes:
    """Pack a value after its type; raise for values without a type."""
    if isinstance(value, list):
        elements = [_packed(each) for each in value]
        kinds = {each[:4] for each in elements} or {struct.pack("<I", Type.UINT8)}
        if len(kinds) > 1:
            raise TypeError("elements of one list have one type")
        kind = kinds.pop()
        return (
            struct.pack("<I", Type.ARRAY)
            + kind
            + struct.pack("<Q", len(value))
            + b"".join(x[4:] for x in elements)
        )
    if isinstance(value, str):
        return struct.pack("<I", Type.STRING) + _text(value)
    forms = {bool: (Type.BOOL, "?"), float: (Type.FLOAT64, "d"), int: (Type.UINT32, "I")}
    if type(value) not in forms:
        raise TypeError(f"{value!r} has no type in GGUF files")
    kind, form = forms[type(value)]
    if type(value) is int and not 0 <= value < 2**32:
        kind, form = (Type.INT32, "i") if value < 0 else (Type.UINT64, "Q")
    return struct.pack("<I", kind) + struct.pack(f"<{form}", value)
