"""Writes the tables of README and docs from `benchmarks/results/*.json`, between their markers.

python -m benchmarks.tables
"""

import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import coded_speed_tables
from benchmarks.common import RESULTS
from benchmarks.quality import block_tables
from benchmarks.quality.rows import NAME, Row, family, in_order, least, missing, of, read_run, retentions
from benchmarks.sequence_tables import sequence_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md", ROOT / "docs" / "coding.md")
MODELS = ("ref-llama-23m", "ref-opt-26m")
REAL_MODEL = "smollm2-135m"
LONG_TASKS = ("copy@2976", "induction", "lookup", "needles", "passkey")
TASK_HEADS = ("near copy", "far copy", *LONG_TASKS[1:])
"""Tasks where contexts of several lengths stand side by side."""
OLD_CODE = "coded (Gaussian levels)"
"""Rows from before `coded` had integers."""
CODED = (
    *("1 %", "0.5 %", "8192, 1 %", "8192, 0.6 %", "8192, 0.6 %, A", "8192, 0.6 %, B"),
    *("8192, chosen", "8192, 0.3 %", "8192, 0.3 %, chosen"),
)
SEARCHED = (*(f"{code}, {plan}" for plan in CODED for code in ("coded", OLD_CODE)), "searched", "rotated")
AGAIN = {
    text: f"{folder}/coded-{REAL_MODEL}"
    for text, folder in (("other again", "other-windows"), ("other, third set", "third-windows"))
}
"""Rows of plans on windows and sheets that were drawn after the ones before them had been looked at."""
HEADLINE = (
    *((name, None) for name in ("coded, 1 %", "coded, 0.5 %", "searched")),
    *(("turboquant", 0.28), ("kivi", 0.36), ("int8", 0.52), ("rotated", 1.0)),
)


def read(name: str) -> dict[str, Any]:
    """One result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(value: float) -> str:
    """Signed, with the digits that 24 windows can bear, and one more near the limit of 1 %."""
    return f"{100 * value:+.1f} %" if abs(value) >= 0.02 else f"{100 * value:+.2f} %"


def cell(row: dict[str, Any] | None) -> str:
    """Increase of perplexity with its interval."""
    if row is None:
        return "–"
    low, high = row["interval"]
    return f"{percent(row['increase'])} [{percent(low)}, {percent(high)}]"


def quality_table() -> str:
    """Perplexity by basis, ranks and window, both reference models side by side."""
    results = {name: read(f"quality-{name}")["results"] for name in MODELS}
    index = {name: {(r["group"], r["label"], r["basis"]): r for r in rows} for name, rows in results.items()}
    keys = list(dict.fromkeys(key for rows in index.values() for key in rows if key[0] != "tokens"))
    lines = [
        f"| plan | basis | KV bytes | {MODELS[0]} | {MODELS[1]} |",
        "|---|---|---|---|---|",
    ]
    for key in keys:
        rows = [index[name].get(key) for name in MODELS]
        share = next(row["bytes_share"] for row in rows if row is not None)
        group, label, basis = key
        lines.append(f"| {group}, {label} | {basis} | {share:.1%} | {cell(rows[0])} | {cell(rows[1])} |")
    return "\n".join(lines)


def equal_bytes_overview(name: str = NAME) -> str:
    """All methods side by side: at each budget the increase of perplexity, and what is retained least.

    Plans of no budget, and what holds everything, have a column of their own and say their share. Rows of
    `OLD_CODE` are left out.
    """
    rows = [
        row for row in of(read_run(name)["rows"], 4096, "cached") if not row["method"].startswith(OLD_CODE)
    ]
    budgets = sorted({row["budget"] for row in rows if row["budget"] not in (None, 1.0)}, reverse=True)
    columns = [None, *budgets]
    index = {(row["method"], row["budget"] if row["budget"] in budgets else None): row for row in rows}
    heads = ["kind", "method", "other shares", *(f"{budget:.0%}" for budget in budgets)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in in_order({row["method"] for row in rows}):
        cells = [overview_cell(index.get((method, column)), column) for column in columns]
        lines.append(f"| {family(method)} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overview_cell(row: Row | None, budget: float | None) -> str:
    """Increase and lowest retention; without a budget the share that is held, too."""
    if row is None:
        return "–"
    found = f"{percent(row['increase'])}, {least(row).retention:.2f}"
    return found if budget else f"{row['bytes_share']:.1%}: {found}"


def headline_table() -> str:
    """What a searched plan costs and retains beside caches of fewer bits, 4096 tokens, cached."""
    rows = {(row["method"], row["budget"]): row for row in of(read_run()["rows"], 4096, "cached")}
    heads = ["method", "KV bytes", "increase", *TASK_HEADS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, budget in HEADLINE:
        row = rows[method, budget]
        cells = [method, f"{row['bytes_share']:.1%}", cell(row), *task_cells(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def task_cells(row: Row) -> list[str]:
    """Retention task by task, in the order of `TASK_HEADS`."""
    tasks = row["tasks"]
    copies = sorted((name for name in tasks if name.startswith("copy@")), key=lambda name: int(name[5:]))
    return [f"{tasks[name]['retention']:.2f}" for name in (*copies, *LONG_TASKS[1:])]


def searched_table() -> str:
    """Searched plans: what one search saw, then other text; and full rank, the floor of rounding."""
    heads = ["plan", "text", "context", "protocol", "held", "read", "increase", *TASK_HEADS]
    found = read(f"search-{REAL_MODEL}-front")
    best = found["best"]
    seen = best | {
        "read_share": best["bytes_share"],
        "tasks": {name: {"retention": value} for name, value in best["retention"].items()},
    }
    runs = {"other": read_run(), **{text: read(name) for text, name in AGAIN.items()}}
    rows = [("searched", "the search's, float32", found["context"], "cached", seen)]
    rows += [
        (row["method"], f"{text}, bfloat16", row["context"], row["protocol"], row)
        for method in SEARCHED
        for text, run in runs.items()
        for row in run["rows"]
        if row["method"] == method
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for *about, row in rows:
        shares = [f"{row[share]:.1%}" for share in ("bytes_share", "read_share")]
        lines.append(f"| {' | '.join([*map(str, about), *shares, cell(row), *task_cells(row)])} |")
    return "\n".join(lines)


def equal_bytes_table(context: int, protocol: str, tasks: tuple[str, ...]) -> str:
    """Each plan of one context and protocol, by budget; retention of some tasks, and the lowest of all."""
    chosen = of(read_run()["rows"], context, protocol)
    order = in_order({row["method"] for row in chosen})
    chosen.sort(key=lambda row: (-(row["budget"] or row["bytes_share"]), order.index(row["method"])))
    head = ["budget", "method", "plan", "held", "read", "increase", *tasks, "lowest"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in chosen:
        lowest = least(row)
        cells = [
            f"{row['budget']:.0%}" if row["budget"] else "–",
            row["method"],
            plan_cell(row["plan"]),
            f"{row['bytes_share']:.1%}",
            f"{row['read_share']:.1%}",
            cell(row),
            *(f"{row['tasks'][task]['retention']:.2f}" for task in tasks),
            f"{lowest.retention:.2f} {lowest.task}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plan_cell(plan: dict[str, Any]) -> str:
    """What a plan keeps, in words."""
    H, chosen = plan["head_dim"], plan.get("settings", {})
    ranks = {(layer["qk"], layer["v"]) for layer in plan["layers"]}
    parts = [] if ranks == {(H, H)} else [str(*ranks) if len(ranks) == 1 else "ranks by layer"]
    bits = [chosen[name] for name in ("bits", "bits_k", "bits_v") if name in chosen]
    if bits:
        parts.append(f"{' and '.join(map(str, dict.fromkeys(bits)))} bits")
    if heads := chosen.get("heads"):
        parts.append(f"{sum(map(len, heads))} of {len(heads) * plan['num_kv_heads']} heads")
    parts += ["bits by layer"] if any("settings" in layer for layer in plan["layers"]) else []
    parts += [f"{name} {chosen[name]}" for name in ("kept", "read") if chosen.get(name)]
    parts += [f"window {plan['window']}"] if plan["window"] else []
    return ", ".join(parts) or "all tokens"


def equal_bytes_state() -> str:
    """How much is measured, how sure it is, and what is missing, model by model."""
    heads = ["model", "context", "protocol", "cells", "retentions", "not within 0.02"]
    heads.append("neither measured nor refused")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in (REAL_MODEL, *MODELS):
        run = read_run(f"equal-bytes-{model}")
        for context, protocol in itertools.product(run["config"]["contexts"], ("cached", "exact")):
            rows = of(run["rows"], context, protocol)
            count, unsure = map(sum, zip(*map(retentions, rows), strict=True))
            left = missing(run, context, protocol).items()
            named = [f"{name} {', '.join(f'{budget:.0%}' for budget in budgets)}" for name, budgets in left]
            cells = [model, context, protocol, len(rows), count, unsure, "; ".join(named) or "none"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def what_to_compress_table() -> str:
    """Weights, or keys and values, at the same bits: increase of perplexity and the lowest retention."""
    measured = sorted(read(f"what-to-compress-{REAL_MODEL}")["results"], key=lambda row: -row["bits"])
    rows = {(row["method"], row["protocol"]): row for row in measured}
    lines = ["| what, bits | cached | lowest | exact | lowest |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(method for method, _ in rows):
        both = [rows[method, protocol] for protocol in ("cached", "exact")]
        cells = [f"{cell(row)} | {least(row).retention:.2f} {least(row).task}" for row in both]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sensitivity_table() -> str:
    """Figs. 24 and 25 of the paper on a real model: important tokens, and shares dropped of Q/K or V."""
    results = read(f"sensitivity-{REAL_MODEL}")["results"]
    lines = ["| kept | KV bytes | balanced | stacked |", "|---|---|---|---|"]
    for row in results["g"]["rows"]:
        lines.append(f"| {row['g']:.0%} of tokens important | {row['bytes_share']:.1%} | {cell(row)} | – |")
    dropped = {(row["side"], row["p"], row["basis"]): row for row in results["p"]["rows"]}
    for side, p in sorted({key[:2] for key in dropped}):
        rows = [dropped[side, p, basis] for basis in ("balanced", "stacked")]
        what = f"{1 - p:.0%} of {'Q/K' if side == 'qk' else 'V'}, the other whole"
        lines.append(f"| {what} | {rows[0]['bytes_share']:.1%} | {' | '.join(map(cell, rows))} |")
    return "\n".join(lines)


def kmeans_table() -> str:
    """Fig. 26 of the paper on a real model: its calibration over exact moments."""
    results = read(f"sensitivity-{REAL_MODEL}")["results"]
    rows = [row for part in ("prune", "clusters") for row in results[part]["rows"] if "over" in row]
    index = {(row["prune"], row["clusters"]): cell(row["over"]) for row in rows}
    lines = ["| sequences left out | centroids | over exact moments |", "|---|---|---|"]
    lines += [f"| {prune:.0%} | {count} | {index[prune, count]} |" for prune, count in index]
    return "\n".join(lines)


def certificate_table() -> str:
    """Spearman's correlation of the certificate with what lowering one layer costs."""
    rows = read(f"certificate-{REAL_MODEL}")["results"]["correlations"]
    tasks = list(rows[0]["lost"])
    heads = ["lowered", "to rank", "trials", "perplexity", *tasks]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        found = [f"{value:+.2f}" for value in (row["nats"], *(row["lost"][task] for task in tasks))]
        about = ["Q/K" if row["part"] == "qk" else "V", str(row["rank"] or "all three"), str(row["trials"])]
        lines.append(f"| {' | '.join(about + found)} |")
    return "\n".join(lines)


def kvpress_table() -> str:
    """Nats a token, ours and theirs; for the unmodified model theirs are transformers'."""
    lines = ["| what | ours | theirs | perplexity, ours over theirs |", "|---|---|---|---|"]
    for row in read("kvpress-smollm2-135m")["results"]:
        low, high = (f"{100 * bound:+.3f} %" for bound in row["interval"])
        over = f"{100 * row['increase']:+.3f} % [{low}, {high}]"
        lines.append(f"| {row['label']} | {-row['ours']:.5f} | {-row['theirs']:.5f} | {over} |")
    return "\n".join(lines)


def plans_table() -> str:
    """What the search found at each limit, on text it did not see."""
    lines = [
        "| limit | model | KV bytes | increase | plans measured | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        rows = [row for row in read(f"plans-{model}")["results"]["rows"] if row["kind"] == "oracle"]
        lines += [
            f"| {row['limit']:.1%} | {model} | {row['bytes_share']:.1%} | {cell(row)} | "
            f"{row['plans_measured']} | {row['seconds']:.0f} |"
            for row in rows
        ]
    return "\n".join(lines)


def predictor_table() -> str:
    """Plans of models left out of the fit, beside what a search finds; by held-out text."""
    checked = "predicted, checked"
    kinds = ("oracle", "predicted", checked, f"{checked} as searched", "look-up", "constant")
    lines = [f"| model | limit | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    for path in sorted(RESULTS.glob("predicted-*.json")):
        rows = json.loads(path.read_text())["results"]["rows"]
        for limit in dict.fromkeys(row["limit"] for row in rows):
            found = {row["kind"]: row for row in rows if row["limit"] == limit}

            def row(plan):
                return f"{plan['bytes_share']:.1%} {percent(plan['increase'])}"

            cells = [row(found[kind]) if kind in found else "–" for kind in kinds]
            lines.append(f"| {path.stem.removeprefix('predicted-')} | {limit:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ablation_table() -> str:
    """What each part of the method is worth on both reference models."""
    results = {name: read(f"ablation-{name}")["results"] for name in MODELS}
    names = {
        "zo": "compression at run time",
        "oc": "basis online",
        "dt": "classes or one rate",
        "dl": "important by depth",
        "lt": "importance by",
    }
    lines = [f"| switch | | {MODELS[0]} | {MODELS[1]} |", "|---|---|---|---|"]
    for part, name in names.items():
        index = [{row["label"]: row for row in results[model][part]["rows"]} for model in MODELS]
        lines += [
            f"| {name} | {label} | {cell(index[0][label])} | {cell(index[1][label])} |" for label in index[0]
        ]
    return "\n".join(lines)


def calibration_table() -> str:
    """The offline route."""
    results = read("calibration-llama-2-13b-shape")["results"]
    per_window = results["per_window"]
    rows = [
        ("moments of 1 M tokens", f"{results['seconds_moments']:.1f} s"),
        ("moments to stored basis", f"{results['seconds_basis']:.1f} s"),
        ("profile of layers", f"{results['seconds_profile']:.1f} s"),
        ("**total**", f"**{results['seconds_total']:.1f} s**"),
        ("moments on top of the forward pass", percent(per_window["overhead"])),
        (
            "the paper's K-means route to a stored basis, an earlier run",
            f"{results['kmeans_seconds_total']:.1f} s",
        ),
    ]
    return "\n".join(["| stage | measured |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def kernel_table() -> str:
    """Every kernel beside the resource that bounds it and its peer."""
    results = read("kernels-h200")["results"]
    lines = ["| kernel | ms | of its bound | beside cuDNN (epilogue: XLA) |", "|---|---|---|---|"]
    for row in (row for rows in results.values() if isinstance(rows, list) for row in rows):
        if "ms" in row:
            speedup = f"{row['speedup']:.2f}x" if "speedup" in row else "–"
            bound = f"{row['of_limit']:.0%} of {row['limit']}"
            lines.append(f"| {row['name']} | {row['ms']:.3f} | {bound} | {speedup} |")
    return "\n".join(lines)


def generate_table() -> str:
    """A whole model on the kernels beside the same model on cuDNN."""
    results = read("generate-llama-2-7b-shape")["results"]

    def median(value):
        return value if isinstance(value, int) else statistics.median(value)

    peer = results["cudnn"]
    kinds = ("folded", "post_rope", "window")
    lines = ["| | cuDNN | " + " | ".join(kinds) + " |", "|---|---|---|---|---|"]
    for key, label in {
        "prefill_8k": "first token of 8K",
        "prefill_128k": "first token of 128K",
        "decode_b16_8k": "a token of 16 rows at 8K",
        "decode_b8_16k": "a token of 8 rows at 16K",
    }.items():
        base = median(peer[key])
        ours = [median(results[kind][key]) if key in results[kind] else None for kind in kinds]
        cells = ["–" if x is None else f"{1e3 * x:,.2f} ms ({base / x:.2f}x)" for x in ours]
        lines.append(f"| {label} | {1e3 * base:,.2f} ms | {' | '.join(cells)} |")
    batches = peer["largest_batch_16k"], results["window"]["largest_batch_16k"]
    lines.append(f"| largest batch at 16K | {batches[0]} | – | – | {batches[1]} |")
    return "\n".join(lines)


def few_kernels_table() -> str:
    """The kernels that a reader asks for first."""
    sections = [rows for rows in read("kernels-h200")["results"].values() if isinstance(rows, list)]
    kernels = {row["name"]: row for rows in sections for row in rows}
    lines = ["| kernel | ms | of its bound | beside cuDNN, full rank |", "|---|---|---|---|"]
    for name in ("prefill (128,128) K=32", "prefill (64,96) K=32", "decode (64,96) B=16 S=8192 K=32"):
        row = kernels[name]
        bound = f"{row['of_limit']:.0%} of {row['limit']}"
        lines.append(f"| {name} | {row['ms']:.3f} | {bound} | {row['speedup']:.2f}x |")
    return "\n".join(lines)


TABLES = {
    "few kernels": few_kernels_table,
    "headline": headline_table,
    "equal bytes": equal_bytes_overview,
    "searched": searched_table,
    "equal bytes 4096": lambda: equal_bytes_table(4096, "cached", LONG_TASKS),
    "equal bytes 8192": lambda: equal_bytes_table(8192, "cached", ("needles",)),
    "equal bytes exact": lambda: equal_bytes_table(4096, "exact", ("needles",)),
    "equal bytes state": equal_bytes_state,
    **{f"equal bytes {model}": partial(equal_bytes_overview, f"equal-bytes-{model}") for model in MODELS},
    "what to compress": what_to_compress_table,
    "sensitivity": sensitivity_table,
    "kmeans": kmeans_table,
    "certificate": certificate_table,
    "kvpress": kvpress_table,
    "generate": generate_table,
    "quality": quality_table,
    "plans": plans_table,
    "predictor": predictor_table,
    "ablation": ablation_table,
    "calibration": calibration_table,
    "kernels": kernel_table,
    "sequence": sequence_table,
    **coded_speed_tables.TABLES,
    **block_tables.TABLES,
}


def main() -> None:
    """Replaces what stands between `<!-- table NAME -->` and `<!-- end NAME -->`."""
    for page in PAGES:
        text = page.read_text()
        for name, table in TABLES.items():
            start, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
            head, found, rest = text.partition(start)
            if found:
                _, _, tail = rest.partition(end)
                text = head + "\n".join([start, table(), end]) + tail
        page.write_text(text)


if __name__ == "__main__":
    main()
