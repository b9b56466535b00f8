"""Compilation of an engine's programs: what is logged, and what an interrupt does."""

import logging
import signal
import time
from typing import Any, cast

import pytest

from zdc_jax.engine.compiling import Lowering, compile_all


class Program:
    """Program that compiles to its own name."""

    def __init__(self, name: str):
        self.name = name

    def compile(self) -> str:
        return self.name


class Interrupted(Program):
    """Program during whose compilation the user presses Ctrl-C."""

    def compile(self) -> str:
        raise KeyboardInterrupt


class Waiting(Program):
    """Program that compiles until SIGINT would end the process, at most 10 s."""

    saw_default = False

    def compile(self) -> str:
        until = time.monotonic() + 10
        while not self.saw_default and time.monotonic() < until:
            self.saw_default = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        return self.name


def lower(program: Program) -> Lowering:
    return cast(Any, lambda: program)


def test_the_number_of_programs_is_said_first(caplog):
    with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
        assert compile_all({name: lower(Program(name)) for name in "ab"}) == {"a": "a", "b": "b"}
    assert caplog.messages[0] == "compiling 2 programs; without a GPU this takes minutes"
    assert len(caplog.messages) == 3


def test_a_second_interrupt_ends_the_process_while_programs_compile(caplog):
    before, waiting = signal.getsignal(signal.SIGINT), Waiting("b")
    with pytest.raises(KeyboardInterrupt):
        compile_all({"a": lower(Interrupted("a")), "b": lower(waiting)})
    assert waiting.saw_default
    assert signal.getsignal(signal.SIGINT) is before
    assert any(message.endswith("end first; Ctrl-C ends at once") for message in caplog.messages)
