"""Tables of how fast coded caches are, from the JSON of `bench_coded` and `bench_coded_models`."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.common import RESULTS

KINDS = {"whole": "all", "bit planes": "all, in 6 and 3 bits", "chosen": "1024 chosen"}
READS = {
    "whole": "all",
    "chosen": "a sixteenth",
    "chosen by 8 bits": "an eighth, index of 8 bits",
    "searched": "searched plan",
}
Cells = Sequence[str]


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def kernels_table() -> str:
    """A step of attention beside cuDNN."""
    lines = [
        "| older tokens read | heads | sequences | tokens | ms | choosing | cuDNN, ms | ratio | bandwidth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in _rows("coded-h200"):
        if row["kind"] in KINDS:
            choosing = f"{row['delay']:.3f}" if row["delay"] else "–"
            cells = [
                KINDS[row["kind"]],
                row["heads"],
                row["B"],
                f"{row['S']:,}",
                f"{row['ms']:.3f}",
                choosing,
            ]
            cells += [f"{row['peer_ms']:.3f}", f"{row['speedup']:.2f}x", f"{row['bandwidth']:.0%}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def encode_table() -> str:
    """Coding the keys and values of a prompt."""
    heads = ("heads", "tokens", "ms", "of what a copy moves")

    def cells(row):
        return (row["heads"], f"{row['S']:,}", f"{row['ms']:.3f}", f"{row['bandwidth']:.0%}")

    return _table(heads, map(cells, _of_kind("encode")))


def new_tokens_table() -> str:
    """Turning, coding and storing in one launch, and in several."""
    heads = ("heads", "rows", "at once, ms", "apart, ms", "turning alone, ms")

    def cells(row: dict[str, Any]) -> Cells:
        times = (f"{row[name]:.4f}" for name in ("ms", "peer_ms", "turning_ms"))
        return row["heads"], f"{row['B']}", *times

    return _table(heads, map(cells, _of_kind("new tokens")))


def chunk_table() -> str:
    """A piece of a prompt on far tokens in codes, and on the same in 16 bits."""
    heads = ("heads", "new tokens", "tokens in all", "ms", "in 16 bits, ms", "")

    def cells(row: dict[str, Any]) -> Cells:
        tokens = f"{row['T']:,}", f"{row['S']:,}"
        return row["heads"], *tokens, f"{row['ms']:.3f}", f"{row['peer_ms']:.3f}", f"{row['cost']:.2f}x"

    return _table(heads, map(cells, _of_kind("prompt chunk")))


def chosen_chunk_table() -> str:
    """A piece of a prompt of which each token chooses, on kernels and on XLA, and one that attends to all."""
    heads = (
        "heads",
        "new tokens",
        "tokens in all",
        "ms",
        "choosing of it",
        "on XLA, ms",
        "all in 16 bits, ms",
    )

    def cells(row: dict[str, Any]) -> Cells:
        times = (f"{row[name]:.2f}" for name in ("ms", "delay", "xla_ms", "peer_ms"))
        return row["heads"], f"{row['T']:,}", f"{row['S']:,}", *times

    return _table(heads, map(cells, _of_kind("prompt chunk chosen")))


def selection_table() -> str:
    """Selecting the largest scores of each row, and XLA's way."""
    heads = ("rows", "scores of each", "selected", "ms", "XLA, ms", "")

    def cells(row: dict[str, Any]) -> Cells:
        sizes = f"{row['B'] * row['K']}", f"{row['S']:,}", f"{row['k']:,}"
        return *sizes, f"{row['ms']:.3f}", f"{row['peer_ms']:.3f}", f"{row['speedup']:.2f}x"

    return _table(heads, map(cells, _of_kind("selection")))


def _of_kind(kind: str) -> list[dict[str, Any]]:
    return [row for row in _rows("coded-h200") if row["kind"] == kind]


def _table(heads: Cells, rows: Iterable[Cells]) -> str:
    """Empty where nothing was measured."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines]) if lines else ""


def one_plan_table() -> str:
    """A searched plan on both axes: times, tokens a second and rows, and what it costs.

    Beside each, in brackets, 16 bits on our kernels and on cuDNN.
    """
    run = json.loads((RESULTS / "one-plan-h100.json").read_text())

    # A run that was cut leaves rows without all their figures.
    def whole(rows):
        return [row for row in rows if "largest" in row]

    found = {(entry["shape"], entry["kind"]): whole(entry["rows"]) for entry in run["results"]}
    heads = ("shape, tokens", "first token, s", "a token of 1 row, ms", "of 8 rows, ms")
    heads = (*heads, "most rows", "their tokens a second", "SmolLM2, 8,192: perplexity", "least retention")
    lines: list[Cells] = []
    for shape in dict.fromkeys(shape for shape, _ in found):
        kinds = [{row["length"]: row for row in found.get((shape, kind), [])} for kind in PLAN_KINDS]
        for length in sorted(set(kinds[0]) & set(kinds[-1])):
            rows = [kind.get(length, {"token": {}}) for kind in kinds]
            lines.append(_one_plan_cells(f"{shape}, {length:,}", rows, run["config"]["quality"]))
    return _table(heads, lines)


PLAN_KINDS = ("searched", "dense", "cudnn")
"""Of `bench_one_plan`, in the order of the table."""


def one_plan_on_mesh_table(name: str) -> str:
    """The same on a mesh, of one file: each kind a line, with the figures that it has."""
    run = json.loads((RESULTS / f"{name}.json").read_text())
    heads = ("shape, tokens", "", "first token, s", "a token of 1 row, ms", "of 8 rows, ms")
    heads = (*heads, "most rows", "their tokens a second", "GB a row and GPU")
    names = {
        "cudnn": "dense Ulysses (cuDNN)",
        "dense": "dense Ulysses (our kernels)",
        "searched": "**searched**",
    }
    found = [
        ((entry["shape"], row["length"], list(names).index(entry["kind"])), row)
        for entry in run["results"]
        for row in entry["rows"]
    ]
    lines = [
        (
            f"{shape}, {length:,}",
            list(names.values())[kind],
            *(_shown(form, f(row)) for f, form in FIGURES),
            f"{row['bytes_a_row'] / 1e9:.2f}",
        )
        for (shape, length, kind), row in sorted(found, key=lambda pair: pair[0])
    ]
    return _table(heads, lines)


def _token(row: dict[str, Any], batch: Any) -> float:
    """Seconds, of so many rows."""
    return statistics.median(row["token"].get(str(batch), [math.nan]))


FIGURES: list[tuple[Callable[[dict[str, Any]], float], str]] = [
    (lambda row: statistics.median(row.get("first_token", [math.nan])), "{:#.3g}"),
    (lambda row: 1e3 * _token(row, 1), "{:.2f}"),
    (lambda row: 1e3 * _token(row, 8), "{:.2f}"),
    (lambda row: row.get("largest", math.nan), "{}"),
    (lambda row: row.get("largest", math.nan) / _token(row, row.get("largest")), "{:,.0f}"),
]
"""First token, a token of one row and of eight, the most rows, their tokens a second; how each is shown."""


def _shown(form: str, value: float) -> str:
    return "–" if math.isnan(value) else form.format(value)


def _one_plan_cells(label: str, rows: list[dict[str, Any]], quality: dict[str, Any]) -> Cells:
    """Of one shape and length: rows of the kinds, one after another."""
    shown = [[_shown(form, f(row)) for row in rows] for f, form in FIGURES]
    cells = [f"{ours} ({'; '.join(others)})" for ours, *others in shown]
    judged = f"{100 * quality['increase']:+.2f} %", f"{min(quality['retention'].values()):.2f}"
    return (label, *cells, *judged)


def models_table() -> str:
    """A decoded token of whole models beside cuDNN, and what the same plan costs a real model."""
    heads = ("shape", "older tokens read", "ms per token", "speed-up", "choosing; new tokens, ms")
    heads += ("tokens in memory", "perplexity", "weakest task")
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *_model_lines()])


def _model_lines() -> Iterator[str]:
    rows = _rows("coded-models-h200")
    for row in rows:
        ms, tokens = statistics.median(row["ms"]), f"{row['tokens'] / 1e6:.2f} M"
        cells = [row["shape"], f"{ms:.2f}"]
        if row["kind"] == "cudnn":
            yield f"| {cells[0]} | all, 16 bits, cuDNN | {cells[1]} | | | {tokens} | | |"
            continue
        parts, judged = row["kernels"], row["quality"]
        of_model = (
            f"{judged['increase']:+.2%} | {min(judged['retention'].values()):.2f}" if judged else "– | –"
        )
        yield (
            f"| {cells[0]} | {READS[row['kind']]} | {cells[1]} | {row['speedup']:.2f}x "
            f"| {parts['choosing']:.2f}, {parts['new tokens']:.2f} "
            f"| {tokens}, {row['tokens_beside_dense']:.2f}x | {of_model} |"
        )


TABLES = {
    "coded kernels": kernels_table,
    "coded models": models_table,
    "one plan": one_plan_table,
    "one plan on two": partial(one_plan_on_mesh_table, "one-plan-h100-2"),
    "one plan on four": partial(one_plan_on_mesh_table, "one-plan-h100-4"),
}
