"""Progress of long work on standard error: bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from time import monotonic

from rich import progress
from rich.console import Console

INTERVAL = 10.0
"""Seconds between plain lines that report only progress."""


def track[T](items: Sequence[T], name: str, *, shown: bool = True) -> Iterator[T]:
    """Return an iterator over `items` that shows under `name` how many are done."""
    console = Console(stderr=True)
    if not shown or not items:
        return iter(items)
    if console.is_terminal:
        return iter(progress.track(items, name, console=console))
    return _plain(items, name)


def _plain[T](items: Sequence[T], name: str) -> Iterator[T]:
    """Yield `items` and print a line at the start, at the end, and every `INTERVAL` in between."""
    total, began = len(items), monotonic()
    last = began
    _print_line(f"{name}: 0 of {total}")
    for done, item in enumerate(items, start=1):
        yield item
        now = monotonic()
        if done == total or now - last >= INTERVAL:
            last = now
            _print_line(f"{name}: {done} of {total} ({100 * done / total:.0f} %), {now - began:.0f} s")


@contextmanager
def counted(unit: str, first: str) -> Iterator[Callable[[str], None]]:
    """Provide a function that counts items of work of unknown length, called with a text after each.

    On a terminal one line changes in place. Elsewhere a line is printed when the text changes, and every
    `INTERVAL`.

    Args:
      unit: plural noun for the items.
      first: text shown before the first call.
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


@contextmanager
def noted_if_slow(text: str) -> Iterator[Callable[[], None]]:
    """Print a line if the work takes longer than `INTERVAL`. The function provided prevents that."""
    timer = Timer(INTERVAL, _print_line, [text])
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class _PlainCount:
    """Counter of items that prints new texts at once, and every `INTERVAL` the count."""

    def __init__(self, unit: str, first: str):
        self.unit, self.count, self.printed = unit, 0, first
        self.began = self.last = monotonic()
        _print_line(first)

    def __call__(self, text: str) -> None:
        self.count += 1
        now = monotonic()
        if text != self.printed or now - self.last >= INTERVAL:
            self.printed, self.last = text, now
            _print_line(f"{self.unit}: {self.count}, {now - self.began:.0f} s: {text}")


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
