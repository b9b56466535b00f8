"""The tables of `benchmarks.quality.block_lists`, for `benchmarks.tables`."""

import json
from typing import Any

from benchmarks.common import RESULTS

NAME = "block-lists-smollm2-135m"
HEADS = (
    "tokens",
    "text",
    "chosen by",
    "blocks attended",
    "by layer",
    "increase",
    "lowest retained, question by lists",
    "question by all blocks",
)
GROWTH_HEADS = (
    "measured at",
    "chosen by",
    "2048",
    "4096",
    "8192",
    "exponent",
    "32K",
    "128K",
    "constant",
    "share",
)
TIMES = "block-lists-h200"
TIMES_HEADS = (
    "tokens",
    "KV heads",
    "R, Z",
    "blocks",
    "attended",
    "attention, ms",
    "choice, ms",
    "cuDNN, ms",
    "all blocks on our kernel, ms",
    "",
)
SETS = (("heldout", 15), ("train", 15), ("heldout", 16))
"""Texts in the order in which they were looked at; nothing was chosen by the last."""
WORDS = {"keys": "keys", "means": "mean keys", "recent": "the last blocks"}


def judged_table() -> str:
    """What choices cost, and of how many blocks."""
    return _table(HEADS, [_cells(row) for row in _rows()])


def growth_table() -> str:
    """Density by length, measured and extrapolated, in percent of causal blocks."""
    return _table(GROWTH_HEADS, [_growth(row) for row in _rows() if "recent" not in row["choice"]])


def times_table() -> str:
    """How long a prompt of random keys takes by lists of so many blocks, their choice included."""
    rows = json.loads((RESULTS / f"{TIMES}.json").read_text())["results"]

    def cells(row: dict[str, Any]) -> list[str]:
        (R, Z), (Q, P) = row["ranks"], row["blocks"]
        sizes = [f"{row['S']:,}", str(row["kv_heads"]), f"{R}, {Z}", f"{Q} by {P}", f"{row['density']:.0%}"]
        times = [f"{row[name]:.1f}" for name in ("ms", "choice_ms", "cudnn_ms", "dense_ms")]
        return [*sizes, *times, f"{row['speedup']:.2f}x"]

    return _table(TIMES_HEADS, [cells(row) for row in rows])


TABLES = {
    "block lists": judged_table,
    "block lists growth": growth_table,
    "block lists times": times_table,
}


def name_of(label: str) -> str:
    """A label of the study in words."""
    kind, *words = label.split()
    said = dict(word.partition("=")[::2] for word in words)
    parts = [WORDS[kind]]
    if kind != "recent":
        parts.append(f"{said['R']} coordinates, {said['m']} queries")
    for rule, text in (("mass", "{} of the mass"), ("share", "{} of the blocks"), ("count", "{} blocks")):
        if rule in said:
            amount = float(said[rule])
            parts.append(text.format(f"{amount:.0f}" if rule == "count" else f"{amount:.0%}"))
    if "worst" in said:
        parts.append("by the query that wants it most")
    if "w" in said:
        parts.append(f"window {said['w']}")
    if "Q" in said or "P" in said:
        parts.append(f"blocks of {said.get('Q', 128)} by {said.get('P', 128)}")
    return ", ".join(parts)


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = (f"{100 * bound:+.2f}" for bound in row["interval"])
    layers = row["density_by_layer"]
    return [
        str(row["context"]),
        f"{row['documents']} of {row['split']}, {row['seed']}",
        name_of(row["choice"]),
        f"{row['density']:.1%}",
        f"{min(layers):.0%} to {max(layers):.0%}",
        f"{100 * row['increase']:+.2f} % [{low}, {high}]",
        *(_lowest(row["tasks"][how]) for how in ("lists", "all")),
    ]


def _lowest(tasks: dict[str, Any]) -> str:
    retained, name = min((task["retention"], name) for name, task in tasks.items() if task["counts"])
    return f"{retained:.2f} {name}"


def _growth(row: dict[str, Any]) -> list[str]:
    by_length, rules = row["density_by_length"], row["extrapolated"]
    here = {**by_length, str(row["context"]): row["density"]}
    return [
        str(row["context"]),
        name_of(row["choice"]),
        *(f"{here[length]:.1%}" if length in here else "–" for length in ("2048", "4096", "8192")),
        f"{row['exponent']:.2f}",
        *(f"{rules['fitted'][tokens]:.1%}" for tokens in ("32768", "131072")),
        *(f"{rules[rule]['131072']:.1%}" for rule in ("constant", "proportional")),
    ]


def _rows() -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{NAME}.json").read_text())["rows"]

    def order(row):
        return (row["context"], SETS.index((row["split"], row["seed"])))

    return sorted(rows, key=order)


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    joined = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return joined.replace("| --- ", "|---").replace("--- |", "---|")
