"""Compilation of an engine's programs: what is logged, and what an interrupt does."""

import logging
import signal
import threading
import time
from typing import Any, cast

import jax
import pytest

from zdc_jax.engine import stored_programs
from zdc_jax.engine.compiling import compile_all
from zdc_jax.engine.uncompiled import Program
from zdc_jax.errors import CacheMemoryError


class Named:
    """Lowered program that compiles to its name."""

    def __init__(self, name: str):
        self.name = name

    def trace(self) -> "Named":
        return self

    def lower(self) -> "Named":
        return self

    def compile(self) -> str:
        return self.name


class Interrupted(Named):
    """Lowered program during whose compilation the user presses Ctrl-C."""

    def compile(self) -> str:
        raise KeyboardInterrupt


def prepare(*programs: Named) -> dict[str, Program]:
    return cast(Any, {program.name: program for program in programs})


@pytest.fixture(autouse=True)
def none_stored(monkeypatch):
    monkeypatch.setattr(stored_programs, "find_file", lambda program: None)


def test_the_number_of_programs_is_said_first(caplog):
    with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
        assert compile_all(prepare(Named("a"), Named("b"))) == {"a": "a", "b": "b"}
    assert caplog.messages[0] == "compiling 2 programs; without a GPU this takes minutes"
    assert len(caplog.messages) == 3


class Hungry(Named):
    """Lowered program for which memory is short while others are compiled, or always."""

    def __init__(self, name: str, others: set[str], *, always: bool = False):
        super().__init__(name)
        self.others, self.always, self.tries = others, always, 0

    def compile(self) -> str:
        self.tries += 1
        if self.always or self.tries == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        assert self.others == {"other"}, "all others are compiled"
        return self.name


class Other(Named):
    """Lowered program that takes a while."""

    def __init__(self, done: set[str]):
        super().__init__("other")
        self.done = done

    def compile(self) -> str:
        time.sleep(0.2)
        self.done.add(self.name)
        return self.name


def test_a_program_that_found_too_little_memory_is_compiled_after_the_others(caplog):
    done: set[str] = set()
    programs = prepare(Hungry("large", done), Other(done), Hungry("larger", done))
    with caplog.at_level(logging.INFO, logger="zdc_jax.engine"):
        assert compile_all(programs) == {name: name for name in programs}
    assert "memory was short for 2 programs next to others: compiling them again" in caplog.messages


def test_a_program_that_never_finds_memory_is_refused():
    with pytest.raises(CacheMemoryError, match="lower cache_tokens, max_sequences or max_model_len"):
        compile_all(prepare(Hungry("large", {"other"}, always=True)))


def test_other_failures_of_the_compiler_are_passed_on():
    class Broken(Named):
        def compile(self) -> str:
            raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_all(prepare(Broken("a"), Named("b")))


def test_a_second_interrupt_ends_the_process_while_programs_compile(caplog, monkeypatch):
    calls: list[tuple[Any, Any]] = []

    def record(number: Any, handler: Any) -> str:
        calls.append((number, handler))
        return "before"

    monkeypatch.setattr(signal, "signal", record)
    with pytest.raises(KeyboardInterrupt):
        compile_all(prepare(Interrupted("a"), Named("b")))
    assert calls == [(signal.SIGINT, signal.SIG_DFL), (signal.SIGINT, "before")]
    assert any(message.endswith("end first; Ctrl-C ends at once") for message in caplog.messages)


def test_threads_keep_the_settings_of_their_caller():
    seen = []

    class Asking(Named):
        """Program that looks up settings where it is lowered."""

        def lower(self) -> Named:
            seen.append((jax.config.jax_default_matmul_precision, jax.config.jax_default_device))
            return self

    (device,) = jax.local_devices()[:1]
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        compile_all(prepare(Asking("a")))
    assert seen == [("highest", device)]


def test_an_interrupt_leaves_out_what_is_not_traced(monkeypatch):
    traced, goes_on = [], threading.Event()

    class Slow(Named):
        """Program that is being traced when the user presses Ctrl-C."""

        def trace(self) -> Named:
            traced.append(self.name)
            goes_on.wait(60)
            return self

    monkeypatch.setattr(signal, "signal", lambda number, handler: goes_on.set())
    with pytest.raises(KeyboardInterrupt):
        compile_all(prepare(Interrupted("a"), Slow("b"), Slow("c"), Slow("d")))
    assert len(traced) < 2


def test_a_failure_leaves_out_what_is_not_traced():
    traced: list[str] = []

    class Failing(Named):
        """Program that cannot be traced."""

        def trace(self) -> Named:
            raise MemoryError(self.name)

    class Slow(Named):
        """Program that takes longer to trace than the first needs to fail."""

        def trace(self) -> Named:
            traced.append(self.name)
            time.sleep(0.2)
            return self

    with pytest.raises(MemoryError, match="a"):
        compile_all(prepare(Failing("a"), *map(Slow, "bcdefg")))
    assert len(traced) < 3
