"""Arrivals of production traces, as lists of requests."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

BLOCK = 512
"""Tokens of a block of Mooncake's prefix hashes."""


@dataclass(frozen=True)
class Arrival:
    """One request: seconds since the trace's begin, tokens of prompt and answer, and hashes of the prompt's
    blocks of `BLOCK` tokens, if the trace has them: equal ones stand for equal tokens."""

    time: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()

    def tokens(self, index: int, vocab_size: int) -> tuple[int, ...]:
        """Random ids, those of a block by its hash; without hashes of their own. index: of the request."""
        if not self.blocks:
            return _random(-1 - index, self.prompt, vocab_size)
        whole = (_random(block, BLOCK, vocab_size) for block in self.blocks)
        return tuple(token for block in whole for token in block)[: self.prompt]


@lru_cache(maxsize=8192)
def _random(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    # Seeds are not negative; those of requests without blocks are odd.
    rng = np.random.default_rng(2 * seed if seed >= 0 else -2 * seed - 1)
    return tuple(rng.integers(3, vocab_size, count).tolist())


def arrivals(path: Path) -> list[Arrival]:
    """All requests of a trace of Azure's (`.csv.gz`) or Mooncake's (`.jsonl.gz`), by time.

    Mooncake tells times in steps of three seconds. Those of one time are spread evenly up to the next, for
    nobody knows that they came at once.

    Raises:
      ValueError: a file of another kind.
    """
    kinds = {".csv.gz": _azure, ".jsonl.gz": _mooncake}
    read = next((read for ending, read in kinds.items() if path.name.endswith(ending)), None)
    if read is None:
        raise ValueError(f"{path}: must end in one of {tuple(kinds)}")
    with gzip.open(path, "rt") as file:
        found = sorted(read(io.StringIO(file.read())), key=lambda arrival: arrival.time)
    begin = found[0].time
    return [replace(each, time=each.time - begin) for each in _spread(found)]


def _spread(ascending: list[Arrival]) -> Iterator[Arrival]:
    """Those of one time, evenly up to the next time; those of the last stay."""
    groups = [list(group) for _, group in groupby(ascending, key=lambda arrival: arrival.time)]
    for group, following in zip(groups, [*groups[1:], groups[-1]], strict=True):
        gap = (following[0].time - group[0].time) / len(group)
        for place, arrival in enumerate(group):
            yield replace(arrival, time=arrival.time + place * gap)


def _azure(file: io.StringIO) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # Python reads six digits of a second, the trace has seven.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(time, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(file: io.StringIO) -> Iterator[Arrival]:
    for row in map(json.loads, file):
        blocks = tuple(row["hash_ids"])
        yield Arrival(row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks)
