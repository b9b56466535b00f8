"""Quality of presets and rivals on one real model, without any search.

    python -m benchmarks.quality.real_models --model CONVERTED --texts heldout/ --context 8192
    python -m benchmarks.quality.real_models --model CONVERTED --texts heldout/ --tasks ruler --name ruler

`CONVERTED` is a calibrated folder. Rows are added to the JSON file, and those it already has are skipped, so
that an interrupted run continues. A row has the bytes of the whole cache relative to 16 bits, the increase of
perplexity, the KL divergence from the unmodified model, and each task with its retention.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, environment
from benchmarks.quality.plans import FIRST, share_held
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from zdc_jax import methods
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.evaluation.evaluate import ContextReport, Evaluation, prepare
from zdc_jax.evaluation.text import read_documents
from zdc_jax.files import whole_file
from zdc_jax.loading import load, stored_basis
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import SINKS, WINDOW, coded_plan, preset_plan, preset_settings

TASKS = ("perplexity", "copy", "induction", "lookup", "passkey")
NEAR = {"window": WINDOW, "sinks": SINKS}
NEAR_OSCAR = {"window": 256, "sinks": 64}
"""Recent and first tokens that OSCAR keeps in 16 bits."""
_RECENT = {"window": WINDOW}
_NONE: dict[str, int] = {}
_IN_8 = {"bits_near": 8}


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: converted and calibrated folder.
      texts: text that neither calibration nor a search has read.
      context: context length in tokens.
      documents: documents with questions, all of which are read; samples of each task of RULER; and text
        windows, if fewer than `zdc evaluate` reads.
      tasks: measurements, as `zdc evaluate --tasks`.
      plans: names of the plans; default all.
      dtype: dtype of the plans and of the unmodified model.
      batch: contexts to run at once.
      seed: seed that chooses text and facts.
      name: stem of the JSON file.
    """

    model: Path
    texts: tuple[Path, ...]
    context: int = 8192
    documents: int = 56
    tasks: tuple[str, ...] = TASKS
    plans: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    batch: int = 1
    seed: int = 5
    name: str = "real-models"
    results: Path = RESULTS


@dataclass(frozen=True)
class Plans:
    """Plans of one model by name, each with a basis of its own or that of the folder (None).

    Attributes:
      checkpoint: calibrated folder.
      context: context at which evicting plans have the bytes of `3bit` with keys in 2 bits, in tokens.
      dtype: dtype of the plans.
    """

    checkpoint: Checkpoint
    context: int
    dtype: str

    def list(self) -> dict[str, Callable[[], tuple[CompressionPlan, Basis | None]]]:
        """Return a function for each plan, in the order of the table."""
        H = self.checkpoint.config.head_dim
        three, four, eight = (preset_settings(name, H) for name in ("3bit", "4bit", "8bit"))
        two = three | {"bits_k": 2}
        return {
            "preset small": lambda: (self._judged(), None),
            "preset 8bit": lambda: (self._coded(eight, calibrated=False), None),
            "preset 4bit": lambda: (self._coded(four), None),
            "preset 4bit, not calibrated": lambda: (self._coded(four, calibrated=False), None),
            "preset 3bit": lambda: (self._coded(three), None),
            "3bit, keys in 2": lambda: (self._coded(two), None),
            "3bit, keys and values in 2": lambda: (self._coded(two | {"bits_v": 2}), None),
            "3bit, keys in 2, without the shift": lambda: self._without_shift(two),
            "rotated 4 bits without the shift": lambda: (self._uncalibrated("coded", four | _IN_8), None),
            "int8": lambda: (self._uncalibrated("int8", {}, near=_NONE), None),
            "int8 with the shift": lambda: (self._shifted("int8", {}), None),
            "fp8": lambda: (self._uncalibrated("fp8", {}, near=_NONE), None),
            "fp8 with the shift": lambda: (self._shifted("fp8", {}), None),
            "turboquant 4": lambda: (self._uncalibrated("turboquant", {}, near=_NONE), None),
            "turboquant 4 with the shift": lambda: (self._shifted("turboquant", {}), None),
            "kivi 4": lambda: (self._uncalibrated("kivi", {"bits": 4}), None),
            "kivi 2": lambda: (self._uncalibrated("kivi", {"bits": 2}), None),
            "oscar": lambda: self._oscar(shift=False),
            "oscar with the shift": lambda: self._oscar(shift=True),
            "oscar free": lambda: (self._uncalibrated("oscar_free", {}, near=_RECENT), None),
            "oscar free with the shift": lambda: (self._shifted("oscar_free", {}, near=_RECENT), None),
            "snapkv": lambda: (self._at_bytes("snapkv", self._coded(two)), None),
            "window": lambda: (self._at_bytes("window", self._coded(two)), None),
        }

    def _judged(self) -> CompressionPlan:
        plan = preset_plan("small", self.checkpoint)
        assert plan is not None  # It raises if the folder has none.
        return plan

    def _coded(self, settings: dict[str, int], *, calibrated: bool = True) -> CompressionPlan:
        basis = stored_basis(self.checkpoint) if calibrated else None
        return coded_plan(self.checkpoint, basis, settings)

    def _uncalibrated(
        self, method: str, settings: dict[str, int], *, near: dict[str, int] = NEAR
    ) -> CompressionPlan:
        config, H = self.checkpoint.config, self.checkpoint.config.head_dim
        plan = CompressionPlan.uniform(config, qk=H, v=H, **near)
        chosen = methods.settings_from_json(method, settings)
        return replace(plan, rotated=False, method=method, settings=chosen)

    def _shifted(
        self, method: str, settings: dict[str, int], *, near: dict[str, int] = _NONE
    ) -> CompressionPlan:
        shifted = coded_plan(self.checkpoint, None, {}).layers
        plan = self._uncalibrated(method, settings, near=near)
        return plan.with_shift([ranks.shift for ranks in shifted])

    def _at_bytes(self, method: str, other: CompressionPlan) -> CompressionPlan:
        """Return the largest plan of an evicting method within the bytes of another plan."""
        entry = next(entry for entry in FIRST if entry.name == method)
        share = share_held(other, self.context, self.dtype)
        return entry.at_budget(self.checkpoint.config, self.context, share, self.dtype)

    def _without_shift(self, settings: dict[str, int]) -> tuple[CompressionPlan, Basis]:
        """Return a plan on the basis that calibration makes for whole keys."""
        plan = replace(self._coded(settings).with_shift(()), basis="")
        return plan, self._make_basis(shift=False)

    def _oscar(self, *, shift: bool) -> tuple[CompressionPlan, Basis]:
        """Return the plan of the paper on a basis of its kind."""
        config, H = self.checkpoint.config, self.checkpoint.config.head_dim
        basis = self._make_basis(shift=shift, qk="oscar", vo="oscar")
        plan = CompressionPlan.uniform(config, qk=H, v=H, **NEAR_OSCAR)
        settings = methods.settings_from_json("oscar", {})
        return replace(plan, method="oscar", settings=settings).with_shift(basis.shifted), basis

    def _make_basis(self, *, shift: bool, **kinds: Any) -> Basis:
        """Make a basis from the stored moments, with shifted keys where that pays or nowhere."""
        checkpoint, layers = self.checkpoint, self.checkpoint.config.layers
        moments = Moments.load(checkpoint.calibration_path / "moments")
        outputs = [np.asarray(checkpoint.layer(i)["attention"]["o"], np.float64) for i in range(len(layers))]
        shiftable = [shift and layer.window is None for layer in layers]
        return make_basis(moments, outputs, shiftable=shiftable, **kinds)


def main(options: Options) -> None:
    """Measure the plans that the file lacks, and write it after each."""
    checkpoint = Checkpoint.open(options.model)
    full = CompressionPlan.full(checkpoint.config)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {"rows": []}
    (material,) = prepare(
        checkpoint.config,
        checkpoint.tokenizer(),
        full,
        read_documents(options.texts),
        tasks=options.tasks,
        contexts=(options.context,),
        max_documents=options.documents,
        seed=options.seed,
    )
    dense = load(options.model, dtype=options.dtype).network
    evaluation = Evaluation(
        dense,
        material,
        protocol="cached",
        batch=options.batch,
        first_check=options.documents,
        watch=partial(print, flush=True),  # If time ends within a plan, the log has the tasks before.
    )
    makers = Plans(checkpoint, options.context, options.dtype).list()
    for name in options.plans or makers:
        wanted = options.model.name, name, options.context
        if any((row["model"], row["plan"], row["context"]) == wanted for row in stored["rows"]):
            continue
        began = time.monotonic()
        plan, basis = makers[name]()
        network = load(options.model, plan, basis=basis, dtype=options.dtype).network
        report = evaluation.evaluate(network)
        share = plan.bytes(options.context) / full.bytes(options.context)
        row = {"model": options.model.name, "method": plan.method, "plan": name} | describe(report)
        own = {"bytes": share, "seconds": time.monotonic() - began, "commit": commit()}
        stored["rows"].append(row | own | {"device": environment()["device"]})
        with whole_file(path) as file:
            file.write_text(json.dumps(stored, indent=1) + "\n")


def describe(report: ContextReport) -> dict[str, Any]:
    """Return the columns of a report: perplexity, divergence, tasks and long texts, as far as measured."""
    row: dict[str, Any] = {"protocol": "cached", "context": report.context}
    if (perplexity := report.perplexity) is not None:
        row |= {
            "windows": perplexity.windows,
            "increase": perplexity.increase,
            "interval": perplexity.interval,
            "kl": perplexity.kl,
            "top1": perplexity.top1,
        }
    tasks: dict[str, Any] = {
        name: {
            "score": task.score,
            "dense": task.dense,
            "retention": task.retention,
            "interval": task.interval,
            "documents": task.documents,
            "counts": task.counts,
        }
        for name, task in report.tasks.items()
    }
    tasks |= {name: asdict(score) for name, score in report.ruler.items()}
    if report.long_agreement is not None:
        row["long_agreement"] = asdict(report.long_agreement)
    return row | {"tasks": tasks}


if __name__ == "__main__":
    main(tyro.cli(Options))
