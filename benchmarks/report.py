"""Write the tables of README.md and docs/measurements.md from `benchmarks/results/*.json`.

    python -m benchmarks.report

A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`. Its last line names the result files,
with the devices and commits of the rows.

Retention in every table counts a quarter of the context only where the unmodified model's score in that
quarter is at least 0.5. It is the geometric mean over these quarters, weighted by their questions.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tyro

from benchmarks.common import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
Row = dict[str, Any]

LEAST_SCORE = 0.5
"""Least score of the unmodified model in a quarter of the context that counts."""
MODEL = "smollm2-135m"
PLAN = "coded, 8192, 0.3 %"
"""Searched plan of 19.9 % of the bytes, whose speed is measured in larger shapes."""
PLANS = (PLAN, f"{PLAN}, chosen", *(f"coded, 8192, 0.6 %{variant}" for variant in ("", ", A", ", B")))
PLANS = (*PLANS, "coded, 1 %", "coded, 0.5 %", "searched")
"""Searched plans in the order of their table; `searched` has ranks only."""
SETS = {"first": "", "second": "other-windows/", "third": "third-windows/"}
"""Sets of windows and documents that no search used, by folder."""
FAMILIES = {
    "floor": ("rotated",),
    "recent tokens": ("window", "duo"),
    "fewer bits": ("int8", "fp8", "kivi", "turboquant", "oscar", "oscar_free", "gear", "coded"),
    "eviction": ("h2o", "snapkv", "tova", "knorm"),
    "low rank": ("zdc", "palu", "gear-zdc", "h2o-zdc"),
    "choosing": ("quest", "loki"),
}
"""Cache methods by family, in the order of tables. Other names are searched plans of ranks."""
KINDS = {"searched": "searched plan", "dense": "16 bits, our kernels", "cudnn": "16 bits, cuDNN"}
NVLINK = "sequence-parallel-llama-2-7b-4"
SOCKETS = f"{NVLINK}-4-processes-sockets"
METHODS = {
    "dense": "Ulysses, dense, cuDNN",
    "dense_float8": "Ulysses, dense, cuDNN, exchanged as float8",
    "dense_pallas": "Ulysses, dense, our kernels",
    "dense_coded": "Ulysses, dense, our kernels, exchanged as codes",
    "plan": "Ulysses, truncated",
    "plan_float8": "Ulysses, truncated, exchanged as float8",
    "plan_coded": "Ulysses, truncated, exchanged as codes",
    "plan_gathered": "Ulysses, truncated, weights gathered by layer",
    "late": "Ulysses, truncated after the exchange",
    "all_gather": "all-gather, dense",
    "all_gather_zigzag": "all-gather, dense, zigzag shards",
    "all_gather_plan": "all-gather, truncated",
    "ring": "ring attention, dense",
    "ring_zigzag": "ring attention, dense, zigzag shards",
    "ring_plan": "ring attention, truncated, no sinks",
    "runahead_dense": "KV-Runahead, dense, even partition",
    "runahead": "KV-Runahead, truncated, even partition",
    "runahead_searched": "KV-Runahead, truncated, searched partition",
    "one_device_dense": "one GPU, dense, cuDNN",
    "one_device": "one GPU, truncated",
}
"""Rows of `benchmarks.mesh.rows` in the words and the order of the table."""


@functools.cache
def read(name: str) -> Any:
    """Return one result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(heads: str, rows: Iterable[str], *sources: str) -> str:
    """Return a Markdown table of cells joined by ` | `, and below it the line that names its files."""
    columns = heads.count("|") + 1
    lines = [f"| {heads} |", "|---" * columns + "|", *(f"| {row} |" for row in rows)]
    return "\n".join(lines) + f"\n\nSource: {'; '.join(map(describe, sources))}."


def describe(pattern: str) -> str:
    """Return the names of result files, a name or a pattern, with their device and the commits in them."""
    runs = [read(str(path.relative_to(RESULTS).with_suffix(""))) for path in RESULTS.glob(f"{pattern}.json")]
    rows = [run.get("rows", run.get("results")) for run in runs]
    commits = {commit[:7] for commit in commits_of(rows)} or {run["commit"][:7] for run in runs}
    device = "CPU" if runs[0]["device"] == "cpu" else runs[0]["device"].removeprefix("NVIDIA ").split(" ")[0]
    count = f"{runs[0]['devices']} " if runs[0]["devices"] > 1 and device != "CPU" else ""
    return f"`{pattern}.json` ({count}{device}; {', '.join(sorted(commits))})"


def commits_of(value: Any) -> Iterator[str]:
    """Yield every commit that rows name."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "commit":
                yield item
            else:
                yield from item.values() if name == "commits" else commits_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from commits_of(item)


def percent(value: float) -> str:
    """Return a signed percentage, with two digits below 2 %."""
    return f"{100 * value:+.1f} %" if abs(value) >= 0.02 else f"{100 * value:+.2f} %"


def with_interval(row: Row) -> str:
    """Return the increase of perplexity with its 95 % interval."""
    low, high = row["interval"]
    return f"{percent(row['increase'])} [{percent(low)}, {percent(high)}]"


def retention(task: Row) -> float | None:
    """Return the retention of one task in the quarters that count; None if none counts."""
    if task["by_depth"] is None:
        return task["retention"] if task["dense"] >= LEAST_SCORE else None
    quarters = [each for each in task["by_depth"] if each and each["dense"] >= LEAST_SCORE]
    questions = sum(each["questions"] for each in quarters)
    logs = (each["questions"] * math.log(each["retention"]) for each in quarters)
    return math.exp(sum(logs) / questions) if quarters else None


class Lowest(NamedTuple):
    """Lowest retention of a row, and its task."""

    retention: float
    task: str


def lowest(tasks: Row) -> Lowest:
    """Return the lowest retention of all tasks that count."""
    retained = ((retention(task), name) for name, task in tasks.items())
    return min(Lowest(value, name) for value, name in retained if value is not None)


TASKS = "near copy | far copy | induction | lookup | needles | passkey"


def task_cells(row: Row) -> str:
    """Return retention task by task, the nearer copy first."""
    tasks = row["tasks"]
    copies = sorted((name for name in tasks if name.startswith("copy@")), key=lambda name: int(name[5:]))
    values = (retention(tasks[name]) for name in (*copies, "induction", "lookup", "needles", "passkey"))
    return " | ".join("–" if value is None else f"{value:.2f}" for value in values)


def rows_at(context: int, protocol: str, folder: str = "") -> list[Row]:
    """Return judged rows of SmolLM2 on one set of text: searched plans, and on the first set all methods."""
    methods = [] if folder else read(f"equal-bytes-{MODEL}")["rows"]
    rows = [*methods, *read(f"{folder}coded-{MODEL}")["rows"]]
    return [row for row in rows if (row["context"], row["protocol"]) == (context, protocol)]


def family(method: str) -> str:
    """Return the family of a method, or of a searched plan by the method that begins its name."""
    name = method.split(",")[0]
    return next((kind for kind, methods in FAMILIES.items() if name in methods), "low rank")


def in_order(methods: set[str]) -> list[str]:
    """Return methods family by family, searched plans last."""
    known = [method for methods in FAMILIES.values() for method in methods]
    return [method for method in known if method in methods] + sorted(methods - set(known))


def equal_bytes(context: int, protocol: str) -> str:
    """Return all methods side by side: increase of perplexity and lowest retention at each budget."""
    rows = rows_at(context, protocol)
    budgets = sorted({row["budget"] for row in rows} - {None, 1.0}, reverse=True)
    index = {(row["method"], row["budget"] if row["budget"] in budgets else None): row for row in rows}

    def cell(method: str, budget: float | None) -> str:
        if (row := index.get((method, budget))) is None:
            return ""
        judged = f"{percent(row['increase'])}, {lowest(row['tasks']).retention:.2f}"
        return judged if budget else f"{row['bytes_share']:.1%}: {judged}"

    lines = (
        " | ".join([family(method), method, *(cell(method, budget) for budget in (None, *budgets))])
        for method in in_order({row["method"] for row in rows})
    )
    heads = " | ".join(["family | method | own size", *(f"{budget:.0%}" for budget in budgets)])
    return table(heads, lines, f"equal-bytes-{MODEL}", f"coded-{MODEL}")


def searched_plans() -> str:
    """Return searched plans on every set of text and under both protocols."""
    lines = []
    for plan in PLANS:
        context = 8192 if "8192" in plan else 4096
        for (text, folder), protocol in (
            (each, protocol) for each in SETS.items() for protocol in ("cached", "exact")
        ):
            rows = [row for row in rows_at(context, protocol, folder) if row["method"] == plan]
            about = f"{plan} | {context:,} | {text} | {protocol}"
            if rows:
                shares = f"{rows[0]['bytes_share']:.1%} | {rows[0]['read_share']:.1%}"
                lines.append(f"{about} | {shares} | {with_interval(rows[0])} | {task_cells(rows[0])}")
            elif plan == PLAN:
                lines.append(f"{about} | – | – | not measured" + " | –" * 6)
    heads = f"plan | tokens | text | protocol | stored | read | perplexity | {TASKS}"
    files = (f"{folder}coded-{MODEL}" for folder in SETS.values())
    return table(heads, lines, f"equal-bytes-{MODEL}", *files)


def kvpress() -> str:
    """Return nats per token of our eviction methods and of kvpress."""
    lines = []
    for row in read(f"kvpress-{MODEL}")["results"]:
        low, high = (f"{100 * bound:+.3f} %" for bound in row["interval"])
        nats = f"{-row['ours']:.5f} | {-row['theirs']:.5f}"
        lines.append(f"{row['label']} | {nats} | {100 * row['increase']:+.3f} % [{low}, {high}]")
    heads = "press and share removed | ours, nats | theirs, nats | perplexity, ours over theirs"
    return table(heads, lines, f"kvpress-{MODEL}")


FIGURES = "TTFT, s | TPOT of 1 sequence, ms | of 8 sequences, ms | most sequences | their tokens/s"


def figures(row: Row) -> list[str]:
    """Return TTFT, TPOT of 1 and 8 sequences, most sequences and their tokens a second; – if not measured."""
    tpot = {batch: median(times) for batch, times in row.get("token", {}).items()}
    most, first = row.get("largest"), row.get("first_token")
    return [
        f"{median(first):#.3g}" if first else "–",
        *(f"{1e3 * tpot[batch]:.2f}" if batch in tpot else "–" for batch in ("1", "8")),
        "–" if most is None else f"{most:,}",
        f"{most / tpot[str(most)]:,.0f}" if str(most) in tpot else "–",
    ]


def timed(name: str) -> dict[tuple[str, int], dict[str, Row]]:
    """Return the rows of one file of `bench_one_plan` by shape and length, then by kind."""
    rows: dict[tuple[str, int], dict[str, Row]] = {}
    for entry in read(name)["results"]:
        for row in entry["rows"]:
            rows.setdefault((entry["shape"], row["length"]), {})[entry["kind"]] = row
    return dict(sorted(rows.items()))


def one_plan() -> str:
    """Return the times of the searched plan on one GPU, those of 16 bits in brackets, and its quality."""
    judged = [row for folder in SETS.values() for row in rows_at(8192, "cached", folder)]
    judged = [row for row in judged if row["method"] == PLAN]
    increases = ", ".join(f"{100 * row['increase']:+.2f}" for row in judged)
    retained = ", ".join(f"{lowest(row['tasks']).retention:.2f}" for row in judged)
    lines = []
    for (shape, length), kinds in timed("one-plan-h100").items():
        each = zip(*(figures(kinds.get(kind, {})) for kind in KINDS), strict=True)
        cells = " | ".join(f"{ours} ({'; '.join(peers)})" for ours, *peers in each)
        quality = f"{increases} % | {retained}" if length == 8192 else "not known | not known"
        lines.append(f"{shape}, {length:,} | {cells} | {quality}")
    heads = f"shape, tokens | {FIGURES} | perplexity, SmolLM2 | lowest retention, SmolLM2"
    return table(heads, lines, "one-plan-h100", *(f"{folder}coded-{MODEL}" for folder in SETS.values()))


SIDES = {"ours-16": "16 bits", "ours-plan": "plan, {:.0%} of the bytes", "vllm-16": "vLLM, 16 bits"}
"""Sides of `benchmarks.model.bench_generate` in the words of the table, with their share of the bytes."""


def generate_times() -> str:
    """Return one sequence of the 8B shape, through `generate` and vLLM, by prompt length."""
    name = "generate-8b-shape-h200"
    rows = {(row["side"], row["tokens"]): row for row in read(name)["results"] if row["sequences"] == 1}
    lines = []
    for tokens in sorted({tokens for _, tokens in rows}):
        for side, label in SIDES.items():
            row = rows[side, tokens]
            cache = label.format(row.get("bytes", 1)).replace("%", " %", 1)
            first, token = (1e3 * median(row[kind]) for kind in ("first_token", "token"))
            lines.append(f"{tokens:,} | {cache} | {first:,.0f} | {token:.2f} | {row['fits']}")
    return table("tokens | cache | TTFT, ms | TPOT, ms | sequences that fit", lines, name)


def one_plan_on_mesh(name: str) -> str:
    """Return the times of each kind on several GPUs."""
    lines = []
    for (shape, length), kinds in timed(name).items():
        for kind in (kind for kind in KINDS if kind in kinds):
            size = f"{kinds[kind]['bytes_a_row'] / 1e9:.2f}"
            lines.append(" | ".join([f"{shape}, {length:,}", KINDS[kind], *figures(kinds[kind]), size]))
    return table(f"shape, tokens | cache | {FIGURES} | GB a sequence and GPU", lines, name)


def kernels(name: str) -> str:
    """Return kernels, except those of token classes, with their bounds and their speed over cuDNN."""
    sections = {
        key: rows for key, rows in read(name)["results"].items() if key not in ("ceilings", "segments")
    }
    rows = [row for rows in sections.values() for row in rows]
    lines = []
    for row in (row for row in rows if "ms" in row):
        speed = f"{row['speedup']:.2f}x" if "speedup" in row else "–"
        lines.append(f"{row['name']} | {row['ms']:.3f} | {row['of_limit']:.0%} of {row['limit']} | {speed}")
    return table("kernel | ms | share of its bound | speed over cuDNN at full rank", lines, name)


def coded_decode() -> str:
    """Return one decoding step of attention from quantized keys and values."""
    reads = {"whole": "all, 4 bits", "bit planes": "all, 6 and 3 bits", "chosen": "1,024 chosen, 4 bits"}
    lines = []
    for row in (row for row in read("coded-h200")["results"] if row["kind"] in reads):
        about = f"{reads[row['kind']]} | {row['heads']} | {row['B']} | {row['S']:,}"
        choosing = f"{row['delay']:.3f}" if row["delay"] else "–"
        peer = f"{row['peer_ms']:.3f} | {row['speedup']:.2f}x | {row['bandwidth']:.0%}"
        lines.append(f"{about} | {row['ms']:.3f} | {choosing} | {peer}")
    heads = "older tokens read | heads | sequences | tokens | ms | of it choosing | cuDNN, ms | speed"
    return table(f"{heads} | share of read bandwidth", lines, "coded-h200")


CODED_PARTS = {
    "encode": ("quantize a prompt", ""),
    "new tokens": ("rotate, quantize and store new tokens", " (in several launches)"),
    "selection": ("select 1,024 scores of each row", " (XLA)"),
    "prompt chunk": ("attend with a chunk of 1,024 tokens", " (the same in 16 bits)"),
    "prompt chunk chosen": ("the same, each token reads 1,024 chosen ones", " (all tokens in 16 bits)"),
}
"""Other kernels of quantized caches by kind: the operation, and the peer."""


def coded_parts() -> str:
    """Return the other kernels of quantized caches, each with its peer."""
    lines = []
    for kind, (what, peer) in CODED_PARTS.items():
        for row in (row for row in read("coded-h200")["results"] if row["kind"] == kind):
            about = (
                f"{what} | {row.get('heads') or f'{row["K"]} KV heads'} | {row['B']} × {row.get('S', 1):,}"
            )
            peer_ms = f"{row['peer_ms']:.3f}{peer}" if peer else "–"
            lines.append(f"{about} | {row['ms']:.3f} | {peer_ms}")
    return table("operation | heads | sequences × tokens | ms | peer, ms", lines, "coded-h200")


def sequence() -> str:
    """Return one prompt of 131,072 tokens divided over four GPUs, by method."""
    runs = [read(name)["results"] for name in (NVLINK, SOCKETS)]
    lines = []
    for row, label in METHODS.items():
        nvlink, sockets = (run.get(f"{row} 131072", {}) for run in runs)
        sent, error = nvlink.get("bytes", {}).get("formula"), nvlink.get("numerics", {}).get("head")
        size = f"{sent / 1e9:.2f}" if sent else "–"
        exchange = f"{1e3 * median(nvlink['exchange']):.2f}" if "exchange" in nvlink else "–"
        sizes = f"{size} | {f'{100 * error:.2g} %' if error else '–'} | {exchange}"
        lines.append(f"{label} | {first_token(nvlink)} | {sizes} | {first_token(sockets)}")
    rates = [f"{run['link_rate'] / 1e9:.1f} GB/s" for run in runs]
    lines.append(f"bare all-to-all | {rates[0]} | – | – | – | – | {rates[1]} | –")
    heads = "method | TTFT over NVLink, s | speed | GB that leave a GPU | error of a head"
    heads = f"{heads} | exchange, ms a layer | TTFT over sockets, s | speed"
    return table(heads, lines, NVLINK, SOCKETS)


def first_token(out: Row) -> str:
    """Return TTFT and the speed over dense Ulysses at the same commit."""
    times, speed = out.get("first_token"), out.get("compared", {}).get("speedup_over_dense")
    return f"{f'{median(times):.2f}' if times else '–'} | {f'{speed:.2f}x' if speed else '–'}"


def payload() -> str:
    """Return what exchanges of fewer bits cost in perplexity."""
    models = (MODEL, "ref-llama-23m", "ref-opt-26m")
    lines = []
    for model in models:
        for row in read(f"payload-{model}")["results"]:
            kind = "coded" if "coded" in row else "float8"
            judged = row["coded"]["whole"] if kind == "coded" else row["whole"]
            share = (
                row["bytes"]["coded"]["share"]
                if "bytes" in row
                else row["float8_bytes"] / row["native_bytes"]
            )
            plan = "all coordinates" if row["label"] == "full" else row["label"]
            lines.append(f"{model} | {plan} | {kind} | {share:.2f} | {with_interval(judged)}")
    heads = "model | plan | payload | bytes of a 16-bit exchange | perplexity"
    return table(heads, lines, "payload-*")


def calibration() -> str:
    """Return the time of each stage of calibration."""
    results = read("calibration-llama-2-13b-shape")["results"]
    stages = {
        "moments of 1 M tokens": "seconds_moments",
        "basis from moments": "seconds_basis",
        "profile of layers": "seconds_profile",
        "total": "seconds_total",
        "the paper's K-means route to a basis": "kmeans_seconds_total",
    }
    lines = (f"{label} | {results[key]:.1f} s" for label, key in stages.items())
    return table("stage | time", lines, "calibration-llama-2-13b-shape")


def predictor() -> str:
    """Return predicted plans of models left out of the fit, relative to the search of each model."""
    files = [f"predicted-{path.stem}" for path in sorted((RESULTS / "observations").glob("*.json"))]
    rows = [row | {"model": name} for name in files for row in read(name)["results"]["rows"]]
    oracle = {(row["model"], row["limit"]): row["bytes_share"] for row in rows if row["kind"] == "oracle"}
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "oracle"):
        chosen = [row for row in rows if row["kind"] == kind]
        ratios = [row["bytes_share"] / oracle[row["model"], row["limit"]] for row in chosen]
        over = [row["increase"] - row["limit"] for row in chosen if row["increase"] > row["limit"]]
        excess = f"{100 * max(over):.1f} points" if over else "–"
        lines.append(
            f"{kind} | {len(chosen)} | {median(ratios):.2f} | {max(ratios):.2f} | {len(over)} | {excess}"
        )
    heads = "plan | cases | bytes over the search's: median | largest | over the limit | at most by"
    return table(heads, lines, "predicted-*")


TABLES: dict[str, Callable[[], str]] = {
    "equal bytes": partial(equal_bytes, 4096, "cached"),
    "equal bytes exact": partial(equal_bytes, 4096, "exact"),
    "equal bytes 8192": partial(equal_bytes, 8192, "cached"),
    "searched": searched_plans,
    "kvpress": kvpress,
    "generate": generate_times,
    "one plan": one_plan,
    "one plan on two": partial(one_plan_on_mesh, "one-plan-h100-2"),
    "one plan on four": partial(one_plan_on_mesh, "one-plan-h100-4"),
    "kernels": partial(kernels, "kernels-h200"),
    "kernels h100": partial(kernels, "kernels-h100"),
    "coded kernels": coded_decode,
    "coded parts": coded_parts,
    "sequence": sequence,
    "payload": payload,
    "calibration": calibration,
    "predictor": predictor,
}


def with_tables(text: str) -> str:
    """Return a page with every table rewritten.

    Raises:
      KeyError: the page marks a table that `TABLES` does not have.
    """

    def write(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end {match[1]} -->"

    return re.sub(r"<!-- table (.+?) -->\n.*?<!-- end \1 -->", write, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    tyro.cli(main)
