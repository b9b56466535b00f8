"""Batches of one size, so that programs are compiled once."""

from collections.abc import Iterator, Sequence


def pad_batch[T](items: Sequence[T], size: int) -> list[T]:
    """Return the first `size` items. The last item is repeated if there are fewer."""
    part = list(items[:size])
    return part + part[-1:] * (size - len(part))


def padded_batches[T](items: Sequence[T], size: int) -> Iterator[tuple[list[T], int]]:
    """Yield batches of at most `size` items, all alike, each with its number of items that are no padding."""
    size = max(1, min(size, len(items)))
    for start in range(0, len(items), size):
        yield pad_batch(items[start:], size), min(size, len(items) - start)
