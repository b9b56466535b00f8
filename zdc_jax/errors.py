"""Errors that this project raises on purpose, in one family for callers to catch.

Beside them stand `ValueError` for a name that is not among those an option allows, and `NotImplementedError`
for what an implementation cannot do.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ZDCError(Exception):
    """Base of all errors raised on purpose."""


class ConversionError(ZDCError, ValueError):
    """A Hugging Face folder or GGUF file cannot be converted; the message names key and what is allowed."""


class CheckpointError(ZDCError, ValueError):
    """A converted folder is missing, unfinished, corrupt or of another format version."""


class CalibrationError(ZDCError, ValueError):
    """Calibration text or options cannot give a basis."""


class TextError(ZDCError, ValueError):
    """Text for calibration or evaluation is missing, unreadable or too short."""


class EvaluationError(ZDCError, ValueError):
    """A task is unknown, does not fit into the context, or cannot be put into this model's tokens."""


class PlanError(ZDCError, ValueError):
    """A compression plan is impossible, corrupt or made for another model."""


class PromptError(ZDCError, ValueError):
    """A prompt is empty, too long or has ids outside the vocabulary."""


class ChatError(ZDCError, ValueError):
    """A model has no chat template, the template cannot be used, or messages do not fit it."""


class CacheMemoryError(ZDCError, MemoryError):
    """A KV cache does not fit; the message says what would."""


class MeshError(ZDCError, ValueError):
    """A device mesh is impossible here, or does not fit the model, the batch or the prompt."""


class ProcessError(ZDCError, RuntimeError):
    """Processes that should share a mesh did not meet; the message names those that are missing."""


@contextmanager
def foreign_errors_as(kind: type[ZDCError], what: str) -> Iterator[None]:
    """Raises as `kind` whatever a library raises inside; errors of this family and interrupts pass.

    Libraries in Rust panic with an error of pyo3 that is no `Exception` and has no public name.
    """
    try:
        yield
    except ZDCError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error
