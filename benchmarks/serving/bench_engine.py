"""Benchmark of the engine: its time per output token against that of `generate` at the same batch.

    python -m benchmarks.serving.bench_engine --model model/ --rows 8
    python -m benchmarks.serving.bench_engine --shape Llama-3-8B --rows 8 32 --mesh sequence=2

All sequences have a prompt of `--prompt` tokens and decode `--tokens`. `generate` decodes in one call without
the host, so it shows what the device can do. The engine returns to the host after each `--steps`. Its clock
starts when the last sequence has its first token, and stops when all have ended. `gap_ms` is the additional
time per output token of the engine. Both alternate, and medians count.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.serving.models import ServedFlags
from zdc_jax import generate
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event
from zdc_jax.loading import LanguageModel


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      rows: numbers of concurrent requests.
      prompt: tokens of each prompt.
      tokens: tokens of each answer.
      steps: tokens of one call of the engine.
    """

    served: ServedFlags
    rows: tuple[int, ...] = (8,)
    prompt: int = 128
    tokens: int = 256
    steps: tuple[int, ...] = (1, 4, 8)
    repeats: int = 5
    name: str = "engine"
    results: Path = RESULTS


class Clock:
    """Clock of the tokens of all sequences, from their first tokens until all have ended."""

    def __init__(self, rows: int):
        self.waiting, self.running = set(range(rows)), set(range(rows))
        self.began = self.seconds = 0.0
        self.tokens = 0
        self.ended = threading.Event()

    def take(self, row: int, event: Event) -> None:
        """Count an event; runs on the engine's thread."""
        if not self.waiting:
            self.tokens += len(event.tokens)
        self.waiting.discard(row)
        if not self.waiting and not self.began:
            self.began = time.perf_counter()
        if event.finish_reason:
            self.running.discard(row)
        if not self.running:
            self.seconds = time.perf_counter() - self.began
            self.ended.set()


def engine_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Return seconds per output token of all sequences in the engine."""
    clock = Clock(len(prompts))
    for index, prompt in enumerate(prompts):
        engine.submit(EngineRequest(tuple(prompt), tokens, ignore_eos=True), partial(clock.take, index))
    clock.ended.wait()
    return clock.seconds * len(prompts) / clock.tokens


def bare_seconds(model: LanguageModel, prompts: list[list[int]], tokens: int) -> float:
    """Return the same for `generate`."""
    return generate(model, prompts, tokens, stop_tokens=()).timings.decode / (tokens - 1)


def measured(model: LanguageModel, count: int, options: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of steps, with `count` concurrent requests."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, model.config.vocab_size, (count, options.prompt)).tolist()
    bare_seconds(model, prompts, options.tokens)  # Compile.
    for steps in options.steps:
        config = EngineConfig(count, options.prompt + options.tokens, decode_steps=steps, reuse=False)
        with Engine(model, config) as engine:
            engine_seconds(engine, prompts, options.tokens)
            times = [
                (
                    engine_seconds(engine, prompts, options.tokens),
                    bare_seconds(model, prompts, options.tokens),
                )
                for _ in range(options.repeats)
            ]
        ours, bare = (median(each) for each in zip(*times, strict=True))
        row = {"served": options.served.name, "steps": steps, "rows": count}
        row |= {"ms": 1e3 * ours, "bare_ms": 1e3 * bare}
        row |= {"throughput": bare / ours, "gap_ms": 1e3 * (ours - bare)}
        yield row | {"repeats": times, "commit": commit()}


def main(options: Options) -> None:
    """Write one JSON file, again after each row."""
    model, rows = options.served.load(), []
    settings = {"prompt": options.prompt, "tokens": options.tokens}
    for count in options.rows:
        for row in measured(model, count, options):
            print({name: value for name, value in row.items() if name != "repeats"}, flush=True)
            rows.append(row)
            path = write_result(options.name, settings, rows, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))
