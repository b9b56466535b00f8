"""Simulation of the engine's scheduler on a trace, with assumed times of steps and without a model.

    python -m benchmarks.serving.simulate --shape Llama-2-13B --trace conv.jsonl.gz --start 600 --seconds 17

The result is a prediction, not a measurement. The real scheduler plans the steps. Each step takes the time of
`Cost`, and the next begins when it ends. Requests, objectives and rates are those of `replay`. The simulation
shows which setting or which faster part is worth a measurement.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.serving.replay import ENOUGH, Arrival, Served, arrivals
from zdc_jax.engine.runner import MAX_CHUNKS
from zdc_jax.engine.scheduler import Grouping, Plan, PrefillChunk, Scheduler, Work
from zdc_jax.generation.chunks import bucket

PAGE, TAILS_A_ROW, VOCAB = 128, 2, 32_000


@dataclass(frozen=True)
class Cost:
    """Seconds of the parts of a step.

    Attributes:
      token: of each token of a program that reads chunks, padding included, without attention.
      seen: of each pair of a chunk's token and a token that it attends to.
      earlier: of each token before a chunk, to dequantize it.
      another: of each chunk after the first in a program.
      weights: of a program, to read the weights, whatever its size.
      joined: of decoding within a program that also reads chunks.
      step: of decoding, in addition.
      stored: of each token stored by the sequences that decode.
      cache_tokens: tokens that fit into memory, not a time.
    """

    token: float
    seen: float
    earlier: float
    another: float
    weights: float
    joined: float
    step: float
    stored: float
    cache_tokens: int

    def seconds(self, plan: Plan, programs: Grouping) -> float:
        """Return the seconds of one step, whose sequences decode in its first program."""
        groups = list(programs.groups(plan.chunks, alone=lambda chunk: False))
        reading = sum(self._program(group, programs) for group in groups)
        if not plan.decode:
            return reading
        tokens = sum(len(work.prompt) + work.promised - 1 for work in plan.decode)
        return reading + (self.joined if groups else self.weights) + self.step + self.stored * tokens

    def _program(self, chunks: Sequence[PrefillChunk], programs: Grouping) -> float:
        """Return the seconds of one program that reads chunks."""
        counts = [chunk.end - chunk.begin for chunk in chunks]
        width = programs.width(counts[0]) if len(chunks) == 1 else programs.widest
        seen = sum(count * (chunk.begin + chunk.end) / 2 for count, chunk in zip(counts, chunks, strict=True))
        earlier = sum(chunk.begin for chunk in chunks)
        products = max(self.weights, self.token * width)
        return products + self.seen * seen + self.earlier * earlier + self.another * (len(chunks) - 1)


_DENSE = Cost(
    token=3.7e-5,
    seen=1.46e-9,
    earlier=0.0,
    another=0.7e-3,
    weights=7.7e-3,
    joined=1.9e-3,
    step=0.7e-3,
    stored=2.23e-7,
    cache_tokens=120_832,
)
_CODED = Cost(
    token=4.8e-5,
    seen=1.33e-9,
    earlier=2.9e-7,
    another=1.5e-3,
    weights=7.7e-3,
    joined=1.9e-3,
    step=3.7e-3,
    stored=7.9e-8,
    cache_tokens=400_000,
)
_DENSE_8B = Cost(
    token=2.4e-5,
    seen=1.0e-9,
    earlier=0.0,
    another=0.7e-3,
    weights=5.4e-3,
    joined=1.2e-3,
    step=0.8e-3,
    stored=3.3e-8,
    cache_tokens=820_608,
)
_CODED_8B = replace(
    _DENSE_8B,
    token=2.7e-5,
    earlier=4.6e-8,
    another=1.5e-3,
    step=1.1e-3,
    stored=1.5e-8,
    cache_tokens=1_499_904,
)
COSTS = {
    "Llama-2-13B": {
        "dense": _DENSE,
        "coded": _CODED,
        "coded, chunks as fast as dense": replace(_CODED, token=_DENSE.token),
        "coded, at the speed of its bytes": replace(_CODED, stored=5.2e-8),
        "coded, read for nothing": replace(_CODED, stored=0.0),
    },
    "Llama-3-8B": {
        "dense": _DENSE_8B,
        "dense, read for nothing": replace(_DENSE_8B, stored=0.0),
        "coded": _CODED_8B,
        "coded, read for nothing": replace(_CODED_8B, stored=0.0),
    },
}
"""Costs on an H200, times 1.1 for a GPU under load.

13B: kernels of ten layers (`step-llama-2-13b-*.json`) times 4. With these costs, TPOT is 6 to 11 % below that
  of the replays, and TTFT a fifth below. "At the speed of its bytes" means 80 % of the speed of 16 bits.

8B: lines through TPOT and TTFT of `one-plan-h200.json`. `weights` and `step` share the constant cost as in
  13B. `earlier` and `joined` are those of 13B, scaled by bytes. `token` and `another` of the quantized cache
  come from `step-llama-3-8b-*.json`, without the padding of that time.
"""


@dataclass(frozen=True)
class Options:
    """Options of the simulation.

    Attributes:
      shape: a shape of `COSTS`.
      trace: file for `arrivals`.
      start: start of the slice in seconds.
      seconds: length of the slice.
      rates: requests a second.
    """

    shape: str
    trace: Path
    start: float = 0.0
    seconds: float = 120.0
    rates: tuple[float, ...] = (0.55, 0.6, 0.65, 0.7, 0.95, 1.06, 1.2, 1.25, 1.3, 1.4, 1.6, 1.8, 2.0)
    rows: int = 32
    max_model_len: int = 65_536
    chunks: tuple[int, ...] = (1024, 2048, 4096)
    name: str = "serving-simulated"
    results: Path = RESULTS


def simulate(requests: Sequence[Arrival], cost: Cost, *, rows: int, chunk: int, tails: bool) -> list[Served]:
    """Return the requests with their times.

    Args:
      tails: whether sequences store something in addition to pages.
    """
    programs = Grouping(MAX_CHUNKS, chunk, chunk, bucket)
    scheduler = Scheduler(
        rows,
        chunk,
        pages=cost.cache_tokens // PAGE,
        page=PAGE,
        tails=TAILS_A_ROW * rows if tails else None,
    )
    todo = [Served(each, came=each.time) for each in sorted(requests, key=lambda each: each.time)][::-1]
    now, under_way, ended = 0.0, {}, []
    while todo or under_way:
        while todo and todo[-1].came <= now:
            one = todo.pop()
            work = Work(one.arrival.tokens(len(todo), VOCAB), one.arrival.answer)
            under_way[work] = one
            scheduler.add(work)
        while (victim := scheduler.victim()) is not None:
            scheduler.preempt(victim)
        plan = scheduler.plan()
        if plan is None:
            now = todo[-1].came
            continue
        now += cost.seconds(plan, programs)
        for work in (*(chunk.work for chunk in plan.chunks if chunk.last), *plan.decode):
            _take(under_way[work], work, now)
            if len(work.output) == work.max_tokens:
                scheduler.end(work, len(work.prompt) + len(work.output) - 1)
                ended.append(under_way.pop(work))
    return ended


def _take(one: Served, work: Work, now: float) -> None:
    """Add a token to a request."""
    work.output.append(0)
    one.first, one.last = one.first or now, now
    one.tokens = len(work.output)


def row(ended: list[Served]) -> dict[str, float]:
    """Return shares in time and mean seconds at one rate."""
    parts = [one.parts() for one in ended]

    def mean(name):
        return float(np.mean([part[name] for part in parts]))

    return {
        "attained": float(np.mean([one.attained for one in ended])),
        "first_token": mean("first_token"),
        "between_tokens": mean("between_tokens"),
    }


def main(options: Options) -> None:
    """Write one JSON file."""
    if options.shape not in COSTS:
        raise SystemExit(f"shape={options.shape!r}: must be one of {sorted(COSTS)}")
    costs = COSTS[options.shape]
    end = options.start + options.seconds
    inside = [each for each in arrivals(options.trace) if options.start <= each.time < end]
    inside = [each for each in inside if each.prompt + each.answer <= options.max_model_len]
    results: list[dict[str, Any]] = []
    for kind, cost in costs.items():
        for chunk in options.chunks:
            rows = []
            for rate in options.rates:
                slower = len(inside) / (options.seconds * rate)
                spread = [replace(each, time=(each.time - options.start) * slower) for each in inside]
                engine = {"rows": options.rows, "chunk": chunk, "tails": not kind.startswith("dense")}
                rows.append({"rate": rate, **row(simulate(spread, cost, **engine))})
            enough = [each["rate"] for each in rows if each["attained"] >= ENOUGH]
            sustained = max(enough, default=None)
            print(kind, chunk, sustained, *(f"{each['attained']:.2f}" for each in rows), flush=True)
            results.append({"kind": kind, "chunk": chunk, "sustained": sustained, "rates": rows})
    settings = {"requests": len(inside), "costs": {kind: asdict(cost) for kind, cost in costs.items()}}
    settings |= {"shape": options.shape, "rows": options.rows}
    settings |= {"start": options.start, "seconds": options.seconds}
    settings |= {"trace": options.trace.name, "simulated": True, "commit": commit()}
    print(write_result(options.name, settings, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
