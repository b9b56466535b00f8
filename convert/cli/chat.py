"""`zdc chat`: a conversation with a model, one message per line of standard input."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from rich.console import Console

from convert.cli.errors import reword_for_flags
from convert.cli.flags import (
    DtypeFlag,
    MaxPositionsFlag,
    ModelFolder,
    PlanFlag,
    SamplingFlags,
    call_with_flags,
    show_default,
)
from zdc_jax.conversation.chat import Conversation, Turn, chat
from zdc_jax.errors import PromptError, ZDCError
from zdc_jax.loading import load

START_OVER, END = "/new", "/quit"


@dataclass
class Chat:
    """Chat with a model; each line is a message.

    /new starts a new conversation, /quit or Ctrl-D exits, Ctrl-C stops a reply.

    Attributes:
      path: Converted folder of a model with a chat template.
      system: System message.
      max_new_tokens: Most tokens in a reply.
      stop: Strings that end a reply.
      dtype: Dtype to run in.
      max_positions: Longest context in tokens. More than the config has needs yarn or dynamic rotary scaling.
    """

    path: ModelFolder
    flags: Annotated[PlanFlag, tyro.conf.arg(name="")] = field(default_factory=PlanFlag)
    system: Annotated[str | None, show_default("none")] = None
    max_new_tokens: int = 512
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)
    stop: Annotated[tuple[str, ...], show_default("none")] = ()
    dtype: DtypeFlag = None
    max_positions: MaxPositionsFlag = None

    def run(self, console: Console) -> None:
        if sys.stdin is None:
            raise PromptError("standard input is closed; `zdc chat` reads messages from it")
        sampling = self.sampling.build()
        plan = self.flags.build(self.path)
        model = call_with_flags(load, self, plan=plan)
        conversation = call_with_flags(chat, self, model=model, sampling=sampling)
        is_interactive = sys.stdin.isatty()
        for message in _read_messages(is_interactive):
            command = message.strip()
            if command == END:
                return
            if command == START_OVER:
                conversation.start_over()
            elif command[0] == "/" and command[1:].isalpha():
                print(
                    f"{command}: unknown command; {START_OVER} starts a new conversation, {END} exits",
                    file=sys.stderr,
                )
            elif is_interactive:
                self._reply_interactively(conversation, message)
            else:
                _reply(conversation, message)

    def _reply_interactively(self, conversation: Conversation, message: str) -> None:
        """Print a reply; keep the conversation alive after Ctrl-C or an error."""
        try:
            _reply(conversation, message)
        except KeyboardInterrupt:
            print()
        except ZDCError as error:
            print(f"error: {reword_for_flags(str(error), self)}", file=sys.stderr)


def _read_messages(is_interactive: bool) -> Iterator[str]:
    """Yield non-empty lines of standard input, with a prompt and line editing on a terminal."""
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if is_interactive else "")
            line.encode()  # Invalid UTF-8 may arrive as lone surrogates.
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print()
            continue
        except UnicodeError as error:
            raise PromptError(f"standard input is not UTF-8: {error}") from error
        if line.strip():
            yield line


def _reply(conversation: Conversation, message: str) -> None:
    for text in conversation.stream(message):
        print(text, end="", flush=True)
    print(flush=True)
    assert conversation.turn is not None
    print(_describe_turn(conversation.turn), file=sys.stderr)


def _describe_turn(turn: Turn) -> str:
    """Return tokens, seconds and cache size of a reply as one line."""
    generation, new_tokens = turn.generation, turn.prompt_tokens - turn.cached_tokens
    return (
        f"[{turn.cached_tokens} tokens reused, {new_tokens} prefilled in {generation.timings.prefill:.2f} s; "
        f"{len(generation.completions[0].tokens)} generated in {generation.timings.decode:.2f} s; "
        f"KV cache {generation.kv_bytes:,} bytes for {generation.capacity} tokens]"
    )
