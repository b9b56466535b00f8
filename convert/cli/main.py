"""The `zdc` command."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from convert.calibration.calibrate import FEW_TOKENS, CalibrationOptions, calibrate
from convert.cli.chat import Chat
from convert.cli.demo import demo
from convert.cli.evaluate import Evaluate
from convert.cli.flags import PlanFlags, SamplingFlags, SearchFlags, at_least_one
from convert.cli.output import check_output
from convert.cli.serve import Serve
from convert.conversion import VERIFIED_SHAPE, check_torch, convert, verify_against_transformers
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import Dtype, ModelConfig
from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens, opening
from zdc_jax.errors import MeshError, PlanError, PromptError, TextError, ZDCError
from zdc_jax.generation.api import generate, stream
from zdc_jax.generation.request import Prompt
from zdc_jax.loading import load, stored_basis
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.processes import initialize
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.certificate import certificate


@dataclass
class Convert:
    """Convert a Hugging Face folder (safetensors) or a GGUF file, without torch."""

    source: Positional[Path]
    """Folder with config.json, *.safetensors and a tokenizer; or a .gguf file (of a split one any part)."""
    output: Positional[Path]
    """Folder to write; it appears only when complete."""
    dtype: Dtype | None = None
    """Dtype to store; default that of the source, or bfloat16 if it is quantised (float32 is exact)."""
    overwrite: bool = False
    """Replace an existing output."""
    verify: bool = False
    """Compare logits with transformers afterwards (needs torch)."""
    calibrate: tuple[Path, ...] = ()
    """Text files or folders to calibrate on right after converting."""

    def run(self, console: Console) -> None:
        if self.verify:
            check_torch()
        checkpoint = convert(self.source, self.output, dtype=self.dtype, overwrite=self.overwrite)
        console.out(f"converted {self.source} -> {self.output} ({checkpoint.fingerprint})")
        if self.verify:
            with jax.default_matmul_precision("highest"):
                # Frequencies of some depend on the context: that of transformers is what it is given.
                positions = min(VERIFIED_SHAPE[1], checkpoint.config.max_positions)
                network = load(self.output, dtype="float32", max_positions=positions).network

                def logits(tokens):
                    return np.asarray(network(tokens))

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
    """.txt, .jsonl, .md, .rst, .py files (also .xz, .gz) or folders of them; topics are folder names."""
    from_moments: bool = False
    """Take no text: make another basis from the moments of an earlier calibration. Without text, the kinds
    that `auto` compares by perplexity are `balanced`, and no profile is left."""
    options: Annotated[CalibrationOptions, tyro.conf.arg(name="")] = field(default_factory=CalibrationOptions)
    overwrite: bool = False
    """Replace an existing basis and its profile; plans that were made with it do not load then."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""

    def run(self, console: Console) -> None:
        if self.from_moments == bool(self.texts):
            raise TextError("give text to calibrate on, or --from-moments and no text")
        basis = calibrate(self.path, self.texts, self.options, overwrite=self.overwrite, dtype=self.dtype)
        _report_basis(console, basis)


@dataclass
class Plan:
    """Write a plan's JSON and print it: as described by flags, or searched for within a limit."""

    path: Positional[Path]
    """Converted and calibrated folder."""
    output: Positional[Path]
    """JSON file to write. Beside PLAN.json a search leaves PLAN.front.json and PLAN.front.png, the best of
    all plans measured, and PLAN.journal.jsonl, from which it goes on when run again."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    search: Annotated[SearchFlags, tyro.conf.arg(name="")] = field(default_factory=SearchFlags)

    def run(self, console: Console) -> None:
        self.search.check(self.flags)
        check_output(self.output)
        checkpoint = Checkpoint.open(self.path)
        plan: CompressionPlan | None
        if not self.search.asked:
            plan = self.flags.build(self.path)
        else:
            plan = self.search.search(self.path, self.output, console, self.flags.method)
        if plan is None:
            raise PlanError(
                "say what to keep: --qk/--v, --budget, --window, --max-score-error; or search: --texts"
            )
        plan.check_model(checkpoint.config, checkpoint.fingerprint)
        if plan.basis:
            plan.check_basis(stored_basis(checkpoint).coordinates_hash)
        plan.save(self.output)
        console.print_json(self.output.read_text())
        _report_savings(plan, checkpoint)


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
    prompts: Annotated[Positional[tuple[str, ...]], at_least_one("PROMPT")]
    """Texts to continue; `-` reads one from standard input."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    max_new_tokens: int = 64
    """Most tokens to add to each prompt."""
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    chat: bool = False
    """Each prompt is a user's message, put into the model's chat template, and is replied to."""
    system: str | None = None
    """What the model is told before the message (with --chat)."""
    stream: bool = False
    """Print text as it comes (one prompt only)."""
    mesh: str | None = None
    """Devices to use, such as data=1,sequence=4,model=2; default one."""
    payload: Payload = "native"
    """What they exchange of a prompt; float8 takes half of the bytes and coded a quarter, and both round."""
    processes: Annotated[ProcessFlags, tyro.conf.arg(name="")] = field(default_factory=ProcessFlags)
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""
    max_positions: int | None = None
    """Tokens of the longest context; default the config's, more with rotary scaling yarn or dynamic alone."""

    def run(self, console: Console) -> None:
        if not self.prompts:
            raise PromptError("give at least one prompt after the model's folder")
        prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in self.prompts]
        if self.system is not None and not self.chat:
            raise PromptError("--system belongs to a chat; add --chat")
        arguments: dict[str, Any] = {"sampling": self.sampling.build(), "stop": self.stop}
        if self.stream and len(prompts) != 1:
            raise PromptError(f"--stream takes one prompt, got {len(prompts)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh)
        self.processes.join(self.mesh)
        is_first = jax.process_index() == 0  # Others compute the same and say nothing.
        plan = self.flags.build(self.path)
        model = load(
            self.path,
            plan,
            dtype=self.dtype,
            max_positions=self.max_positions,
            mesh=mesh,
            payload=self.payload,
        )
        given: Sequence[Prompt] = prompts
        if self.chat:
            given = [chat_prompt(model, opening(self.system, prompt)) for prompt in prompts]
            arguments["stop_tokens"] = chat_stop_tokens(model)
        if self.stream:
            for delta in stream(model, given, self.max_new_tokens, **arguments):
                print(delta.text if is_first else "", end="", flush=True)
            print(end="\n" if is_first else "")
            return
        result = generate(model, given, self.max_new_tokens, **arguments)
        if not is_first:
            return
        for prompt, completion in zip(prompts, result.completions, strict=True):
            console.out(prompt, style="dim", end="\n" if self.chat else "", highlight=False)
            print(completion.text)
        tokens = sum(len(completion.tokens) - 1 for completion in result.completions)
        console.print(
            f"[dim]KV cache {result.kv_bytes:,} bytes for {len(prompts)} x {result.capacity} tokens; "
            f"prefill {result.timings.prefill:.2f} s, decode {result.timings.decode:.2f} s for {tokens} "
            f"tokens, {result.timings.compile:.2f} s of both compiling[/dim]",
            soft_wrap=True,
        )


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
        described = {"layers": _grouped(checkpoint.config), "fingerprint": checkpoint.fingerprint}
        console.print_json(data=checkpoint.config.to_json() | described)
        if (checkpoint.calibration_path / "basis").exists():
            _report_basis(console, stored_basis(checkpoint))


@dataclass
class Demo:
    """Convert, calibrate and generate, and print a table of plans: what they take and what they cost."""

    source: Path | None = None
    """Hugging Face folder or GGUF file; default the small checkpoint that ships with the package."""
    output: Path = Path("demo-output")
    """Folder for the converted model and the report."""

    def run(self, console: Console) -> None:
        demo(self.output, console, self.source)


DESCRIPTION = "Compress Q, K and V of a converted model. --version alone prints the version."
COMMANDS: dict[str, Callable[..., Any]] = {
    "convert": Convert,
    "calibrate": Calibrate,
    "plan": Plan,
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "evaluate": Evaluate,
    "inspect": Inspect,
    "demo": Demo,
}


def _grouped(config: ModelConfig) -> list[dict[str, Any]]:
    """Runs of layers alike: how many, and what they are beyond the defaults."""
    runs = [(layer, len(list(run))) for layer, run in groupby(config.layers)]
    return [{"count": count} | _beyond_defaults(layer) for layer, count in runs]


def _beyond_defaults(instance: Any) -> dict[str, Any]:
    """Fields of a dataclass, and of dataclasses in them, that are not at their defaults."""
    values = ((each.name, getattr(instance, each.name), each.default) for each in fields(instance))
    return {
        name: _beyond_defaults(value) if is_dataclass(value) else value
        for name, value, default in values
        if value != default
    }


def _report_savings(plan: CompressionPlan, checkpoint: Checkpoint) -> None:
    """Says on standard error what a plan saves at the model's positions, and what its far pairs lose."""
    config = checkpoint.config

    def size(plan):
        return plan.bytes(config.max_positions, 1, config.dtype)

    share = size(plan) / size(CompressionPlan.full(config))
    cut, layers = sum(ranks.qk == 0 for ranks in plan.layers), config.num_layers
    print(
        f"KV cache: {share:.1%} of the unmodified model's bytes at {config.max_positions:,} tokens; "
        f"{cut} of {layers} layers see no distant tokens",
        file=sys.stderr,
    )

    def read(plan):
        return plan.bytes_read(config.max_positions, config.dtype)

    if (read_share := read(plan) / read(CompressionPlan.full(config))) < share - 1e-3:
        print(f"a decoded token reads {read_share:.1%} of what it reads without a plan", file=sys.stderr)
    if plan.rotated and cut < layers and (checkpoint.calibration_path / "basis").exists():
        print(f"far pairs: {certificate(plan, stored_basis(checkpoint))}", file=sys.stderr)


def _report_basis(console: Console, basis: Basis) -> None:
    """Prints the certificate: relative error of scores and outputs at each quarter of the coordinates."""
    H = basis.k_map.shape[-1]
    table = Table(title=f"basis: QK {basis.qk_kind}, VO {basis.vo_kind}, {basis.num_tokens:,} tokens")
    for column in ("kept", "score error, mean", "worst head", "value error, mean", "worst head"):
        table.add_column(column, justify="right")
    for kept in sorted({-(-H * quarters // 4) for quarters in (1, 2, 3, 4)}):
        scores, values = basis.qk_error[..., kept], basis.vo_error[..., kept]
        table.add_row(
            str(kept), *(f"{x:.3f}" for x in (scores.mean(), scores.max(), values.mean(), values.max()))
        )
    console.print(table)
    worst = max(float(basis.qk_condition.max()), float(basis.vo_condition.max()))
    console.print(f"worst condition number of a head's basis: {worst:.3g}")
    if basis.num_tokens < FEW_TOKENS:
        console.print(
            f"a poor basis: {basis.num_tokens:,} tokens are few, calibrate on at least {FEW_TOKENS:,}",
            soft_wrap=True,
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs `zdc`; exit status 2 with one line on standard error for any error the user can mend.

    An interrupt is one line and status 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"zdc {version('zdc-jax')}")
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog="zdc", description=DESCRIPTION, args=arguments
            ).run(Console())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (ZDCError, OSError, NotImplementedError) as error:  # The last: refusals, with their reasons.
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
