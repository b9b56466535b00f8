"""Tasks over long ranges, one file each: what they put into a context, and what they ask about it.

A task is a module here with a function `pose(rng, writer) -> Posed`; its name is that of the module. One with
`SHARES` asks at distances: `pose` takes a `distance` in tokens, and `copy@1024` is the task `copy` at 1024.
Without a distance it is asked at these shares of the context.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import ModuleType

import numpy as np

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import Posed, Writer

Pose = Callable[[np.random.Generator, Writer], Posed]


@cache
def names() -> tuple[str, ...]:
    """All tasks, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def chosen(tasks: Iterable[str], context: int) -> dict[str, Pose]:
    """What poses each task, by name; those at distances without one are asked at shares of `context` tokens.

    Raises:
      EvaluationError: an unknown task, with those that are known; a distance that is none.
    """
    found: dict[str, Pose] = {}
    for task in tasks:
        name, at, distance = task.partition("@")
        module = _named(name, task)
        shares = getattr(module, "SHARES", None)
        if at and (shares is None or not distance.isdecimal()):
            raise EvaluationError(f"task {task!r}: only a whole number of tokens follows copy@")
        if shares is None:
            found[name] = module.pose
            continue
        for tokens in [int(distance)] if at else [int(share * context) for share in shares]:
            found[f"{name}@{tokens}"] = partial(module.pose, distance=tokens)
    return found


def _named(name: str, task: str) -> ModuleType:
    if name not in names():
        raise EvaluationError(f"task {task!r} must be one of {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
