"""Ctrl-C: one line and status 130, also while a command runs no Python or modules are imported."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from convert.cli import entry
from convert.cli.interrupts import HINT

RUN = """
import signal, sys, time
from convert.cli import entry, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells ignore it in the background.
{}
print("ready", flush=True)
sys.exit(entry.main())
"""
DEAF = """
def deaf(arguments):
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

main.main = deaf
"""
"""A command that loses interrupts, as JAX's callbacks of the garbage collection do."""
THREAD = """
import threading

def wait(arguments):
    threading.Thread(target=time.sleep, args=(60,)).start()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return 130

main.main = wait
"""
"""A command whose thread would delay a normal exit."""
IMPORTS = """
def interrupt(arguments):
    raise KeyboardInterrupt

main.main = interrupt
"""


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    """Provide a process of `zdc generate` with another function in place of the command, while it runs."""
    command = [sys.executable, "-c", RUN.format(code), "generate"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(1)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("code", "interrupts"), [(DEAF, 2), (THREAD, 1)])
def test_a_command_ends_at_once(code, interrupts):
    with started(code) as process:
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_command_that_goes_on_says_how_to_end_it():
    with started(DEAF) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline().encode() == HINT
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_an_interrupted_import_is_one_line():
    with started(IMPORTS) as process:
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("arguments", [["chat", "m"], ["--no-program-cache", "serve", "m"]])
def test_commands_that_handle_interrupts_are_left_to_it(arguments, monkeypatch):
    monkeypatch.setattr(entry, "end_at_second_interrupt", lambda: pytest.fail("a second one would end it"))
    monkeypatch.setattr(entry, "_run_command", lambda arguments: 0)
    monkeypatch.setattr(sys, "argv", ["zdc", *arguments])
    assert entry.main() == 0
