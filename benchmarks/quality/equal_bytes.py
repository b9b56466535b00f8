"""Comparison of cache methods at equal bytes, in perplexity and in long-range tasks, on one model.

    python -m benchmarks.quality.equal_bytes --model CONVERTED --corpus CORPUS --name equal-bytes-smollm2-135m
    python -m benchmarks.quality.equal_bytes merge WHOLE.json PART.json …

`CONVERTED` is a calibrated folder, `CORPUS/<topic>/heldout.txt.xz` the text. A cell is one method at one
budget, context and protocol (`benchmarks.quality.material`). Cells that the JSON file already has are
skipped, so an interrupted run can continue. `merge` joins runs of different cells that were judged on the
same material.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, environment
from benchmarks.quality.material import Material, Measured, draw, measure
from benchmarks.quality.plans import FIRST, Entry, others, share_held, share_read
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.answers import Protocol
from zdc_jax.evaluation.perplexity import bootstrap_interval
from zdc_jax.evaluation.retention import retention
from zdc_jax.evaluation.sheets import ALIGNMENT
from zdc_jax.files import whole_file
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.loading import stored_basis
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.retrieving import best_heads, induction_scores

PROTOCOLS: tuple[Protocol, ...] = ("cached", "exact")
SAME = ("windows", "documents", "seed", "dtype")
"""Options that the rows of one JSON file share."""
COUNTED_AT = 4096
"""Longest context, in tokens, at which the options give the number of windows and documents."""


@dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      contexts: contexts in tokens.
      protocols: protocols to measure.
      methods: methods to measure, all by default; with `plans` only the named ones.
      plans: plan files to measure, named by their files.
      budgets: budgets to measure, all by default.
      windows: windows at 4,096 tokens, a multiple of 8; longer contexts have fewer, of similar cost.
      documents: documents with questions at 4,096 tokens; longer contexts have fewer.
      first_only: whether only the first list of methods is measured.
      minutes: time after which no cell begins.
      threads: cells measured at once, since compiling takes most of the time; each needs up to 26 GB.
    """

    model: Path
    corpus: Path
    name: str
    contexts: tuple[int, ...] = (4096, 8192)
    protocols: tuple[Protocol, ...] = PROTOCOLS
    methods: tuple[str, ...] = ()
    plans: tuple[Path, ...] = ()
    budgets: tuple[float, ...] = ()
    windows: int = 24
    documents: int = 64
    seed: int = 15
    dtype: str = "bfloat16"
    first_only: bool = False
    minutes: float = 600.0
    threads: int = 1
    results: Path = RESULTS


class Cell(NamedTuple):
    """One plan under one protocol."""

    method: str
    budget: float | None
    plan: CompressionPlan
    context: int
    protocol: Protocol

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the cell in the JSON file."""
        return self.method, self.budget, self.context, self.protocol


class Bench:
    """The model, its material, and the rows so far."""

    split: ClassVar[str] = "heldout"

    def __init__(self, options: Options):
        self.options, self.began = options, time.perf_counter()
        self.checkpoint = Checkpoint.open(options.model)
        self.config, self.dtype = self.checkpoint.config, jnp.dtype(options.dtype)
        self.basis = stored_basis(self.checkpoint)
        self.embeddings = jax.device_put(cast(self.checkpoint.embeddings(), self.dtype))
        self.layers: dict[tuple[Any, ...], list[Any]] = {}
        self.materials: dict[int, Material] = {}
        self.dense: dict[tuple[int, Protocol], Measured] = {}
        self.induction: np.ndarray | None = None
        self.path = options.results / f"{options.name}.json"
        self.rows: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.failed: list[tuple[Any, ...]] = []
        self.drawn: dict[str, Any] = {}

    @property
    def basis_kind(self) -> str:
        """Kinds of the basis of Q/K and of V/O, and whether keys and values are centred."""
        kinds = f"{self.basis.qk_kind}, {self.basis.vo_kind}"
        return kinds if self.basis.value_mean is None else f"{kinds}, centred"

    def material(self, context: int) -> Material:
        if context not in self.materials:
            scale = min(1, COUNTED_AT / context)

            def rows(n):
                return max(8, int(n * scale) // 8 * 8)

            self.materials[context] = draw(
                self.checkpoint,
                self.options.corpus,
                self.split,
                context=context,
                windows=rows(self.options.windows),
                documents=rows(self.options.documents),
                seed=self.options.seed,
            )
        return self.materials[context]

    def network(self, plan: CompressionPlan) -> Transformer:
        """Return a model with arrays of the plan's size; plans share equal weights on the device."""
        if plan.rotated:
            plan = plan.for_model(plan.fingerprint, plan.basis, self.basis.shifted)
        ranks = plan.layers
        widths = [True if any(plan.near(i)) else (r.qk, r.v) for i, r in enumerate(ranks)]
        latent = plan.settings.latent_keys and tuple(ranks)
        rotations = [plan.rotations(i) for i in range(len(ranks))]
        shifted = [each.shift for each in plan.layers]
        key = (plan.rotated, latent, *((*widths, *rotations, *shifted) if plan.rotated else ()))
        if key not in self.layers:
            stored = (self.checkpoint.layer(i) for i in range(self.config.num_layers))
            basis = self.basis if plan.rotated else None
            prepared = prepared_layers(stored, self.config, plan, basis, self.dtype)
            self.layers[key] = [jax.device_put(layer) for layer in prepared]
        return Transformer(self.config, plan, self.embeddings, self.layers[key])

    def dense_on(self, context: int, protocol: Protocol) -> Measured:
        if (context, protocol) not in self.dense:
            plan = replace(CompressionPlan.full(self.config), rotated=False)
            self.dense[context, protocol] = measure(self.network(plan), self.material(context), protocol)
        return self.dense[context, protocol]

    def measure(self, cell: Cell, network: Transformer | None = None) -> dict[str, Any]:
        """Measure one row; `network` replaces the one of the cell's plan."""
        dense = self.dense_on(cell.context, cell.protocol)
        began = time.perf_counter()
        measured = measure(network or self.network(cell.plan), self.material(cell.context), cell.protocol)
        difference = measured.nll - dense.nll
        dtype = self.dtype.name
        return {
            "model": self.options.name.removeprefix("equal-bytes-").removeprefix("coded-"),
            "method": cell.method,
            "budget": cell.budget,
            "plan": cell.plan.to_json(),
            "basis": self.basis_kind if cell.plan.rotated else None,
            "protocol": cell.protocol,
            "context": cell.context,
            "bytes": cell.plan.bytes(cell.context, 1, dtype),
            "bytes_share": share_held(cell.plan, cell.context, dtype),
            "bytes_read": sum(spec.bytes_read(cell.context) for spec in cell.plan.layer_caches(dtype)),
            "read_share": share_read(cell.plan, cell.context, dtype),
            "dense_perplexity": float(np.exp(dense.nll.mean())),
            "increase": float(np.expm1(difference.mean())),
            "interval": bootstrap_interval(difference),
            "tasks": {
                name: asdict(retention(dense.answers[name], of_plan))
                for name, of_plan in measured.answers.items()
            },
            "seconds": time.perf_counter() - began,
            "commit": commit(),
        }

    def run(self) -> None:
        """Measure all cells that are missing, while there is time."""
        self.take_up()
        wanted = {cell.key: cell for cell in self.cells()}

        def key(row):
            return (row["method"], row["budget"], row["context"], row["protocol"])

        # The plan of a budget may have changed since its row was written.
        def plan_of(row):
            return CompressionPlan.from_json(row["plan"], self.path)

        def stale(row):
            return key(row) in wanted and plan_of(row).to_json() != wanted[key(row)].plan.to_json()

        self.rows = [row for row in self.rows if not stale(row)]
        done = set(map(key, self.rows))
        cells = [cell for cell in wanted.values() if cell.key not in done]
        for context in dict.fromkeys(cell.context for cell in cells):
            for protocol in self.options.protocols:
                self.dense_on(context, protocol)  # All threads need it.
            with ThreadPoolExecutor(self.options.threads) as pool:
                tried = [pool.submit(self.attempt, cell) for cell in cells if cell.context == context]
                for each in as_completed(tried):
                    if (row := each.result()) is not None:
                        self.rows.append(row)
                        self.write()
                        print(_line(row), flush=True)
        self.write()
        if self.failed:
            raise SystemExit(f"{len(self.failed)} cells failed: {self.failed}")

    def take_up(self) -> None:
        """Load the rows of an interrupted run."""
        if not self.path.exists():
            return
        earlier = json.loads(self.path.read_text())
        for name in SAME:
            if earlier["config"][name] != (own := getattr(self.options, name)):
                raise SystemExit(
                    f"{self.path} has rows of {name}={earlier['config'][name]}, not {own}; give another name"
                )
        self.rows, self.refused = earlier["rows"], earlier["refused"]
        self.drawn = earlier["config"]["material"]

    def attempt(self, cell: Cell) -> dict[str, Any] | None:
        """Return the row of a cell; None if time is over or the cell fails, so that others still run."""
        if (time.perf_counter() - self.began) / 60 > self.options.minutes:
            return None
        try:
            return self.measure(cell)
        except Exception as error:
            print(f"FAILED {cell.key}: {type(error).__name__}: {error!s:.500}", flush=True)
            self.failed.append(cell.key)
            return None

    def cells(self) -> Iterator[Cell]:
        """Yield cells in the order of the report: all budgets of all methods, context by context."""
        options = self.options
        entries = FIRST if options.first_only else (*FIRST, *others(self.best_heads))
        if unknown := set(options.methods) - {entry.name for entry in entries}:
            raise SystemExit(f"methods={sorted(unknown)} must be of {[entry.name for entry in entries]}")
        every = not options.methods and not options.plans
        chosen = [entry for entry in entries if every or entry.name in options.methods]
        if self.basis.qk_kind != "keys" and any(entry.name == "loki" for entry in chosen):
            # Loki chooses by principal components of keys: `zdc calibrate` with `--from-moments --qk keys`.
            print(f"loki is left out: the basis of {options.model} is {self.basis.qk_kind!r}, not 'keys'")
            chosen = [entry for entry in chosen if entry.name != "loki"]
        for context in options.contexts:
            for entry in chosen:
                for budget in entry.budgets:
                    if options.budgets and budget not in options.budgets:
                        continue
                    if (plan := self.plan(entry, context, budget)) is not None:
                        for protocol in options.protocols:
                            yield Cell(entry.name, budget, plan, context, protocol)
            yield from self.of_plans(context)

    def of_plans(self, context: int, prefix: str = "") -> Iterator[Cell]:
        """Yield cells of the plan files."""
        for path in self.options.plans:
            plan = CompressionPlan.load(path)
            plan.check_model(self.config, self.checkpoint.fingerprint)
            if plan.rotated:
                plan.check_basis(self.basis.coordinates_hash)
            if any(ALIGNMENT % spec.alignment for spec in plan.layer_caches(self.dtype.name)):
                raise SystemExit(f"{path}: its chunks cannot begin at multiples of {ALIGNMENT}")
            for protocol in self.options.protocols:
                yield Cell(prefix + path.stem, None, plan, context, protocol)

    def best_heads(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the `count` KV heads that retrieve best, or all of them."""
        if self.induction is None:
            dense = self.network(replace(CompressionPlan.full(self.config), rotated=False))
            self.induction = induction_scores(dense)
        slides = [spec.window is not None for spec in self.config.layers]
        return best_heads(self.induction, min(1, count / self.induction.size), slides)

    def plan(self, entry: Entry, context: int, budget: float) -> CompressionPlan | None:
        """Return a plan within the budget; None if the method has none, with the reason in the JSON file."""
        try:
            return entry.at_budget(self.config, context, budget, self.dtype.name)
        except PlanError as error:
            refused = {"method": entry.name, "budget": budget, "context": context, "reason": str(error)}
            if refused not in self.refused:
                self.refused.append(refused)
            return None

    def write(self) -> None:
        """Write the JSON file with all rows so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        left_out = (
            "results",
            "model",
            "corpus",
            "parts",
            "protocols",
            "methods",
            "plans",
            "budgets",
            "minutes",
        )
        config = {k: v for k, v in asdict(self.options).items() if k not in left_out}
        config["material"] = self.drawn | {
            str(context): {"windows": len(one.windows), "documents": len(one.documents), "topics": one.topics}
            for context, one in self.materials.items()
        }
        run = {"benchmark": self.options.name, **environment(), "config": config}
        save(self.path, run | {"refused": self.refused, "rows": self.rows})


def save(path: Path, run: dict[str, Any]) -> None:
    """Write readable JSON with one line a row; `rows` come last."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in run["rows"])
    head = json.dumps({key: value for key, value in run.items() if key != "rows"}, indent=1)
    with whole_file(path) as file:
        file.write_text(head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n')


def _line(row: dict[str, Any]) -> str:
    tasks = " ".join(
        f"{name}={task['retention']:.3f}{'' if task['counts'] else '*'}"
        for name, task in row["tasks"].items()
    )
    return (
        f"{row['method']:12} {row['context']} {row['protocol']:6} stored {row['bytes_share']:.3f} "
        f"read {row['read_share']:.3f} {100 * row['increase']:+.2f} % {tasks} ({row['seconds']:.1f} s)"
    )


def main(options: Options) -> None:
    """Measure the cells and write one JSON file."""
    bench = Bench(options)
    bench.run()
    print(bench.path)


def merge(whole: Path, *parts: Path) -> None:
    """Merge the rows of several runs into one file; the first file of a cell wins.

    Args:
      whole: merged file, which may already exist.
      parts: files of other cells, judged on the same material.
    """
    files = [json.loads(path.read_text()) for path in ([whole] if whole.exists() else []) + [*parts]]

    def same(file):
        return {k: file["config"][k] for k in SAME}

    if any(same(file) != same(files[0]) for file in files):
        names = [path.name for path in parts]
        sys.exit(f"{names} were not judged on the same windows and documents; merge files of equal {SAME}")
    rows, refused = {}, []
    for file in files:
        for row in file["rows"]:
            row["model"] = whole.stem.removeprefix("equal-bytes-").removeprefix("coded-")
            rows.setdefault((row["context"], row["method"], row["budget"], row["protocol"]), row)
        refused += [reason for reason in file["refused"] if reason not in refused]
    order = sorted(rows, key=lambda key: (key[0], key[1], -(key[2] or 0), key[3]))
    materials = {k: v for file in files for k, v in file["config"]["material"].items()}
    merged = files[0] | {"benchmark": whole.stem, "rows": [rows[key] for key in order], "refused": refused}
    merged["config"] = files[0]["config"] | {"name": whole.stem, "material": materials}
    save(whole, merged)
    print(f"{whole}: {len(order)} rows")


if __name__ == "__main__":
    if sys.argv[1:2] == ["merge"]:
        merge(*map(Path, sys.argv[2:]))
    else:
        main(tyro.cli(Options, description=__doc__))
