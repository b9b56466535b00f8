"""The `zdc` command: its subcommands, and one-line errors."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import import_module
from typing import Any

import tyro

from convert.cli.choices import CHOICES
from convert.cli.interrupts import INTERRUPTED

DESCRIPTION = """Compress the KV cache of a language model.

`zdc compress` does all at once: it converts a model, calibrates it, and finds and judges a plan. The other
commands are its steps, and those that use a model: generate, chat, serve.
`zdc COMMAND --help` lists the flags of a command; `zdc --version` prints the version.
Compiled programs are kept in the user's folder for caches; `zdc --no-program-cache COMMAND` keeps none."""
SUMMARIES = {
    "compress": (
        "Convert a model, calibrate it, choose a plan and judge it; then `zdc serve OUTPUT` uses the plan."
    ),
    "convert": "Convert a Hugging Face folder (safetensors) or a GGUF file, without torch.",
    "calibrate": (
        "Calibrate a converted folder on text: moments, basis, spectrum, error certificate and profile."
    ),
    "plan": (
        "Write a compression plan as JSON and print it. The plan is described by flags or found by a search."
    ),
    "generate": "Continue prompts.",
    "chat": "Chat with a model; each line is a message.",
    "serve": "Serve a model over HTTP with OpenAI's API: completions, chat completions and metrics.",
    "evaluate": "Measure perplexity and long-range tasks with a plan and without it, on the same text.",
    "inspect": "Print the model and the calibration in a converted folder.",
    "demo": "Convert, calibrate and generate; print cache size and perplexity of several plans.",
}
"""First lines of the commands' help, so that `zdc --help` need not import the commands and JAX."""


def import_command(name: str) -> Callable[..., Any]:
    """Return the dataclass of a command, which is named like its module: `convert.cli.plan.Plan`."""
    return getattr(import_module(f"convert.cli.{name}"), name.capitalize())


def main(arguments: list[str] | None = None) -> int:
    """Run `zdc` and return its exit status.

    An error that the user can correct is one line on standard error and status 2; an interrupt is status 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        from importlib.metadata import version

        print(f"zdc {version('zdc-jax')}")
        return 0
    if arguments and not arguments[0].startswith("-") and arguments[0] not in SUMMARIES:
        from difflib import get_close_matches

        near = get_close_matches(arguments[0], SUMMARIES, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(SUMMARIES)}"
        print(f"error: {arguments[0]!r} is not a command; {advice}", file=sys.stderr)
        return 2
    if not arguments or arguments[0] not in SUMMARIES:
        # Tyro prints the help, an error or, with a flag of its own, completions for a shell; then it exits.
        parse = import_command if any(each.startswith("--tyro-") for each in arguments) else _summarize
        _parse(arguments, {name: parse(name) for name in SUMMARIES})
    return _run(arguments[0], arguments)


def _summarize(name: str) -> Callable[..., Any]:
    """Return a command without flags, for the list of commands."""
    return make_dataclass(name.capitalize(), (), namespace={"__doc__": SUMMARIES[name]})


def _parse(arguments: list[str], commands: dict[str, Callable[..., Any]]) -> Any:
    """Return the command that the arguments describe."""
    return tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="zdc",
        description=DESCRIPTION,
        args=arguments,
        config=(tyro.conf.DisallowNone,),
        registry=CHOICES,
    )


def _run(name: str, arguments: list[str]) -> int:
    """Parse the arguments of a command, and run it; return the exit status."""
    commands = {each: _summarize(each) for each in SUMMARIES} | {name: import_command(name)}
    # These take as long as the command itself.
    from rich.console import Console

    from convert.cli.errors import reword_for_flags
    from zdc_jax.errors import ZDCError

    # An import of Orbax has configured logging already, hence `force`.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    command = None
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"warning: {reword_for_flags(str(message), command)}", file=sys.stderr
        )
        try:
            command = _parse(arguments, commands)
            gc.enable()
            command.run(Console())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except (ZDCError, OSError, NotImplementedError) as error:  # The last names unsupported cases.
            print(f"error: {reword_for_flags(str(error), command)}", file=sys.stderr)
            return 2
        except (RuntimeError, AssertionError) as error:
            if (message := _describe_device_fault(error)) is None:
                raise
            print(f"error: {message}", file=sys.stderr)
            return 2
    return 0


def _describe_device_fault(error: Exception) -> str | None:
    """Return what is wrong with the device or its memory; None for other errors."""
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError):
        if not any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory")):
            return None
        (reason, *_) = str(error).splitlines()  # A report on all buffers may follow.
        return f"{reason}; lower the batch, the context or the cache"
    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        wanted = os.environ.get("JAX_PLATFORMS")
        fault = f"JAX_PLATFORMS={wanted}: JAX finds no such device" if wanted else "JAX finds no device"
        return (
            f"{fault}; set JAX_PLATFORMS=cpu, or run pip install 'zdc-jax[cuda]' on a machine with an "
            "NVIDIA GPU"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
