"""Tables of how fast coded caches are, from the JSON of `bench_coded` and `bench_coded_models`."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
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
        "| far tokens read | heads | rows | tokens | ms | choosing | cuDNN, ms | | of read bandwidth |",
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
    cells = lambda row: (row["heads"], f"{row['S']:,}", f"{row['ms']:.3f}", f"{row['bandwidth']:.0%}")
    return _table(heads, map(cells, _of_kind("encode")))


def new_tokens_table() -> str:
    """Turning, coding and storing in one launch, and in several."""
    heads = (
        "heads",
        "rows",
        "new tokens of each",
        "at once, ms",
        "one after the other, ms",
        "turning alone, ms",
    )

    def cells(row: dict[str, Any]) -> Cells:
        times = (f"{row[name]:.4f}" for name in ("ms", "peer_ms", "turning_ms"))
        return row["heads"], f"{row['B']}", f"{row['T']:,}", *times

    return _table(heads, map(cells, _of_kind("new tokens")))


def chunk_table() -> str:
    """A piece of a prompt on far tokens in codes, and on the same in 16 bits."""
    heads = ("heads", "new tokens", "tokens in all", "ms", "in 16 bits, ms", "")

    def cells(row: dict[str, Any]) -> Cells:
        tokens = f"{row['T']:,}", f"{row['S']:,}"
        return row["heads"], *tokens, f"{row['ms']:.3f}", f"{row['peer_ms']:.3f}", f"{row['cost']:.2f}x"

    return _table(heads, map(cells, _of_kind("prompt chunk")))


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


def models_table() -> str:
    """A decoded token of whole models beside cuDNN, and what the same plan costs a real model."""
    heads = ("shape", "far tokens read", "ms a token", "", "choosing, new tokens, ms", "tokens held")
    heads += ("perplexity", "least retention")
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
    "coded chunks": chunk_table,
    "coded selection": selection_table,
    "coded models": models_table,
    "coded prompts": encode_table,
    "new tokens": new_tokens_table,
}
