"""Long-context tasks, one module each, named after the task.

A task module defines `pose(rng, writer) -> TaskInstance`: statements to insert into a context, and questions
about them. Modules that define `SHARES` ask about text at a distance, and their `pose` also accepts a
`distance` in tokens. The name `copy@1024` selects the task `copy` at a distance of 1024 tokens. Without a
distance, such a task is posed at each share of the context in `SHARES`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np

from zdc_jax.errors import EvaluationError
from zdc_jax.evaluation.questions import TaskInstance, Writer

Pose = Callable[[np.random.Generator, Writer], TaskInstance]
"""Function that draws one instance of a task."""


@cache
def names() -> tuple[str, ...]:
    """Return the names of all tasks, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def chosen(tasks: Iterable[str], context: int) -> dict[str, Pose]:
    """Return the `pose` function of each task, by name.

    Args:
      tasks: names of tasks, with or without a distance.
      context: length of the contexts in tokens, for tasks with `SHARES`.

    Raises:
      EvaluationError: a task is unknown or its distance is not a whole number.
    """
    poses: dict[str, Pose] = {}
    for task in tasks:
        name, at, distance = task.partition("@")
        if name not in names():
            raise EvaluationError(f"task {task!r} must be one of {', '.join(names())}")
        module = importlib.import_module(f"{__name__}.{name}")
        shares = getattr(module, "SHARES", None)
        if at and (shares is None or not distance.isdecimal()):
            raise EvaluationError(
                f"task {task!r} must be a task name, or copy@TOKENS with a whole number of tokens"
            )
        if shares is None:
            poses[name] = module.pose
            continue
        for tokens in [int(distance)] if at else [int(share * context) for share in shares]:
            poses[f"{name}@{tokens}"] = partial(module.pose, distance=tokens)
    return poses
