"""Tables of the study of codes, for `benchmarks.tables`."""

import json
from statistics import median
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.quality.rows import Row

MODEL = "smollm2-135m"
ORDER = ("copy", "copy", "induction", "lookup", "needles", "passkey")


def coding_table(part: str, name: str = "coding") -> str:
    """What one part measured: bytes held and read where they are real, perplexity, what is retained."""
    rows = [row for row in _read(f"{name}-{MODEL}")["rows"] if row["method"].startswith(part)]
    several = len({row["context"] for row in rows}) > 1
    about = ["context"] * several + ["what", "held", "read", "increase"]
    heads = [*about, "near copy", "far copy", *ORDER[2:]]
    return _table(heads, [[str(row["context"])] * several + _cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    # What is rounded as a code would be stands in whole arrays; old rows say so by their bytes alone.
    real = not row.get("simulated", row["bytes_share"] >= 1)
    shares = [f"{row[name]:.1%}" if real else "–" for name in ("bytes_share", "read_share")]
    low, high = (f"{100 * bound:+.2f}" for bound in row["interval"])
    what = row["method"].split(": ", 1)
    label = what[0].removeprefix("bases ").strip("()") + ": " + what[1] if "(" in what[0] else what[1]
    retained = [f"{task['retention']:.2f}" for task in row["tasks"].values()]
    return [label, *shares, f"{100 * row['increase']:+.2f} % [{low}, {high}]", *retained]


def layers_table() -> str:
    """Single layers: increase of perplexity and the lowest retention."""
    rows = _read(f"coded-layers-{MODEL}")["results"]
    kinds = list(dict.fromkeys(row["lowered"] for row in rows))
    found = {(row["layer"], row["lowered"]): row for row in rows}
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        cells = [found.get((layer, kind)) for kind in kinds]
        lines.append([str(layer), *("–" if cell is None else _of_layer(cell) for cell in cells)])
    return _table(["layer", *kinds], lines)


def _of_layer(row: dict[str, Any]) -> str:
    task = min(row["retention"], key=row["retention"].get)
    return f"{100 * row['increase']:+.2f} %, {row['retention'][task]:.2f} {task}"


def fetch_table() -> str:
    """Ways to get rows of host memory."""
    rows = _read("host-fetch-h200")["results"]
    ways = [[row["way"].replace("_", " "), f"{row['median_ms']:.2f} ms"] for row in rows]
    return _table(["way", "median"], ways)


def memory_table() -> str:
    """Caches on a capped GPU: bytes on it, and time a token, where a context was given and at the largest."""
    rows = _read("host-memory-llama-3-8b-shape")["results"]
    lines = [
        [
            row["cache"],
            f"{row['context']:,}" + ", the largest" * (row["kind"] == "largest"),
            *(f"{row[name] / 2**30:.2f} GiB" for name in ("device_bytes", "read_bytes")),
            f"{median(row['ms']):.1f} ms",
        ]
        for row in rows
    ]
    return _table(["far tokens", "context", "on the GPU", "read a token", "a token takes"], lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )
