"""The `zdc` command: its subcommands, their flags, and one-line errors."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from convert.calibration.calibrate import FEW_TOKENS, CalibrationOptions, calibrate
from convert.cli.chat import Chat
from convert.cli.compress import Compress
from convert.cli.demo import demo
from convert.cli.errors import reword_for_flags
from convert.cli.evaluate import Evaluate
from convert.cli.flags import (
    DtypeFlag,
    MaxPositionsFlag,
    ModelFolder,
    PlanFlag,
    PlanFlags,
    SamplingFlags,
    SearchFlags,
    show_default,
    show_repeated,
)
from convert.cli.output import check_output
from convert.cli.serve import Serve
from convert.conversion import VERIFIED_SHAPE, check_torch, convert, verify_against_transformers
from convert.default_text import write_default_text
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import Dtype, LayerSpec, ModelConfig, RopeConfig
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
    """Convert a Hugging Face folder (safetensors) or a GGUF file, without torch.

    Attributes:
      source: Folder with config.json, *.safetensors and a tokenizer; or a .gguf file, or any part of a split
        one.
      output: Folder to write. It appears only once it is complete.
      dtype: Dtype to store. float32 stores quantized weights exactly.
      overwrite: Replace an existing output folder, its calibration included.
      verify: Compare logits with transformers after conversion. Needs torch.
      calibrate: Text files or folders to calibrate on after conversion.
    """

    source: Annotated[Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    output: Annotated[Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    dtype: Annotated[Dtype | None, show_default("dtype of the source; bfloat16 if it is quantized")] = None
    overwrite: bool = False
    verify: bool = False
    calibrate: Annotated[tuple[Path, ...], show_default("none")] = ()

    def run(self, console: Console) -> None:
        if self.verify:
            check_torch()
        checkpoint = convert(self.source, self.output, dtype=self.dtype, overwrite=self.overwrite)
        console.out(f"converted {self.source} -> {self.output} ({checkpoint.fingerprint})")
        if self.verify:
            with jax.default_matmul_precision("highest"):
                # Rotary frequencies may depend on the context, which is as long as the input in transformers.
                positions = min(VERIFIED_SHAPE[1], checkpoint.config.max_positions)
                network = load(self.output, dtype="float32", max_positions=positions).network

                def compute_logits(tokens: np.ndarray) -> np.ndarray:
                    return np.asarray(network(jax.numpy.asarray(tokens)))

                error = verify_against_transformers(
                    self.source, compute_logits, vocab_size=checkpoint.config.vocab_size
                )
            console.print(f"largest difference of logits from transformers: {error:.2e} of the largest logit")
        if self.calibrate:
            _report_basis(console, calibrate(self.output, self.calibrate))


@dataclass
class Calibrate:
    """Calibrate a converted folder on text: moments, basis, spectrum, error certificate and profile.

    Attributes:
      path: Converted folder.
      texts: Text files (.txt, .jsonl, .md, .rst, .py, also .xz or .gz) or folders of them. Each folder is a
        topic.
      from_moments: Read no text, but make another basis from the moments of an earlier calibration. --qk auto
        and --vo auto then mean balanced, and no profile is stored.
      overwrite: Replace an existing basis and its profile. Plans made with the old basis no longer load.
      dtype: Dtype to run in.
    """

    path: ModelFolder
    texts: Annotated[
        Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="[TEXT ...]", help_behavior_hint="(default: the documentation of Python)"),
    ] = ()
    from_moments: bool = False
    options: Annotated[CalibrationOptions, tyro.conf.arg(name="")] = field(default_factory=CalibrationOptions)
    overwrite: bool = False
    dtype: DtypeFlag = None

    def run(self, console: Console) -> None:
        if self.texts and self.from_moments:
            raise TextError("--from-moments: reads no text; drop it, or drop TEXT")
        with TemporaryDirectory() as scratch:
            texts: Sequence[Path] = self.texts
            if not texts and not self.from_moments:
                print("no TEXT given: calibrating on the documentation that Python ships", file=sys.stderr)
                texts = [write_default_text(Path(scratch) / "python-documentation")]
            basis = calibrate(self.path, texts, self.options, overwrite=self.overwrite, dtype=self.dtype)
        _report_basis(console, basis)


@dataclass
class Plan:
    """Write a compression plan as JSON and print it. The plan is described by flags or found by a search.

    Attributes:
      path: Converted and calibrated folder.
      output: JSON file to write. A search also writes PLAN.front.json and PLAN.front.png with the best plans
        at each size, and PLAN.journal.jsonl, from which it resumes when run again.
    """

    path: ModelFolder
    output: Annotated[Positional[Path], tyro.conf.arg(metavar="PLAN.json")]
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    search: Annotated[SearchFlags, tyro.conf.arg(name="")] = field(default_factory=SearchFlags)

    def run(self, console: Console) -> None:
        self.search.check(self.flags)
        check_output(self.output)
        checkpoint = Checkpoint.open(self.path)
        plan: CompressionPlan | None
        if not self.search.is_requested:
            plan = self.flags.build(self.path)
        else:
            plan = self.search.search(self.path, self.output, console, self.flags.method)
        if plan is None:
            raise PlanError(
                "no plan described; give --preset, --budget, --max-score-error, --qk/--v, --window or "
                "--method, or --texts to search"
            )
        plan.check_model(checkpoint.config, checkpoint.fingerprint)
        if plan.basis:
            plan.check_basis(stored_basis(checkpoint).coordinates_hash)
        plan.save(self.output)
        console.print_json(self.output.read_text())
        _report_savings(plan, checkpoint)


@dataclass
class ProcessFlags:
    """Membership of this process in a group that shares a mesh.

    Attributes:
      distributed: Join the other processes of this Slurm, Open MPI or Kubernetes job on one mesh.
      coordinator: HOST:PORT of process 0, for processes that no such job starts.
      num_processes: Number of processes.
      process_id: Index of this process, from 0.
      join_timeout: Seconds to wait for the other processes.
    """

    distributed: bool = False
    coordinator: Annotated[str | None, show_default("detected")] = None
    num_processes: Annotated[int | None, show_default("detected")] = None
    process_id: Annotated[int | None, show_default("detected")] = None
    join_timeout: float = 300.0

    def join(self, mesh: str | None) -> None:
        """Join the other processes if these flags ask for it."""
        described = (self.coordinator, self.num_processes, self.process_id) != (None, None, None)
        if not self.distributed and not described:
            return
        if mesh is None:
            raise MeshError("--mesh is missing: several processes share a mesh; give --mesh with all devices")
        initialize(self.coordinator, self.num_processes, self.process_id, timeout=self.join_timeout)


@dataclass
class Generate:
    """Continue prompts.

    Attributes:
      path: Converted folder.
      prompts: Texts to continue; `-` reads a text from standard input.
      max_new_tokens: Most tokens to add to each prompt.
      stop: Strings that end the text.
      chat: Treat each prompt as a user's message and answer it with the model's chat template.
      system: With --chat, system message before each prompt.
      stream: Print text while it is generated; one prompt only.
      mesh: Devices to use, such as data=1,sequence=4,model=2.
      payload: Format in which devices exchange prompt activations. float8 halves their bytes and coded
        quarters them; both round.
      dtype: Dtype to run in.
      max_positions: Longest context in tokens. More than the config has needs yarn or dynamic rotary scaling.
      reproducible: Give a prompt the same answer in any batch and with any chunk width. Slow.
    """

    path: ModelFolder
    prompts: Annotated[Positional[tuple[str, ...]], show_repeated("PROMPT")]
    flags: Annotated[PlanFlag, tyro.conf.arg(name="")] = field(default_factory=PlanFlag)
    max_new_tokens: int = 64
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)
    stop: Annotated[tuple[str, ...], show_default("none")] = ()
    chat: bool = False
    system: Annotated[str | None, show_default("none")] = None
    stream: bool = False
    mesh: Annotated[str | None, show_default("one device")] = None
    payload: Payload = "native"
    processes: Annotated[ProcessFlags, tyro.conf.arg(name="")] = field(default_factory=ProcessFlags)
    dtype: DtypeFlag = None
    max_positions: MaxPositionsFlag = None
    reproducible: bool = False

    def run(self, console: Console) -> None:
        if not self.prompts:
            raise PromptError("PROMPT is missing; give at least one prompt after the model's folder")
        prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in self.prompts]
        if self.system is not None and not self.chat:
            raise PromptError("--system: applies to a chat only; add --chat")
        options: dict[str, Any] = {"sampling": self.sampling.build(), "stop": self.stop}
        if self.stream and len(prompts) != 1:
            raise PromptError(f"--stream: only one prompt can be streamed, got {len(prompts)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh)
        self.processes.join(self.mesh)
        is_first = jax.process_index() == 0  # The other processes compute the same and print nothing.
        plan = self.flags.build(self.path)
        model = load(
            self.path,
            plan,
            dtype=self.dtype,
            max_positions=self.max_positions,
            mesh=mesh,
            payload=self.payload,
            reproducible=self.reproducible,
        )
        inputs: Sequence[Prompt] = prompts
        if self.chat:
            inputs = [chat_prompt(model, opening(self.system, prompt)) for prompt in prompts]
            options |= {"stop_tokens": chat_stop_tokens(model), "new_text": True}
        if self.stream:
            for delta in stream(model, inputs, self.max_new_tokens, **options):
                print(delta.text if is_first else "", end="", flush=True)
            print(end="\n" if is_first else "")
            return
        result = generate(model, inputs, self.max_new_tokens, **options)
        if not is_first:
            return
        for prompt, completion in zip(prompts, result.completions, strict=True):
            console.out(prompt, style="dim", end="\n" if self.chat else "", highlight=False)
            print(completion.text)
        tokens = sum(len(completion.tokens) - 1 for completion in result.completions)
        console.print(
            f"[dim]KV cache {result.kv_bytes:,} bytes for {len(prompts)} x {result.capacity} tokens; "
            f"prefill {result.timings.prefill:.2f} s, decode {result.timings.decode:.2f} s for {tokens} "
            f"tokens, both including {result.timings.compile:.2f} s of compilation[/dim]",
            soft_wrap=True,
        )


@dataclass
class Inspect:
    """Print the model and the calibration in a converted folder.

    Attributes:
      path: Converted folder.
      check: Recompute the hashes of all files and compare them with the manifest.
    """

    path: ModelFolder
    check: bool = False

    def run(self, console: Console) -> None:
        checkpoint = Checkpoint.open(self.path)
        if self.check:
            checkpoint.check()
            console.print("all hashes match")
        summary = {"layers": _describe_layers(checkpoint.config), "fingerprint": checkpoint.fingerprint}
        console.print_json(data=checkpoint.config.to_json() | summary)
        if (checkpoint.calibration_path / "basis").exists():
            _report_basis(console, stored_basis(checkpoint))


@dataclass
class Demo:
    """Convert, calibrate and generate; print cache size and perplexity of several plans.

    Attributes:
      source: Hugging Face folder or GGUF file.
      output: Folder for the converted model and the report.
    """

    source: Annotated[Path | None, show_default("the small checkpoint in the package")] = None
    output: Path = Path("demo-output")

    def run(self, console: Console) -> None:
        demo(self.output, console, self.source)


DESCRIPTION = """Compress the KV cache of a language model.

`zdc compress` does all at once: it converts a model, calibrates it, and finds and judges a plan. The other
commands are its steps, and those that use a model: generate, chat, serve.
`zdc COMMAND --help` lists the flags of a command; `zdc --version` prints the version.
Compiled programs are kept in the user's folder for caches; `zdc --no-program-cache COMMAND` keeps none."""
COMMANDS: dict[str, Callable[..., Any]] = {
    "compress": Compress,
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


def _describe_layers(config: ModelConfig) -> list[dict[str, Any]]:
    """Return runs of equal layers: their count, and their settings that differ from the defaults."""
    runs = [(layer, len(list(run))) for layer, run in groupby(config.layers)]
    return [{"count": count} | _list_changes(layer) for layer, count in runs]


def _list_changes(spec: LayerSpec | RopeConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, also those of dataclasses in fields."""
    values = ((each.name, getattr(spec, each.name), each.default) for each in fields(spec))
    return {
        name: _list_changes(value) if isinstance(value, RopeConfig) else value
        for name, value, default in values
        if value != default
    }


def _report_savings(plan: CompressionPlan, checkpoint: Checkpoint) -> None:
    """Print to standard error the size of a plan's cache at the model's positions, and its certificate."""
    config, full = checkpoint.config, CompressionPlan.full(checkpoint.config)
    stored, stored_full = (each.bytes(config.max_positions, 1, "bfloat16") for each in (plan, full))
    share = stored / stored_full
    cut, layers = sum(ranks.qk == 0 for ranks in plan.layers), config.num_layers
    print(
        f"KV cache: {share:.1%} of a 16-bit cache's bytes at {config.max_positions:,} tokens; "
        f"{cut} of {layers} layers drop all tokens outside the window",
        file=sys.stderr,
    )
    read, read_full = (each.bytes_read(config.max_positions, "bfloat16") for each in (plan, full))
    if (read_share := read / read_full) < share - 1e-3:
        print(f"decoding a token reads {read_share:.1%} of a 16-bit cache's bytes", file=sys.stderr)
    if plan.rotated and cut < layers and (checkpoint.calibration_path / "basis").exists():
        print(f"certificate: {certificate(plan, stored_basis(checkpoint))}", file=sys.stderr)


def _report_basis(console: Console, basis: Basis) -> None:
    """Print the certificate: relative error of scores and outputs at each quarter of the coordinates."""
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
            f"inaccurate basis: calibrated on {basis.num_tokens:,} tokens; use at least {FEW_TOKENS:,}",
            soft_wrap=True,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run `zdc` and return its exit status.

    An error that the user can correct is one line on standard error and status 2; an interrupt is status 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"zdc {version('zdc-jax')}")
        return 0
    # An import of Orbax has configured logging already, hence `force`.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    command = None
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"warning: {reword_for_flags(str(message), command)}", file=sys.stderr
        )
        try:
            command = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="zdc",
                description=DESCRIPTION,
                args=arguments,
                config=(tyro.conf.DisallowNone,),
            )
            command.run(Console())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (
            ZDCError,
            OSError,
            NotImplementedError,
        ) as error:  # `NotImplementedError` names unsupported cases.
            print(f"error: {reword_for_flags(str(error), command)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
