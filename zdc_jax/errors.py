"""Exceptions that this project raises on purpose. All of them derive from `ZDCError`.

Two built-in exceptions are used as well. `ValueError` reports an option whose value is not among the allowed
names. `NotImplementedError` reports a combination that an implementation does not support.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ZDCError(Exception):
    """Base class of the exceptions that this project raises on purpose."""


class ConversionError(ZDCError, ValueError):
    """Hugging Face folder or GGUF file that cannot be converted. The message names the key and its limits."""


class CheckpointError(ZDCError, ValueError):
    """Converted folder that is missing, incomplete, corrupt or of an unsupported format version."""


class CalibrationError(ZDCError, ValueError):
    """Basis or profile that is missing, belongs to another model, or cannot be calibrated as requested."""


class TextError(ZDCError, ValueError):
    """Text for calibration or evaluation that is missing, unreadable or too short."""


class EvaluationError(ZDCError, ValueError):
    """Evaluation task that is unknown, too long for the context, or not encodable by the tokenizer."""


class PlanError(ZDCError, ValueError):
    """Compression plan that is invalid, corrupt or made for another model."""


class PromptError(ZDCError, ValueError):
    """Prompt that is empty, too long or contains ids outside the vocabulary."""


class ChatError(ZDCError, ValueError):
    """Missing or unusable chat template, or messages that the template rejects."""


class NonFiniteError(ZDCError, ArithmeticError):
    """Results with NaN or Inf, mostly because activations exceed the dtype. The message names other dtypes.

    Args:
      what: what is not finite, for the beginning of the message.
      dtype: dtype that the model runs in.
    """

    def __init__(self, what: str, dtype: str):
        advice = {
            "float16": "activations exceed its range; load the model with dtype bfloat16 or float32",
            "bfloat16": "load the model with dtype float32; if that does not help, check weights and plan",
        }.get(dtype, "check the weights with `zdc inspect --check`, and the plan")
        super().__init__(f"{what} not finite (NaN or Inf) in dtype {dtype}: {advice}")


class CacheMemoryError(ZDCError, MemoryError):
    """KV cache that exceeds the memory. The message names a size that fits."""


class MeshError(ZDCError, ValueError):
    """Device mesh that is unavailable, or does not fit the model, the batch or the prompt."""


class ProcessError(ZDCError, RuntimeError):
    """Failure of the processes of one mesh to connect. The message names the missing processes."""


def describe_error(error: BaseException) -> str:
    """Return the text of an exception; for errors of the operating system without number and path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error)


@contextmanager
def foreign_errors_as(kind: type[ZDCError], what: str) -> Iterator[None]:
    """Convert exceptions of third-party libraries to `kind`; pass on `ZDCError` and interrupts unchanged.

    Rust libraries panic with a pyo3 exception that neither derives from `Exception` nor has a public name.

    Args:
      kind: exception to raise.
      what: beginning of its message, with the name of the file, if any; the text of the original exception
        follows.
    """
    try:
        yield
    except ZDCError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {describe_error(error)}") from error
