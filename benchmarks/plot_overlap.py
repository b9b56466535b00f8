"""What runs on a GPU while its exchange is on the way? From a profile that `bench_sequence_parallel` wrote.

    python -m benchmarks.bench_sequence_parallel --tasks plan --layers 2 --label two-layers --traces traces/
    python -m benchmarks.plot_overlap traces/

Writes `overlap.json`, for each GPU milliseconds of exchange (all that NCCL sends from one to another: both
all-to-alls and the halo, waiting included) and of them those beside attention and beside any kernel, and
`overlap.png`, the last layer on the first GPU.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib

from benchmarks.common import RESULTS, write_result

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ATTENTION, EXCHANGE = "zdc_prefill", "nccl"
LAST_MS = 52.0
"""Of the trace that is drawn: about one layer of a 7B at 128K tokens on four GPUs."""


class Kernel(NamedTuple):
    """One launch; milliseconds."""

    name: str
    start: float
    end: float


def kernels(folder: Path) -> dict[str, list[Kernel]]:
    """Of each GPU, in order.

    Raises:
      FileNotFoundError: no profile in the folder.
    """
    if not (found := sorted(folder.rglob("*.trace.json.gz"))):
        raise FileNotFoundError(f"{folder} holds no *.trace.json.gz")
    events = json.loads(gzip.decompress(found[-1].read_bytes()))["traceEvents"]
    about = [e for e in events if e.get("ph") == "M"]

    def named(kind):
        return {(e["pid"], e.get("tid")): e["args"]["name"] for e in about if e["name"] == kind}

    devices = {pid: name for (pid, _), name in named("process_name").items() if "GPU" in name}
    streams = {key for key, name in named("thread_name").items() if "Stream" in name and key[0] in devices}
    out: dict[str, list[Kernel]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams:
            start = e["ts"] / 1e3
            out[devices[e["pid"]]].append(Kernel(e["name"], start, start + e["dur"] / 1e3))
    return {name: sorted(each, key=lambda k: k.start) for name, each in sorted(out.items())}


def overlap(launched: list[Kernel]) -> dict[str, float]:
    """Milliseconds of the exchange, and of them those during which attention, or any kernel, ran."""
    exchange = spans(k for k in launched if EXCHANGE in k.name)
    attention = spans(k for k in launched if ATTENTION in k.name)
    rest = spans(k for k in launched if EXCHANGE not in k.name)

    def both(others):
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in exchange for b in others)

    return {"exchange": both(exchange), "beside_attention": both(attention), "beside_any": both(rest)}


def spans(chosen: Iterable[Kernel]) -> list[tuple[float, float]]:
    """When at least one of them ran: in order, apart from one another."""
    out: list[tuple[float, float]] = []
    for _, start, end in sorted(chosen, key=lambda k: k.start):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def draw(launched: list[Kernel]) -> None:
    """Three rows: matrix products and the like, attention, exchange."""
    end = launched[-1].end
    rows = {"exchange": [], "attention": [], "other": []}
    for k in launched:
        if k.end > end - LAST_MS:
            row = "exchange" if EXCHANGE in k.name else "attention" if ATTENTION in k.name else "other"
            rows[row].append((k.start - end + LAST_MS, k.end - k.start))
    figure, axis = plt.subplots(figsize=(11, 2.2), layout="constrained")
    for place, spans in enumerate(rows.values()):
        axis.broken_barh(spans, (place - 0.4, 0.8), facecolors=f"C{3 - place}")
    axis.set(yticks=range(len(rows)), yticklabels=rows, xlabel="ms", xlim=(0, LAST_MS))
    figure.savefig(RESULTS / "overlap.png", dpi=110)


if __name__ == "__main__":
    by_device = kernels(Path(sys.argv[1]))
    seen = {name: overlap(each) for name, each in by_device.items()}
    print(json.dumps(seen, indent=1))
    write_result("overlap", {"profile": next(Path(sys.argv[1]).iterdir()).name}, seen)
    draw(next(iter(by_device.values())))
