"""Fit of the plan predictor, and its test on models left out of the fit.

Four commands of `python -m benchmarks.studies.bench_predictor`, in this order:

    train --corpus CORPUS --tokenizer FOLDER --output FOLDER
    observe --model HF_FOLDER --corpus CORPUS --name NAME
    fit
    evaluate --model HF_FOLDER --corpus CORPUS --name NAME

`train` trains the small models of `SHAPES`. `observe` searches plans of one model at several limits on
training text. It writes all measurements, with the features of the model, to
`results/observations/NAME.json`. `fit` learns from all observations and writes the predictor that ships.
`evaluate` leaves one model out and learns from the others. It measures these plans on held-out text:

`oracle`: the smallest plan that the search found within the limit.
`predicted`: the predicted plan, unchecked, with the margin of the predictor.
`predicted, checked`: the same, checked on 16 training windows; `as searched` on the 12 windows of the search.
`look-up`: the plan of the model nearest in depth, of its kind, at the same limit.
`constant`: the plan of that model at the middle limit.

Plans of other models are stretched by relative depth and by share of the head dimension.
"""

import math
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, write_result
from benchmarks.studies.fit_predictor import Observations, fit
from convert.calibration.calibrate import collect_moments, measured_profile
from convert.calibration.make_basis import make_basis
from convert.conversion import convert
from convert.search.search import Search, SearchOptions
from convert.search.trials import TrialBook, trial_json
from zdc_jax.checkpoint import MANIFEST, Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import load
from zdc_jax.plan import CompressionPlan, LayerRanks, allowed_ranks
from zdc_jax.planning.checked import checked_plan
from zdc_jax.planning.predictor import Predictor
from zdc_jax.planning.profile import SINKS

OBSERVATIONS = RESULTS / "observations"
STORED = Path(__file__).parents[2] / "zdc_jax" / "planning" / "predictor.json"
SEARCHED = (0.01, 0.02, 0.05, 0.005, 0.1)
LIMITS = (0.01, 0.02, 0.05)
SEARCH_WINDOWS, CHECK_WINDOWS = 12, 16
CONTEXT = 4096
TOPICS_LEFT_OUT = ("tinystories",)
"""Topics whose documents are too short for one window."""
LEARNING_RATE, WARMUP = 1e-3, 100
STEPS = {"llama": 1200, "opt": 2500}
"""Training steps by family. Learned positions of OPT take longer than rotary embeddings."""


@dataclass(frozen=True)
class Shape:
    """Shape of a small model to train."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int


SHAPES = {
    "llama-64": Shape("llama", 8, 4, 4, 64, 256, 704),
    "llama-gqa-32": Shape("llama", 12, 8, 2, 32, 256, 512),
    "llama-mqa-128": Shape("llama", 6, 4, 1, 128, 256, 704),
    "llama-gqa-64": Shape("llama", 10, 4, 2, 64, 256, 512),
    "opt-64": Shape("opt", 8, 4, 4, 64, 256, 1024),
    "opt-32": Shape("opt", 12, 8, 8, 32, 256, 768),
}


@dataclass(frozen=True)
class Train:
    """Train the small models on one GPU, a minute or two each; needs torch and transformers.

    Attributes:
      corpus: text, `CORPUS/<topic>/train.txt.xz`.
      tokenizer: folder with `tokenizer.json`.
      output: folder for the models, one Hugging Face folder each.
      names: models of `SHAPES` to train.
      batch: windows of 4,096 tokens a step.
    """

    corpus: Path
    tokenizer: Path
    output: Path
    names: tuple[str, ...] = tuple(SHAPES)
    batch: int = 16
    seed: int = 0

    def main(self) -> None:
        """Train the models one after another."""
        import tokenizers
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
        tokenizer = tokenizers.Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        windows = packed_windows(self.corpus, tokenizer, eos=2)
        print(f"{windows.size:,} tokens")
        for name in self.names:
            model = train(name, windows, tokenizer.get_vocab_size(), self.batch, self.seed)
            model.save_pretrained(self.output / name)
            for file in self.tokenizer.glob("tokenizer*.json"):
                shutil.copy(file, self.output / name)


def packed_windows(corpus: Path, tokenizer: Any, eos: int) -> np.ndarray:
    """Return all training text as windows [W, 4096], whole documents with `eos` after each."""
    texts = [document.text for document in read_documents(sorted(corpus.glob("*/train.txt.xz")))]
    order = np.random.default_rng(0).permutation(len(texts))
    encoded = tokenizer.encode_batch_fast([texts[i] for i in order], add_special_tokens=False)
    stream = np.concatenate([np.array([*document.ids, eos], np.int32) for document in encoded])
    return stream[: len(stream) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)


def make_model(shape: Shape, vocabulary: int) -> Any:
    """Return a transformers model of this shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    shared = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if shape.family == "llama":
        extra = {
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.ffn,
        }
        return LlamaForCausalLM(LlamaConfig(**shared, **extra))
    assert shape.heads == shape.kv_heads
    assert shape.heads * shape.head_dim == shape.hidden
    config = OPTConfig(**shared, ffn_dim=shape.ffn, word_embed_proj_dim=shape.hidden, dropout=0.0)
    return OPTForCausalLM(config)


def train(name: str, windows: np.ndarray, vocabulary: int, batch_size: int, seed: int) -> Any:
    """Train one model with AdamW on random batches, in bfloat16, with warm-up and a cosine schedule."""
    import torch

    torch.manual_seed(seed)
    shape = SHAPES[name]
    model, steps = make_model(shape, vocabulary).cuda(), STEPS[shape.family]
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def rate(step):
        return min(step / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng, began = np.random.default_rng(seed), time.perf_counter()
    for step in range(steps):
        batch = torch.from_numpy(windows[rng.integers(len(windows), size=batch_size)]).long().cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            took = time.perf_counter() - began
            print(f"{name} step {step + 1} loss {loss.item():.3f} {took:.0f} s", flush=True)
    return model.to(torch.bfloat16)


@dataclass(frozen=True)
class Run:
    """One model and its text.

    Attributes:
      model: a Hugging Face folder or a converted one.
      corpus: text. The `train` split serves calibration, search and checks; `heldout` serves the report.
      windows: held-out windows of 4,096 tokens.
      tokens: calibration tokens.
      dtype: dtype of the model; as stored without one.
    """

    model: Path
    corpus: Path
    name: str
    windows: int = 24
    tokens: int = 1_000_000
    seed: int = 0
    batch: int = 4
    dtype: str | None = None
    results: Path = RESULTS


class Bench:
    """The converted model with its basis, its profile and its text."""

    def __init__(self, run: Run, folder: Path):
        self.run = run
        if (run.model / MANIFEST).exists():
            folder = run.model
        else:
            convert(run.model, folder := folder / "converted", progress=False)
        self.checkpoint = Checkpoint.open(folder)
        self.config = self.checkpoint.config
        training = self.draw("train", run.tokens // CONTEXT)
        self.heldout = self.draw("heldout", run.windows)
        fingerprint = self.checkpoint.fingerprint
        dense = load(folder, dtype=run.dtype).network
        moments = collect_moments(dense, training, fingerprint=fingerprint, batch=run.batch)
        layers = (self.checkpoint.layer(index) for index in range(self.config.num_layers))
        weights = [np.asarray(layer["attention"]["o"], np.float64) for layer in layers]
        self.basis = make_basis(moments, weights, qk="balanced", vo="balanced")
        self.profile = measured_profile(self.checkpoint, self.basis, training, dtype=run.dtype)
        self.searched = self.draw("train", run.tokens // CONTEXT + SEARCH_WINDOWS)

    def draw(self, split: str, count: int) -> np.ndarray:
        """Return windows [count, 4096] of one split of the corpus."""
        files = sorted(
            path
            for path in self.run.corpus.glob(f"*/{split}.txt.xz")
            if path.parent.name not in TOPICS_LEFT_OUT
        )
        return token_windows(
            read_documents(files),
            self.checkpoint.tokenizer(),
            length=CONTEXT,
            num_windows=count,
            seed=self.run.seed,
            eos_id=self.config.eos_ids[0],
        )[0]

    @cached_property
    def checks(self) -> dict[str, TrialBook]:
        """Trials for checked plans: on text that the search did not use, and on the text of the search."""
        other = self.searched[-SEARCH_WINDOWS - CHECK_WINDOWS : -SEARCH_WINDOWS]
        own = self.searched[-SEARCH_WINDOWS:]
        return {"predicted, checked": self.book(other), "predicted, checked as searched": self.book(own)}

    def book(self, windows: np.ndarray) -> TrialBook:
        """Return an empty book of trials on these windows."""
        path, run = self.checkpoint.path, self.run
        return TrialBook(
            path, windows, basis=self.basis, profile=self.profile, dtype=run.dtype, batch=run.batch
        )


@dataclass(frozen=True)
class Observe(Run):
    """Search the plans of one model and write all measurements."""

    def main(self) -> None:
        """Write `observations/NAME.json`."""
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(self, Path(folder))
            book = bench.book(bench.searched[-SEARCH_WINDOWS:])
            for limit in SEARCHED:
                best = Search(book, SearchOptions(limit)).run()
                print(f"{self.name}: limit {limit} {best.bytes_share:.3f} {best.increase:+.4f}", flush=True)
            seen = Observations.from_trials(self.name, bench.config, bench.profile, book.trials)
        (self.results / OBSERVATIONS.name).mkdir(parents=True, exist_ok=True)
        seen.save(self.results / OBSERVATIONS.name / f"{self.name}.json")


@dataclass(frozen=True)
class Fit:
    """Learn from all observations and write the predictor that ships with the package."""

    def main(self) -> None:
        """Write `zdc_jax/planning/predictor.json`."""
        predictor = fit(load_observations())
        STORED.write_text(predictor.to_json())
        print(predictor.to_json())


@dataclass(frozen=True)
class Evaluate(Run):
    """Predict plans of a model left out of the fit and measure them on held-out text."""

    def main(self) -> None:
        """Write `predicted-NAME.json`."""
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(self, Path(folder))
            heldout, rows = bench.book(bench.heldout), []
            others = {each.name: each for each in load_observations()}
            own = others.pop(self.name)
            predictor = fit(list(others.values()))
            for limit in LIMITS:
                plans = {**predicted_plans(bench, predictor, limit), **known_plans(bench, own, others, limit)}
                for kind, plan in plans.items():
                    row = {"kind": kind, "limit": limit, **trial_json(heldout.measure(plan))}
                    shown = f"{row['bytes_share']:.3f} {100 * row['increase']:+7.2f} %"
                    print(f"{self.name} {limit} {kind:20} {shown}", flush=True)
                    rows.append(row)
        settings = {k: str(v) for k, v in asdict(self).items() if k != "results"}
        settings |= {"model": self.model.name, "corpus": self.corpus.name}
        print(write_result(f"predicted-{self.name}", settings, {"rows": rows}, self.results))


def load_observations() -> list[Observations]:
    """Load the observations of every model, ordered by name."""
    return [Observations.load(path) for path in sorted(OBSERVATIONS.glob("*.json"))]


def predicted_plans(bench: Bench, predictor: Predictor, limit: float) -> dict[str, CompressionPlan]:
    """Return the predicted plan, unchecked and checked on each text."""
    config, profile = bench.config, bench.profile
    at: Any = {"context": CONTEXT}
    plans = {"predicted": predictor.plan(config, profile, max_degradation=limit, **at)}
    for kind, book in bench.checks.items():
        began, known = time.perf_counter(), len(book.measurements)

        def measure(plan, book=book):
            return book.measure(plan).increase

        plan = checked_plan(predictor.forecast(config, profile), measure, max_degradation=limit, **at)
        plans[kind] = plan or CompressionPlan.full(config)
        took = time.perf_counter() - began
        print(f"{kind}: {len(book.measurements) - known} more plans in {took:.0f} s", flush=True)
    return plans


def known_plans(
    bench: Bench, own: Observations, others: dict[str, Observations], limit: float
) -> dict[str, CompressionPlan]:
    """Return the best plan of the model's own search, and plans that other models offer."""
    alike = [each for each in others.values() if each.rotary == own.rotary]
    nearest = min(alike, key=lambda each: abs(len(each.far_nats) - len(own.far_nats)))
    return {
        "oracle": best_plan(own, limit, bench.config),
        "look-up": best_plan(nearest, limit, bench.config),
        "constant": best_plan(nearest, sorted(SEARCHED)[len(SEARCHED) // 2], bench.config),
    }


def best_plan(observations: Observations, limit: float, config: ModelConfig) -> CompressionPlan:
    """Return the smallest plan observed within the limit, stretched to the shape of `config`."""
    plans = zip(observations.plans, observations.nats, strict=True)
    within = [
        stretched(*plan, observations.head_dim, config) for plan, nats in plans if nats <= np.log1p(limit)
    ]
    if not within:
        raise PlanError(f"{observations.name} has no plan within {limit:.1%}")
    return min(within, key=lambda plan: plan.bytes(CONTEXT))


def stretched(
    window: int, ranks: tuple[tuple[int, int], ...], head_dim: int, config: ModelConfig
) -> CompressionPlan:
    """Return a plan for another shape: layers by relative depth, ranks by share of the head dimension."""
    L, allowed = config.num_layers, allowed_ranks(config.head_dim)

    def fit_rank(rank):
        return next(r for r in allowed if r >= rank * config.head_dim / head_dim)

    at = [round(i * (len(ranks) - 1) / max(L - 1, 1)) for i in range(L)]
    layers = tuple(LayerRanks(*map(fit_rank, ranks[i])) for i in at)
    return replace(CompressionPlan.full(config), layers=layers, window=window, sinks=SINKS)


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Observe, tyro.conf.subcommand("observe")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
)

if __name__ == "__main__":
    command: Any = tyro.cli(Command, description=__doc__)  # type: ignore[arg-type]
    command.main()
