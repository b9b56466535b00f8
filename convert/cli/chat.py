"""`zdc chat`: a conversation, line by line."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import PlanFlags, SamplingFlags
from zdc_jax.config import Dtype
from zdc_jax.conversation.chat import Conversation, Turn, chat
from zdc_jax.errors import PromptError, ZDCError
from zdc_jax.loading import load

START_OVER, END = "/new", "/quit"


@dataclass
class Chat:
    """Talk with a model, a line a message. /new starts over, /quit or Ctrl-D ends, Ctrl-C ends a reply."""

    path: Positional[Path]
    """Converted folder of a model that has a chat template."""
    flags: Annotated[PlanFlags, tyro.conf.arg(name="")] = field(default_factory=PlanFlags)
    system: str | None = None
    """What the model is told before the first message."""
    max_new_tokens: int = 512
    """Most tokens of a reply."""
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    dtype: Dtype | None = None
    """Dtype to run in; default that of the stored weights."""
    max_positions: int | None = None
    """Tokens of the longest context; default the config's, more with rotary scaling yarn or dynamic alone."""

    def run(self, console: Console) -> None:
        if sys.stdin is None:
            raise PromptError("standard input is closed; messages come from there")
        sampling = self.sampling.build()
        plan = self.flags.build(self.path)
        model = load(self.path, plan, dtype=self.dtype, max_positions=self.max_positions)
        conversation = chat(
            model,
            system=self.system,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            stop=self.stop,
        )
        typed = sys.stdin.isatty()
        for message in _lines(typed):
            command = message.strip()
            if command == END:
                return
            if command == START_OVER:
                conversation.start_over()
            elif command[0] == "/" and command[1:].isalpha():
                print(f"{command} is no command; {START_OVER} starts over, {END} ends", file=sys.stderr)
            elif typed:
                _reply_to_somebody(conversation, message)
            else:
                _reply(conversation, message)


def _lines(typed: bool) -> Iterator[str]:
    """Lines of standard input that are not empty; somebody who types them gets a prompt and can edit them."""
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if typed else "")
            line.encode()  # Bytes that are no UTF-8 may come in as lone surrogates.
        except EOFError:
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print()
            continue
        except UnicodeError as error:
            raise PromptError(f"standard input is not UTF-8: {error}") from error
        if line.strip():
            yield line


def _reply_to_somebody(conversation: Conversation, message: str) -> None:
    """Who can go on after an error, or after the reply was enough."""
    try:
        _reply(conversation, message)
    except KeyboardInterrupt:
        print()
    except ZDCError as error:
        print(f"error: {error}", file=sys.stderr)


def _reply(conversation: Conversation, message: str) -> None:
    for piece in conversation.stream(message):
        print(piece, end="", flush=True)
    print(flush=True)
    assert conversation.turn is not None
    print(_cost(conversation.turn), file=sys.stderr)


def _cost(turn: Turn) -> str:
    """What a reply took, in one line."""
    done, read = turn.generation, turn.prompt_tokens - turn.cached_tokens
    return (
        f"[{turn.cached_tokens} tokens kept, {read} read in {done.timings.prefill:.2f} s; "
        f"{len(done.completions[0].tokens)} written in {done.timings.decode:.2f} s; "
        f"KV cache {done.kv_bytes:,} bytes for {done.capacity} tokens]"
    )
