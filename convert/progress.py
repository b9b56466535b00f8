"""How far long work has come, on standard error: bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich import progress
from rich.console import Console

INTERVAL = 10.0
"""Seconds between plain lines that say nothing new."""


def track[T](items: Sequence[T], name: str, *, shown: bool = True) -> Iterator[T]:
    """Yields `items` and shows how many are done, under `name`; nothing where there are none."""
    console = Console(stderr=True)
    if not shown or not items:
        return iter(items)
    if console.is_terminal:
        return iter(progress.track(items, name, console=console))
    return _plain(items, name)


def _plain[T](items: Sequence[T], name: str) -> Iterator[T]:
    """A line at the start, at the end, and every `INTERVAL` between."""
    total, began = len(items), monotonic()
    last = began
    _line(f"{name}: 0 of {total}")
    for done, item in enumerate(items, start=1):
        yield item
        now = monotonic()
        if done == total or now - last >= INTERVAL:
            last = now
            _line(f"{name}: {done} of {total} ({100 * done / total:.0f} %), {now - began:.0f} s")


@contextmanager
def counted(unit: str, first: str) -> Iterator[Callable[[str], None]]:
    """Counts work of unknown length: gives a function to call after each, with what is to be said.

    On a terminal one line changes in place; elsewhere a line is printed when there is news, and every
    `INTERVAL`.

    Args:
      unit: what is counted, in plural. first: what is said before the first call.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            progress.TextColumn(unit + ": {task.completed}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}"),
        )
        with progress.Progress(*columns, console=console) as bar:
            task = bar.add_task(first, total=None)
            yield lambda text: bar.update(task, advance=1, description=text)
    else:
        yield _PlainCount(unit, first)


class _PlainCount:
    """Called after each: prints news at once, and every `INTERVAL` how many there are."""

    def __init__(self, unit: str, first: str):
        self.unit, self.count, self.said = unit, 0, first
        self.began = self.last = monotonic()
        _line(first)

    def __call__(self, text: str) -> None:
        self.count += 1
        now = monotonic()
        if text != self.said or now - self.last >= INTERVAL:
            self.said, self.last = text, now
            _line(f"{self.unit}: {self.count}, {now - self.began:.0f} s: {text}")


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
