"""Compilation of an engine's programs: what is logged, and what an interrupt does."""

import logging
import signal
from typing import Any, cast

import pytest

from zdc_jax.engine.compiling import Lowering, compile_all


class Program:
    """Program that compiles to its own name, or is interrupted."""

    def __init__(self, name: str, *, is_interrupted: bool = False):
        self.name, self.is_interrupted = name, is_interrupted

    def compile(self) -> str:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return self.name


def lower(program: Program) -> Lowering:
    return cast(Any, lambda: program)


def test_the_number_of_programs_is_said_first(caplog):
    with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
        assert compile_all({name: lower(Program(name)) for name in "ab"}) == {"a": "a", "b": "b"}
    assert caplog.messages[0] == "compiling 2 programs; without a GPU this takes minutes"
    assert len(caplog.messages) == 3


def test_after_an_interrupt_a_second_one_ends_the_process(caplog):
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_all({"a": lower(Program("a", is_interrupted=True))})
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert caplog.messages[-1].endswith("end first; Ctrl-C ends at once")
