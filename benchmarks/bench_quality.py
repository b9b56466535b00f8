"""What does compression cost in perplexity? Bases × ranks × windows on one model, on held-out text.

    python -m benchmarks.bench_quality --model HF_FOLDER --corpus CORPUS --name quality-NAME

`CORPUS/<topic>/{train,heldout}.txt.xz`: calibration reads train, perplexity reads heldout. Every plan is a
model of physically smaller arrays. The rotated model at full rank shows the noise floor.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from convert.calibration.calibrate import collect_moments
from convert.calibration.make_basis import make_basis
from convert.calibration.moments import Moments
from convert.conversion import convert
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import MANIFEST, Checkpoint
from zdc_jax.evaluation.perplexity import compare, token_nll, window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.loading import LanguageModel, load
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.spectrum import plan_from_spectrum

SINKS = 4
CONTEXT = 4096
TOPICS_LEFT_OUT = ("tinystories",)
"""Too short for one window."""
CHOICE_WINDOWS = 8
"""Calibration windows on which layers to cut off are chosen, with a window of `CHOICE_WINDOW` tokens."""
CHOICE_WINDOW = 256
TOKENS_STUDY = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Options:
    """`tokens` are for calibration, `windows` of `context` tokens of held-out text for perplexity.

    model: a folder of Hugging Face's or a converted one. dtype: None as stored.
    """

    model: Path
    corpus: Path
    name: str
    windows: int = 24
    context: int = CONTEXT
    tokens: int = 1_000_000
    seed: int = 0
    batch: int = 4
    dtype: str | None = None
    results: Path = RESULTS


@dataclass(frozen=True)
class Case:
    """One row: which basis, which plan."""

    group: str
    label: str
    basis: str
    plan: CompressionPlan
    extra: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The converted model, its text and its moments."""

    def __init__(self, options: Options, folder: Path):
        self.options = options
        if (options.model / MANIFEST).exists():
            folder = options.model
        else:
            convert(options.model, folder := folder / "converted", progress=False)
        self.checkpoint = Checkpoint.open(folder)
        self.config = self.checkpoint.config
        self.layers = [self.checkpoint.layer(i) for i in range(self.config.num_layers)]
        self.dense = load(folder, dtype=options.dtype)
        self.train, self.train_topics = self.windows("train", options.tokens // CONTEXT)
        self.heldout, self.topics = self.windows("heldout", options.windows, options.context)
        self.moments = self.collect(self.train)
        self.bases: dict[str, Basis] = {}

    @cached_property
    def dense_token_nll(self) -> np.ndarray:
        """Of the unmodified model on the held-out windows."""
        return token_nll(self.dense.network, self.heldout, batch=self.options.batch)

    @property
    def dense_nll(self) -> np.ndarray:
        """Its mean of each window, float64."""
        return self.dense_token_nll.mean(1, dtype=np.float64)

    def windows(self, split: str, count: int, length: int = CONTEXT) -> tuple[np.ndarray, list[str]]:
        files = sorted(
            path
            for path in self.options.corpus.glob(f"*/{split}.txt.xz")
            if path.parent.name not in TOPICS_LEFT_OUT
        )
        return token_windows(
            read_documents(files),
            self.checkpoint.tokenizer(),
            length=length,
            num_windows=count,
            seed=self.options.seed,
            eos_id=self.config.eos_ids[0],
        )

    def collect(self, windows: np.ndarray) -> Moments:
        return collect_moments(
            self.dense.network,
            windows,
            fingerprint=self.checkpoint.fingerprint,
            batch=self.options.batch,
        )

    def make_basis(self, moments: Moments, **kinds: Any) -> Basis:
        weights = [np.asarray(layer["attention"]["o"], np.float64) for layer in self.layers]
        return make_basis(moments, weights, **kinds)

    def model(self, plan: CompressionPlan, basis: Basis) -> LanguageModel:
        dtype = self.dense.network.dtype
        layers = prepared_layers(iter(self.layers), self.config, plan, basis, dtype)
        embeddings = cast(self.checkpoint.embeddings(), dtype)
        network = Transformer(self.config, plan, embeddings, layers)
        return LanguageModel(network, None, basis)

    def training_nll(self, plan: CompressionPlan) -> float:
        """Mean negative log likelihood on a few calibration windows."""
        network = self.model(plan, self.bases["balanced"]).network
        return window_nll(network, self.train[:CHOICE_WINDOWS], batch=self.options.batch).mean()

    def layers_by_far_cost(self) -> list[int]:
        """Layers by what cutting off their far attention alone costs on calibration text, cheapest first."""
        H = self.config.head_dim
        costs = []
        for layer in range(self.config.num_layers):
            ranks = [LayerRanks(H, H)] * self.config.num_layers
            ranks[layer] = LayerRanks(0, 0)
            plan = replace(
                CompressionPlan.full(self.config), layers=tuple(ranks), window=CHOICE_WINDOW, sinks=SINKS
            )
            costs.append(self.training_nll(plan))
        return np.argsort(costs).tolist()

    def run(self, case: Case, model: LanguageModel | None = None) -> dict[str, Any]:
        """One row; `model` stands in for the one that the case describes."""
        began = time.perf_counter()
        model = model or self.model(case.plan, self.bases[case.basis])
        report = compare(model.network, self.dense_token_nll, self.heldout, batch=self.options.batch)
        mean_qk, mean_v = case.plan.mean_ranks
        row = {
            "group": case.group,
            "label": case.label,
            "basis": case.basis,
            "window": case.plan.window,
            "mean_qk": mean_qk,
            "mean_v": mean_v,
            "ranks": [[r.qk, r.v] for r in case.plan.layers],
            "bytes_share": report.kv_bytes / report.dense_kv_bytes,
            "seconds_with_compile": time.perf_counter() - began,
            **report.to_json(),
            **case.extra,
        }
        print(f"{case.group:10} {case.label:34} {case.basis:10} {row['bytes_share']:.3f} "
              f"{100 * row['increase']:+.2f} %", flush=True)  # fmt: skip
        return row


def cases(bench: Bench) -> Iterator[Case]:
    """The rows, in the order of the report."""
    config, H = bench.config, bench.config.head_dim

    def uniform(**kw):
        return CompressionPlan.uniform(config, **kw)

    balanced = bench.bases["balanced"]

    def spread(qk: float, v: float, **options: Any) -> CompressionPlan:
        share = {"budget": (qk + v) / (2 * H), "qk_share": qk / (qk + v)}
        return plan_from_spectrum(balanced, **share, **options)

    for basis in bench.bases:
        yield Case("floor", "full rank, rotated", basis, CompressionPlan.full(config))
        for rank in (48, 32, 16):
            if basis != "output":
                yield Case("QK only", f"R={rank}", basis, uniform(qk=rank, v=H))
            if basis in ("stacked", "balanced", "output"):
                yield Case("VO only", f"Z={rank}", basis, uniform(qk=H, v=rank))
    for qk, v in ((32, 48), (16, 32)):
        yield Case("uniform", f"R={qk} Z={v}", "balanced", uniform(qk=qk, v=v))
        yield Case("per layer", f"mean R={qk} Z={v}", "balanced", spread(qk, v))
        for window in (128, 512):
            near = {"window": window, "sinks": SINKS}
            plan = uniform(qk=qk, v=v, **near)
            yield Case("window", f"W={window} R={qk} Z={v}", "balanced", plan)
    order = bench.layers_by_far_cost()
    L = config.num_layers

    def cut_plan(qk: float, v: float, cut: int, window: int) -> CompressionPlan:
        far = [layer not in order[:cut] for layer in range(L)]
        return spread(qk, v, far=far, window=window, sinks=SINKS)

    means = ((16, 24), (12, 16), (8, 12), (4, 8))
    choices = {}
    for qk, v in means:
        # 16 is the least a layer can keep, so small means need layers without far attention.
        possible = [cut for cut in range(0, L, L // 4) if 16 * (L - cut) <= min(qk, v) * L]
        choices[qk, v] = min(
            possible, key=lambda cut: bench.training_nll(cut_plan(qk, v, cut, CHOICE_WINDOW))
        )
    for window in (128, 256, 512):
        near = {"window": window, "sinks": SINKS}
        yield Case("window", f"W={window} R=16 Z=16", "balanced", uniform(qk=16, v=16, **near))
        for qk, v in means:
            cut = choices[qk, v]
            plan = cut_plan(qk, v, cut, window)
            label = f"W={window} mean R={qk} Z={v}"
            yield Case("window+per layer", label, "balanced", plan, {"layers_cut_off": order[:cut]})


def tokens_study(bench: Bench) -> list[dict[str, Any]]:
    """How many tokens the basis needs: certificate on all moments, and perplexity, of bases from fewer."""
    rows = []
    for tokens in TOKENS_STUDY:
        few = bench.train[: max(1, tokens // CONTEXT)]
        basis = bench.make_basis(bench.collect(few), qk="balanced", vo="balanced")
        name = f"tokens-{tokens}"
        bench.bases[name] = basis
        certified = certificate_on(bench.moments, basis)
        plan = CompressionPlan.uniform(bench.config, qk=32, v=48)
        row = bench.run(Case("tokens", f"{few.size} tokens, R=32 Z=48", name, plan))
        rows.append(row | {"tokens": int(few.size), "score_error_at_32_on_all": certified})
    return rows


def certificate_on(moments: Moments, basis: Basis) -> float:
    """Mean over heads of the relative score error at R=32 of `basis`, under these moments."""
    error = np.eye(basis.k_map.shape[-1]) - basis.q_map[..., :32] @ basis.k_map[..., :32].swapaxes(-1, -2)
    # Score error of a pair is q E kᵀ, so its mean square is tr(Eᵀ C_Q E C_K).
    lost = np.trace(error.swapaxes(-1, -2) @ moments.q @ error @ moments.k, axis1=-2, axis2=-1)
    whole = np.trace(moments.q @ moments.k, axis1=-2, axis2=-1)
    return float(np.sqrt(np.maximum(lost / whole, 0)).mean())


def main(options: Options) -> None:
    """Runs all rows and writes one JSON; float32 means exact float32 products."""
    if options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        print(f"dense perplexity {np.exp(bench.dense_nll.mean()):.3f} on {jax.devices()[0].device_kind}")
        kinds: dict[str, dict[str, Any]] = {
            "balanced": {"qk": "balanced", "vo": "balanced"},
            "stacked": {"qk": "stacked", "vo": "stacked"},
            "output": {"qk": "balanced", "vo": "output"},
            "centred": {"qk": "balanced", "vo": "balanced", "center": True},
        }
        if bench.config.is_rotary:
            kinds["pairs"] = {"qk": "pairs", "vo": "balanced"}
        for name, kind in kinds.items():
            bench.bases[name] = bench.make_basis(bench.moments, **kind)
        rows = [bench.run(case) for case in cases(bench)] + tokens_study(bench)
        config = {k: str(v) for k, v in asdict(options).items() if k != "results"} | {
            "model": options.model.name,
            "corpus": options.corpus.name,
            "heldout_topics": bench.topics,
            "calibration_tokens": int(bench.train.size),
            "dtype": str(bench.dense.network.dtype),
            "seconds": time.perf_counter() - began,
        }
        print(write_result(options.name, config, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
