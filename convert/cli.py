"""The `zdc` command."""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tyro.conf import Positional

from convert.calibrate import CalibrationOptions, calibrate, calibration_windows
from convert.conversion import convert, verify_against_transformers
from convert.demo import demo
from convert.plots import write_front
from convert.search import Mode, Objective, Search, SearchOptions, describe
from convert.trials import Trial, TrialBook
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import MeshError, PlanError, PromptError, TextError, ZDCError
from zdc_jax.evaluate import compare, window_nll
from zdc_jax.generate.api import generate, stream
from zdc_jax.generate.sampling import Sampling
from zdc_jax.loading import load, predicted_plan, stored_basis
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.processes import initialize
from zdc_jax.plan import CompressionPlan

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass
class Convert:
    """Convert a Hugging Face folder (Llama or OPT, safetensors) without torch."""

    source: Positional[Path]
    """Folder with config.json, *.safetensors and a tokenizer."""
    output: Positional[Path]
    """Folder to write; it appears only when complete."""
    dtype: Dtype | None = None
    """Dtype to store; default that of the source."""
    overwrite: bool = False
    """Replace an existing output."""
    verify: bool = False
    """Compare logits with transformers afterwards (needs torch)."""
    calibrate: tuple[Path, ...] = ()
    """Text files or folders to calibrate on right after converting."""

    def run(self, console: Console) -> None:
        checkpoint = convert(self.source, self.output, dtype=self.dtype, overwrite=self.overwrite)
        console.out(f"converted {self.source} -> {self.output} ({checkpoint.fingerprint})")
        if self.verify:
            with jax.default_matmul_precision("highest"):
                network = load(self.output, dtype="float32").network
                logits = lambda tokens: np.asarray(network(tokens))
                error = verify_against_transformers(
                    self.source, logits, vocab_size=checkpoint.config.vocab_size
                )
            console.print(f"largest difference of logits from transformers: {error:.2e} of the largest logit")
        if self.calibrate:
            _report_basis(console, calibrate(self.output, self.calibrate))


@dataclass
class Calibrate:
    """Calibrate a converted folder on text: moments, basis, spectrum, error certificate."""

    path: Positional[Path]
    """Converted folder."""
    texts: Positional[tuple[Path, ...]] = ()
    """.txt, .jsonl, .md, .rst, .py files (also .xz, .gz) or folders of them; topics are folder names. None: a
    new basis from the moments of an earlier calibration."""
    options: Annotated[CalibrationOptions, tyro.conf.arg(name="")] = field(default_factory=CalibrationOptions)
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""

    def run(self, console: Console) -> None:
        _report_basis(console, calibrate(self.path, self.texts, self.options, dtype=self.dtype))


@dataclass(kw_only=True)
class PlanFlags:
    """A plan: from a file, uniform ranks, or per-layer ranks for a budget."""

    plan: Path | None = None
    """Plan JSON."""
    qk: int | None = None
    """Uniform coordinates kept of Q and K; default all."""
    v: int | None = None
    """Uniform coordinates kept of V and O; default all."""
    budget: float | None = None
    """Share of the KV coordinates to keep outside the window; ranks per layer from the spectrum."""
    max_score_error: float | None = None
    """Limit on the calibrated relative error of scores and values; ranks per layer from the certificate."""
    window: int = 0
    """Recent tokens kept at full rank."""
    sinks: int = 0
    """First tokens kept at full rank."""

    def build(self, path: Path) -> CompressionPlan | None:
        """The plan these flags describe for the folder at `path`; None without any flag."""
        uniform = self.qk is not None or self.v is not None
        limited = self.max_score_error is not None
        if sum([self.plan is not None, uniform, self.budget is not None, limited]) > 1:
            raise PlanError("give one of --plan, --qk/--v, --budget, --max-score-error")
        if self.plan is not None:
            if self.window or self.sinks:
                raise PlanError("--plan already says window and sinks; drop --window and --sinks")
            return CompressionPlan.load(self.plan)
        checkpoint = Checkpoint.open(path)
        if self.max_score_error is not None:
            return CompressionPlan.from_error(
                stored_basis(checkpoint),
                max_score_error=self.max_score_error,
                window=self.window,
                sinks=self.sinks,
            )
        if self.budget is not None:
            basis = stored_basis(checkpoint)
            return CompressionPlan.from_spectrum(
                basis.qk_spectrum,
                basis.vo_spectrum,
                budget=self.budget,
                fingerprint=checkpoint.fingerprint,
                window=self.window,
                sinks=self.sinks,
            )
        if not uniform and not self.window and not self.sinks:
            return None
        H = checkpoint.config.head_dim
        return CompressionPlan.uniform(
            checkpoint.config,
            qk=H if self.qk is None else self.qk,
            v=H if self.v is None else self.v,
            window=self.window,
            sinks=self.sinks,
        ).for_model(checkpoint.fingerprint)


@dataclass(kw_only=True)
class SearchFlags:
    """A plan by search: the fewest bytes, or the least time, within a limit on perplexity."""

    max_degradation: float | None = None
    """Limit on the relative increase of perplexity (0.02: 2 %)."""
    texts: tuple[Path, ...] = ()
    """Text to search on with the flags below, as for calibrate. None: a plan predicted, without search."""
    mode: Mode = "window"
    """What plans may do: recent tokens at full rank and ranks per layer; one pair of ranks for all; two token
    classes, without and with a window."""
    objective: Objective = "bytes"
    """What is to be least: bytes of the KV cache, or time of attention as predicted for one H200."""
    constrained: bool = True
    """Whether token classes keep to the paper's Eq. 6: more important tokens in deeper layers, fewer
    coordinates for the rest, and no more of Q/K than of V."""
    trials: int = 400
    """Most plans to measure."""
    windows: int = 12
    """Windows of text, drawn round robin over topics."""
    context: int | None = None
    """Tokens a window; default the model's positions, at most 4096."""
    seed: int = 1
    """Chooses the windows; another than calibration's."""
    batch: int = 1
    """Windows at a time."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""

    def search(self, path: Path, output: Path, console: Console) -> CompressionPlan:
        """Searches, showing the best so far; a journal beside `output` lets a broken-off search go on.

        Without texts the plan is predicted.
        """
        assert self.max_degradation is not None
        options = SearchOptions(
            self.max_degradation, self.mode, self.trials, self.objective, self.constrained
        )
        checkpoint = Checkpoint.open(path)
        if not self.texts:
            basis = stored_basis(checkpoint)
            return predicted_plan(checkpoint, basis, max_degradation=options.max_degradation)
        windows, _ = text_windows(
            checkpoint, self.texts, self.windows, self.context, batch=self.batch, seed=self.seed
        )
        with Progress(
            TextColumn("{task.completed} plans"), TimeElapsedColumn(), TextColumn("{task.description}"),
            console=console,
        ) as progress:  # fmt: skip
            task = progress.add_task("the unmodified model", total=None)
            book = TrialBook(
                path,
                windows,
                dtype=self.dtype,
                batch=self.batch,
                journal=output.with_suffix(".journal.jsonl"),
            )

            def watch(_: Trial, best: Trial | None) -> None:
                best_yet = (
                    "none" if best is None else f"{best.bytes_share:.1%} of KV bytes at {best.increase:+.2%}"
                )
                progress.update(task, advance=1, description=f"best within the limit: {best_yet}")

            best = Search(book, options, watch).run()
        console.print(describe(book.config, best), soft_wrap=True, highlight=False)
        write_front(book, best, options, output.with_suffix(".front.json"))
        return best.plan


@dataclass
class Plan:
    """Write a plan's JSON and print it: as described by flags, or searched for within a limit."""

    path: Positional[Path]
    """Converted and calibrated folder."""
    output: Positional[Path]
    """JSON file to write."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    search: Annotated[SearchFlags, tyro.conf.arg(name="")] = field(default_factory=SearchFlags)

    def run(self, console: Console) -> None:
        checkpoint = Checkpoint.open(self.path)
        if self.search.max_degradation is None:
            plan = self.flags.build(self.path)
        elif self.flags == PlanFlags():
            plan = self.search.search(self.path, self.output, console).for_model(checkpoint.fingerprint)
        else:
            raise PlanError("--max-degradation searches; drop --plan, --qk, --v, --budget, --window, --sinks")
        if plan is None:
            raise PlanError(
                "say what to keep: --qk/--v, --budget, --window, --max-score-error, --max-degradation"
            )
        plan.check_model(checkpoint.config, checkpoint.fingerprint)
        plan.save(self.output)
        console.print_json(self.output.read_text())
        if (checkpoint.calibration_path / "basis").exists():
            print(f"far pairs: {plan.certificate(stored_basis(checkpoint))}", file=sys.stderr)


@dataclass
class ProcessFlags:
    """This process as one of several that share a mesh."""

    distributed: bool = False
    """Join the other processes of this Slurm, Open MPI or Kubernetes job, on one mesh."""
    coordinator: str | None = None
    """HOST:PORT of process 0, to join others without detection."""
    num_processes: int | None = None
    """How many there are."""
    process_id: int | None = None
    """Which this is, from 0."""
    join_timeout: float = 300.0
    """Seconds to wait for the others."""

    def join(self, mesh: str | None) -> None:
        """Meets the other processes, if these flags ask for it."""
        given = (self.coordinator, self.num_processes, self.process_id)
        if not self.distributed and given == (None, None, None):
            return
        if mesh is None:
            raise MeshError("several processes share a mesh; give --mesh with all their devices")
        initialize(*given, timeout=self.join_timeout)


@dataclass
class Generate:
    """Continue prompts."""

    path: Positional[Path]
    """Converted folder."""
    prompts: Positional[tuple[str, ...]]
    """Texts to continue; `-` reads one from standard input."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    max_new_tokens: int = 64
    """Most tokens to add to each prompt."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Choose among this many most likely tokens."""
    top_p: float | None = None
    """Choose among the fewest most likely tokens of this much probability."""
    seed: int = 0
    """Seed of the choice."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stream: bool = False
    """Print text as it comes (one prompt only)."""
    mesh: str | None = None
    """Devices to use, such as data=1,sequence=4,model=2; default one."""
    payload: Payload = "native"
    """What they exchange of a prompt; float8 takes half the bytes and rounds."""
    processes: Annotated[ProcessFlags, tyro.conf.arg(name="")] = field(default_factory=ProcessFlags)
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""

    def run(self, console: Console) -> None:
        prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in self.prompts]
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        if self.stream and len(prompts) != 1:
            raise PromptError(f"--stream takes one prompt, got {len(prompts)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh)
        self.processes.join(self.mesh)
        is_first = jax.process_index() == 0  # Others compute the same and say nothing.
        plan = self.flags.build(self.path)
        model = load(self.path, plan, dtype=self.dtype, mesh=mesh, payload=self.payload)
        arguments: dict[str, Any] = {"sampling": sampling, "stop": self.stop}
        if self.stream:
            for delta in stream(model, prompts, self.max_new_tokens, **arguments):
                print(delta.text if is_first else "", end="", flush=True)
            print(end="\n" if is_first else "")
            return
        result = generate(model, prompts, self.max_new_tokens, **arguments)
        if not is_first:
            return
        for prompt, completion in zip(prompts, result.completions, strict=True):
            console.out(prompt, style="dim", end="", highlight=False)
            print(completion.text)
        tokens = sum(len(completion.tokens) - 1 for completion in result.completions)
        console.print(
            f"[dim]KV cache {result.kv_bytes:,} bytes for {len(prompts)} x {result.capacity} tokens; "
            f"prefill {result.timings.prefill:.2f} s, decode {result.timings.decode:.2f} s for {tokens} "
            f"tokens, {result.timings.compile:.2f} s of both compiling[/dim]",
            soft_wrap=True,
        )


@dataclass
class Perplexity:
    """Perplexity of a plan beside the unmodified model's, on the same windows of text."""

    path: Positional[Path]
    """Converted folder."""
    texts: Positional[tuple[Path, ...]]
    """Text files or folders, as for calibrate; take text that calibration did not see."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    windows: int = 24
    """Windows drawn round robin over topics."""
    context: int | None = None
    """Tokens a window; default the model's positions, at most 4096."""
    seed: int = 0
    """Chooses the windows."""
    batch: int = 1
    """Windows at a time."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""
    output: Path | None = None
    """JSON file to write the printed report to."""

    def run(self, console: Console) -> None:
        checkpoint = Checkpoint.open(self.path)
        plan = self.flags.build(self.path)
        windows, topics = text_windows(
            checkpoint, self.texts, self.windows, self.context, batch=self.batch, seed=self.seed
        )
        dense = load(self.path, dtype=self.dtype)
        dense_nll = window_nll(dense.network, windows, batch=self.batch)
        model = dense if plan is None else load(self.path, plan, dtype=self.dtype)
        report = compare(model.network, dense_nll, windows, batch=self.batch).to_json() | {
            "texts": [str(path) for path in self.texts],
            "topics": sorted(set(topics)),
            "seed": self.seed,
        }
        text = json.dumps(report, indent=2)
        console.print_json(text)
        if self.output is not None:
            self.output.write_text(text + "\n")


@dataclass
class Inspect:
    """Print what a converted folder holds; --check recomputes its hashes."""

    path: Positional[Path]
    """Converted folder."""
    check: bool = False
    """Recompute the hashes of its files."""

    def run(self, console: Console) -> None:
        checkpoint = Checkpoint.open(self.path)
        if self.check:
            checkpoint.check()
            console.print("all hashes match")
        console.print_json(data=checkpoint.config.to_json() | {"fingerprint": checkpoint.fingerprint})
        if (checkpoint.calibration_path / "basis").exists():
            _report_basis(console, stored_basis(checkpoint))


@dataclass
class Demo:
    """Convert, calibrate and generate with the checkpoint that ships with the package."""

    output: Path = Path("demo-output")
    """Folder for the converted model and the report."""

    def run(self, console: Console) -> None:
        demo(self.output, console)


COMMANDS: dict[str, Callable[..., Any]] = {
    "convert": Convert,
    "calibrate": Calibrate,
    "plan": Plan,
    "generate": Generate,
    "perplexity": Perplexity,
    "inspect": Inspect,
    "demo": Demo,
}


def text_windows(
    checkpoint: Checkpoint, texts: Sequence[Path], count: int, context: int | None, *, batch: int, seed: int
) -> tuple[np.ndarray, list[str]]:
    """`count` windows of text [W, T] and their topics."""
    if count < 1:
        raise TextError(f"windows={count} must be >= 1")
    options = CalibrationOptions(context=context, batch=batch, seed=seed)
    length = options.window_length(checkpoint.config)
    return calibration_windows(checkpoint, texts, length, replace(options, tokens=count * length))


def _report_basis(console: Console, basis: Basis) -> None:
    """Prints the certificate: relative error of scores and outputs at each eighth of the coordinates."""
    H = basis.k_map.shape[-1]
    table = Table(title=f"basis: QK {basis.qk_kind}, VO {basis.vo_kind}, {basis.num_tokens:,} tokens")
    for column in ("kept", "score error, mean", "worst head", "value error, mean", "worst head"):
        table.add_column(column, justify="right")
    for kept in range(H // 4, H + 1, H // 4):
        scores, values = basis.qk_error[..., kept], basis.vo_error[..., kept]
        table.add_row(
            str(kept), *(f"{x:.3f}" for x in (scores.mean(), scores.max(), values.mean(), values.max()))
        )
    console.print(table)
    worst = max(float(basis.qk_condition.max()), float(basis.vo_condition.max()))
    console.print(f"worst condition number of a head's basis: {worst:.3g}")


def main(arguments: list[str] | None = None) -> int:
    """Runs `zdc`; exit status 2 with one line on standard error for any error the user can mend."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="zdc", args=arguments).run(Console())
        except (ZDCError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def main_convert() -> int:
    """Runs `zdc convert` under its alias `zdc-convert`."""
    return main(["convert", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
