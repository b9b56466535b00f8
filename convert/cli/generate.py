"""`zdc generate`: continuations of prompts."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import (
    DtypeFlag,
    MaxPositionsFlag,
    ModelFolder,
    PlanFlag,
    SamplingFlags,
    call_with_flags,
    show_default,
    show_repeated,
)
from convert.progress import noted_if_slow
from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens, opening
from zdc_jax.errors import MeshError, PromptError
from zdc_jax.generation.api import generate, stream
from zdc_jax.generation.request import Prompt
from zdc_jax.loading import load
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.parallel.payload import Payload
from zdc_jax.parallel.processes import initialize
from zdc_jax.plan import CompressionPlan

SLOW = "still at work; the first run compiles, which takes minutes for a plan without a GPU"
"""Note on a run that has printed nothing for some time."""


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
        prompts = _read_prompts(self.prompts)
        if self.system is not None and not self.chat:
            raise PromptError("--system: applies to a chat only; add --chat")
        options: dict[str, Any] = {"sampling": self.sampling.build(), "stop": self.stop}
        if self.stream and len(prompts) != 1:
            raise PromptError(f"--stream: only one prompt can be streamed, got {len(prompts)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh)
        self.processes.join(self.mesh)
        is_first = jax.process_index() == 0  # The other processes compute the same and print nothing.
        plan = self.flags.build(self.path)
        model = call_with_flags(load, self, plan=plan, mesh=mesh)
        inputs: Sequence[Prompt] = prompts
        if self.chat:
            inputs = [chat_prompt(model, opening(self.system, prompt)) for prompt in prompts]
            options |= {"stop_tokens": chat_stop_tokens(model), "new_text": True}
        noted = noted_if_slow(SLOW) if is_first else nullcontext(lambda: None)
        if self.stream:
            with noted as cancel_note:
                for delta in stream(model, inputs, self.max_new_tokens, **options):
                    cancel_note()
                    print(delta.text if is_first else "", end="", flush=True)
            print(end="\n" if is_first else "")
            return
        with noted:
            result = generate(model, inputs, self.max_new_tokens, **options)
        if not is_first:
            return
        for prompt, completion in zip(prompts, result.completions, strict=True):
            console.out(prompt, style="dim", end="\n" if self.chat else "", highlight=False)
            print(completion.text)
        tokens = sum(len(completion.tokens) - 1 for completion in result.completions)
        dtype = model.network.dtype.name
        full = CompressionPlan.full(model.config).bytes(result.capacity, len(prompts), dtype)
        without = "" if plan is None else f" (without a plan {full:,})"
        console.print(
            f"[dim]KV cache {result.kv_bytes:,} bytes{without} for {len(prompts)} x {result.capacity} "
            f"tokens; prefill {result.timings.prefill:.2f} s, decode {result.timings.decode:.2f} s for "
            f"{tokens} tokens, both including {result.timings.compile:.2f} s of compilation[/dim]",
            soft_wrap=True,
        )


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    """Return prompts, of which one may be `-` for standard input; raise `PromptError` if one is no text."""
    if prompts.count("-") > 1:
        raise PromptError("PROMPT -: standard input is one prompt; give - only once")
    found: list[str] = []
    for prompt in prompts:
        try:
            text = sys.stdin.read() if prompt == "-" else prompt
            text.encode()
        except UnicodeError as error:
            what = "standard input" if prompt == "-" else f"PROMPT {len(found) + 1}"
            raise PromptError(f"{what} is not UTF-8: {error}") from error
        if prompt == "-" and not text:
            raise PromptError("PROMPT -: standard input is empty")
        found.append(text)
    return found
