"""Reading of tensors in GGUF files, dequantized in chunks."""

from functools import cache

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from convert.gguf.reader import Tensor
from zdc_jax.errors import ConversionError, foreign_errors_as

PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of the types that are not quantized."""
CHUNK = 1 << 20
"""Numbers to dequantize at a time."""


@cache
def is_supported(kind: GGMLQuantizationType) -> bool:
    """Return whether the package `gguf` can dequantize a type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_tensor(tensor: Tensor, rows: slice | None = None) -> np.ndarray:
    """Read a tensor or some of its rows, in its own dtype or, if it is quantized, in float32.

    Raises:
      ConversionError: the file cannot be read, or is shorter than its header says.
    """
    if rows is not None and len(tensor.shape) == 1:
        return read_tensor(tensor)[rows]
    height, width = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
    start, stop, _ = (rows or slice(None)).indices(height)
    values = np.empty((stop - start, width), PLAIN.get(tensor.kind, np.dtype(np.float32)))
    step = max(1, CHUNK // width)
    with foreign_errors_as(ConversionError, f"cannot read {tensor.path}"), tensor.path.open("rb") as file:
        file.seek(tensor.start + start * tensor.row_bytes)
        for first in range(0, stop - start, step):
            chunk = values[first : first + step]
            data = np.fromfile(file, np.uint8, len(chunk) * tensor.row_bytes)
            if data.size < len(chunk) * tensor.row_bytes:
                raise ConversionError(f"{tensor.path} became shorter while it was read; convert again")
            chunk[:] = _decode(data.reshape(len(chunk), -1), tensor.kind)
    return values.reshape(stop - start, *tensor.shape[1:]) if len(tensor.shape) > 1 else values[0]


def _decode(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Decode bytes [rows, bytes] to numbers [rows, in]."""
    if kind in PLAIN:
        return data.view(PLAIN[kind])
    with np.errstate(all="ignore"):  # Damaged blocks decode to NaN or Inf, which `GGUFWeights.read` refuses.
        return dequantize(data, kind)
