"""Replay of a production trace on the engine, and the rate at which requests meet their objectives.

    python -m benchmarks.serving.replay --model model/ --trace conv.csv.gz --seconds 120 --speeds 1 2 4

A slice of the trace arrives `speed` times as fast as recorded. Prompts are random tokens, with the shared
prefixes of Mooncake's trace. Answers have the lengths of the trace. Requests longer than `--max-model-len`
are left out and counted.

A request meets its objectives if TTFT is at most 5 s plus 1 ms per prompt token, and TPOT at most 100 ms.
`attained` is the share that does. `sustained` is the highest rate at which 0.9 or more do; null if there is
none. Times are in seconds. `queue`, `prefill` and `decode` add up to the time from arrival to end.
"""

import csv
import gzip
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import matplotlib.pyplot as plt
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.serving.models import ServedFlags
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event

BLOCK = 512
"""Tokens of a block of Mooncake's prefix hashes."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
      time: seconds since the start of the trace.
      prompt: tokens of the prompt.
      answer: tokens of the answer.
      blocks: hashes of the prompt's blocks of `BLOCK` tokens, if the trace has them; equal hashes mean equal
        tokens.
    """

    time: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()

    def tokens(self, index: int, vocab_size: int) -> tuple[int, ...]:
        """Return random token ids, by hash where there are blocks, else by the `index` of the request."""
        if not self.blocks:
            return _random(-1 - index, self.prompt, vocab_size)
        whole = (_random(block, BLOCK, vocab_size) for block in self.blocks)
        return tuple(token for block in whole for token in block)[: self.prompt]


@lru_cache(maxsize=8192)
def _random(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    # Seeds must not be negative. Requests without blocks have odd ones.
    rng = np.random.default_rng(2 * seed if seed >= 0 else -2 * seed - 1)
    return tuple(rng.integers(3, vocab_size, count).tolist())


def arrivals(path: Path) -> list[Arrival]:
    """Return all requests of a trace by Azure (`.csv.gz`) or Mooncake (`.jsonl.gz`), ordered by time.

    Mooncake records times in steps of three seconds. Requests of one step are spread evenly up to the next.

    Raises:
      ValueError: a file of another kind.
    """
    kinds = {".csv.gz": _azure, ".jsonl.gz": _mooncake}
    read = next((read for ending, read in kinds.items() if path.name.endswith(ending)), None)
    if read is None:
        raise ValueError(f"trace={path}: unknown kind of file; it must end in one of {tuple(kinds)}")
    with gzip.open(path, "rt") as file:
        requests = sorted(read(io.StringIO(file.read())), key=lambda arrival: arrival.time)
    begin = requests[0].time
    return [replace(each, time=each.time - begin) for each in _spread(requests)]


def take_slice(trace: Path, start: float, seconds: float) -> list[Arrival]:
    """Return the requests of a trace from `start` on, for `seconds`; their times are since `start`.

    Raises:
      ValueError: a file of another kind.
    """
    moved = (replace(each, time=each.time - start) for each in arrivals(trace))
    return [each for each in moved if 0 <= each.time < seconds]


def _spread(ascending: list[Arrival]) -> Iterator[Arrival]:
    """Yield requests of equal times, spread evenly up to the next time; the last ones stay."""
    groups = [list(group) for _, group in groupby(ascending, key=lambda arrival: arrival.time)]
    for group, following in zip(groups, [*groups[1:], groups[-1]], strict=True):
        gap = (following[0].time - group[0].time) / len(group)
        for place, arrival in enumerate(group):
            yield replace(arrival, time=arrival.time + place * gap)


def _azure(file: io.StringIO) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # The trace has seven digits of a second; Python reads six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(time, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(file: io.StringIO) -> Iterator[Arrival]:
    for row in map(json.loads, file):
        blocks = tuple(row["hash_ids"])
        yield Arrival(row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks)


FIRST_TOKEN, FOR_EACH_TOKEN, BETWEEN_TOKENS = 5.0, 1e-3, 0.1
"""Objectives in seconds: TTFT, its allowance per prompt token, and TPOT."""
ENOUGH = 0.9
PERCENTILES = (50, 90, 99)
LOOK = 0.1
"""Seconds between two samples of running and waiting requests."""


@dataclass(frozen=True)
class Options:
    """Options of the replay.

    Attributes:
      trace: file for `arrivals`.
      start: start of the slice in seconds.
      seconds: length of the slice.
      speeds: factors on the rate of arrivals.
    """

    served: ServedFlags
    trace: Path
    start: float = 0.0
    seconds: float = 120.0
    speeds: tuple[float, ...] = (1.0,)
    rows: int = 16
    max_model_len: int | None = None
    cache_tokens: int | None = None
    chunk: int = 2048
    name: str = "serving"
    results: Path = RESULTS


@dataclass
class Served:
    """One request in the replay; times since its start."""

    arrival: Arrival
    came: float = 0.0
    first: float = 0.0
    last: float = 0.0
    queued: float = 0.0
    tokens: int = 0
    error: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, began: float, event: Event) -> None:
        """Record an event; runs on the engine's thread."""
        now = time.perf_counter() - began
        if event.tokens and not self.tokens:
            self.first, self.queued = now, event.queued
        self.tokens += len(event.tokens)
        if event.finish_reason:
            self.last, self.error = now, event.error
            self.ended.set()

    @property
    def between(self) -> float:
        """Seconds per output token after the first."""
        return (self.last - self.first) / max(self.tokens - 1, 1)

    @property
    def attained(self) -> bool:
        """Whether the request met its objectives."""
        limit = FIRST_TOKEN + FOR_EACH_TOKEN * self.arrival.prompt
        return self.first - self.came <= limit and self.between <= BETWEEN_TOKENS

    def parts(self) -> dict[str, float]:
        """Return the times of the request in seconds."""
        prefill = self.first - self.came - self.queued
        return {
            "job": self.last - self.came,
            "first_token": self.first - self.came,
            "between_tokens": self.between,
            "queue": self.queued,
            "prefill": prefill,
            "decode": self.last - self.first,
        }


class Watch(threading.Thread):
    """Thread that samples running and waiting requests until it is stopped."""

    def __init__(self, engine: Engine, began: float):
        super().__init__(daemon=True)
        self.engine, self.began = engine, began
        self.seen: list[tuple[float, int, int]] = []
        self.done = threading.Event()

    def run(self) -> None:
        """Sample in a loop."""
        ended = False
        while not ended:
            stats = self.engine.stats()
            self.seen.append((time.perf_counter() - self.began, stats.running, stats.waiting))
            ended = self.done.wait(LOOK)


def replay(
    engine: Engine, slice_: list[Arrival], speed: float
) -> tuple[list[Served], list[tuple[float, int, int]]]:
    """Send requests at their times and wait for the last; also return samples of running and waiting ones.

    Raises:
      SystemExit: a request failed.
    """
    vocab = engine.model.config.vocab_size
    prompts = [arrival.tokens(index, vocab) for index, arrival in enumerate(slice_)]
    served = [Served(arrival) for arrival in slice_]
    salt = uuid4().hex  # An earlier replay must not serve as prefix cache.
    began = time.perf_counter()
    watch = Watch(engine, began)
    watch.start()
    for one, prompt in zip(served, prompts, strict=True):
        if (left := one.arrival.time / speed - (time.perf_counter() - began)) > 0:
            time.sleep(left)
        one.came = time.perf_counter() - began
        request = EngineRequest(prompt, one.arrival.answer, ignore_eos=True, salt=salt)
        engine.submit(request, partial(one.take, began))
    for one in served:
        one.ended.wait()
    watch.done.set()
    watch.join()
    if failed := [one.error for one in served if one.error]:
        raise SystemExit(f"{len(failed)} of {len(served)} requests failed; the first: {failed[0]}")
    return served, watch.seen


def row(served: list[Served], seen: list[tuple[float, int, int]], speed: float) -> dict[str, Any]:
    """Return the results of one replay."""
    end = max(one.last for one in served)
    parts = [one.parts() for one in served]
    results: dict[str, Any] = {
        "speed": speed,
        "requests": len(served),
        "rate": len(served) / max(one.came for one in served),
        "tokens_per_second": sum(one.tokens for one in served) / end,
        "attained": float(np.mean([one.attained for one in served])),
        "goodput": sum(one.attained for one in served) / end,
        "running": float(np.mean([running for _, running, _ in seen])),
    }
    results |= {name: summarize_times([part[name] for part in parts]) for name in parts[0]}
    return results | {"seen": seen[:: max(1, len(seen) // 150)], "commit": commit()}


def summarize_times(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the percentiles of times, which keep their unit."""
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values))} | percentiles


def plot(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw running and waiting requests over time, one panel a replay."""
    panels = [(entry["served"], row) for entry in entries for row in entry["rows"]]
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=(8, 2.2 * len(panels)), squeeze=False)
    for panel, (served, row) in zip(axes[:, 0], panels, strict=True):
        seconds, running, waiting = np.array(row["seen"]).T
        panel.plot(seconds, running, label="running")
        panel.plot(seconds, waiting, label="waiting")
        title = f"{served}: {row['rate']:.2f} requests a second, {row['attained']:.0%} in time"
        panel.set_title(title, fontsize=9)
    axes[0, 0].legend()
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def config(options: Options) -> EngineConfig:
    """Return the config of an engine whose queue holds all requests."""
    sizes = options.rows, options.max_model_len, options.cache_tokens
    return EngineConfig(*sizes, chunk=options.chunk, max_waiting=len(_inside(options)) + 1)


def measure(engine: Engine, options: Options) -> Path:
    """Write one JSON file and a plot, again after each speed; rows of other models stay."""
    inside = _inside(options)
    slice_ = [each for each in inside if each.prompt + each.answer <= engine.max_model_len]
    entry: dict[str, Any] = {
        "served": options.served.name,
        "cache_tokens": engine.cache_tokens,
        "left_out": len(inside) - len(slice_),
    }
    earlier(options.results / f"{options.name}.json", _settings(options, engine))  # Refuse before any work.
    rows: list[dict[str, Any]] = []
    for speed in options.speeds:
        rows.append(row(*replay(engine, slice_, speed), speed))
        print({name: value for name, value in rows[-1].items() if name != "seen"}, flush=True)
        enough = [each["rate"] for each in rows if each["attained"] >= ENOUGH]
        path = _write(options, engine, entry | {"sustained": max(enough, default=None), "rows": rows})
    return path


def main(options: Options) -> None:
    """Replay one trace on one engine."""
    with Engine(options.served.load(), config(options)) as engine:
        print(measure(engine, options))


def _inside(options: Options) -> list[Arrival]:
    return take_slice(options.trace, options.start, options.seconds)


def _settings(options: Options, engine: Engine) -> dict[str, Any]:
    """Return the settings that all models of a file share."""
    settings = {name: getattr(options, name) for name in ("start", "seconds", "rows", "chunk")}
    return settings | {"trace": options.trace.name, "max_model_len": engine.max_model_len}


def _write(options: Options, engine: Engine, entry: dict[str, Any]) -> Path:
    """Write the rows of one model together with those of other models in the file."""
    settings = _settings(options, engine)
    path = options.results / f"{options.name}.json"
    others = [other for other in earlier(path, settings) if other["served"] != entry["served"]]
    path = write_result(options.name, settings, [*others, entry], options.results)
    plot([*others, entry], path.with_suffix(".png"))
    return path


if __name__ == "__main__":
    main(tyro.cli(Options))
