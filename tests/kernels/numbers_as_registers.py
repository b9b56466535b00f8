"""Unpacking of levels, instruction by instruction, with Python's integers as registers."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.quantized import packed_loads, unpack

MASK = 2**32 - 1
ARITH = SimpleNamespace(
    addi=lambda a, b: a + b & MASK,
    muli=lambda a, b: a * b & MASK,
    divui=lambda a, b: a // b,
    remui=lambda a, b: a % b,
    andi=lambda a, b: a & b,
    ori=lambda a, b: a | b,
    shli=lambda a, b: a << b & MASK,
    shrui=lambda a, b: a >> b,
)


def unpacked(patch: pytest.MonkeyPatch, row: np.ndarray, C: int, bits: int) -> np.ndarray:
    """Unpack a row uint8 [C·bits/8] with its four threads, and return it in the order of columns."""
    found = np.zeros((C // 8, 4, 2), np.float64)
    for thread in range(4):
        for module in (packed_loads, unpack):
            patch.setattr(module, "arith", ARITH)
            patch.setattr(module, "asm", _asm)
            patch.setattr(module, "_int", lambda value: value)
        patch.setattr(packed_loads, "_times", lambda x, factor: x * factor)
        patch.setattr(packed_loads, "_at", lambda pointer, offset: pointer + offset)
        patch.setattr(packed_loads, "_words", lambda begin, size, piece: _words(row, begin, size, piece))
        patch.setattr(packed_loads.mgpu.utils, "thread_idx", lambda thread=thread: thread)
        words, begin = [], 0
        for plane in unpack.bit_planes(bits):
            words += packed_loads._quarter(begin, C * plane // 4)
            begin += C * plane // 8
        assert len(words) == unpack.words_of(C, bits)
        for tile, pair in enumerate(unpack._pairs(words, C // 4, bits)):
            found[tile, thread] = _floats(pair)
    return found.reshape(C)


def _words(row: np.ndarray, begin: int, size: int, piece: int) -> list[int]:
    assert begin % piece == 0
    assert len(row) % piece == 0
    assert begin + size <= len(row)
    loaded = row[begin : begin + size].tobytes()
    return [int.from_bytes(loaded[at : at + 4], "little") for at in range(0, size, 4)]


def _floats(pair: int) -> np.ndarray:
    return np.array([pair & 0xFFFF, pair >> 16], np.uint16).view(ml_dtypes.bfloat16)


def _number(pair: np.ndarray) -> int:
    low, high = pair.astype(ml_dtypes.bfloat16).view(np.uint16).tolist()
    return low | high << 16


def _asm(text: str, *operands: Any) -> int:
    """Execute an instruction of unpacking by NVIDIA's PTX manual; bfloat16 rounds each result."""
    name, *immediate = text.replace(",", " ").replace(";", " ").split()
    match name:
        case "prmt.b32":
            a, b = operands
            pool = (a | b << 32).to_bytes(8, "little")
            selector = int(immediate[-1])
            return int.from_bytes((pool[selector >> 4 * i & 7] for i in range(4)), "little")
        case "lop3.b32":
            a, b = operands
            match int(immediate[-1]):
                case 0xEA:
                    return a & int(immediate[2]) | b
                case 0xA8:
                    return (a | b) & int(immediate[3])
                case 0xE4:
                    return a & int(immediate[3]) | b & ~int(immediate[3])
        case "shf.r.clamp.b32":
            low, high, shift = operands
            return (low | high << 32) >> shift & MASK
        case "sub.rn.bf16x2":
            a, b = map(_floats, operands)
            return _number(a - b)
        case "fma.rn.bf16x2":
            a, b, c = (_floats(x).astype(np.float64) for x in operands)
            return _number(a * b + c)
    raise NotImplementedError(name)
