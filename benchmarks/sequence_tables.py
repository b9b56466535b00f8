"""Tables of prompts divided over GPUs, from the JSON of `bench_sequence_parallel`."""

import json
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.sequence_rows import LABELS, SEQUENCE_LENGTH, SEQUENCE_RESULTS, median, sent


def sequence_table() -> str:
    """Prompts divided over GPUs by method, on NVLink and over sockets; empty where nothing was measured."""
    names = SEQUENCE_RESULTS.values()
    links = [_results(name) for name in names]
    if not any(links):
        return ""
    lines = [
        "| method | NVLink: first token | beside dense | GB that leave a GPU | error of a head "
        "| exchange, a layer | near + exchange, apart from a layer | sockets: first token | beside dense |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, label in LABELS.items():
        nvlink, sockets = (results.get(f"{row} {SEQUENCE_LENGTH}", {}) for results in links)
        error = nvlink.get("numerics", {}).get("head")
        cells = [*first_token_cells(nvlink), bytes_cell(nvlink)]
        cells += ["–" if error is None else f"{100 * error:.2g} %"]
        cells += [*exchange_cells(nvlink), *first_token_cells(sockets)]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    rates = [results.get("link_rate") for results in links]
    lines.append("| link, GB/s | {} | | | | | | {} | |".format(*map(rate_cell, rates)))
    return "\n".join(lines)


def first_token_cells(out: dict[str, Any]) -> list[str]:
    """Time to the first token, and dense Ulysses' over it."""
    seconds, speedup = median(out, "first_token"), out.get("compared", {}).get("speedup_over_dense")
    return ["–" if seconds is None else f"{seconds:.2f} s", "–" if speedup is None else f"{speedup:.2f}x"]


def bytes_cell(out: dict[str, Any]) -> str:
    """GB of a prompt that leave a device."""
    count = sent(out)
    return "–" if count is None else f"{count / 1e9:.2f}"


def exchange_cells(out: dict[str, Any]) -> list[str]:
    """The exchange alone; near attention and exchange in one program over their sum."""
    seconds, share = median(out, "exchange"), out.get("compared", {}).get("together_over_sum")
    return [
        "–" if seconds is None else f"{1e3 * seconds:.2f} ms",
        "–" if share is None else f"{share:.2f} of their sum",
    ]


def rate_cell(rate: Any) -> str:
    """Bytes a second, as measured."""
    return f"{rate / 1e9:.1f}" if isinstance(rate, float) else "–"


def _results(name: str) -> dict[str, Any]:
    """Of one file; none where it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}
