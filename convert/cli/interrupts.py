"""Interrupts of a command while the main thread runs no Python, for example while XLA compiles."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

INTERRUPTED = 130
"""Exit status of an interrupted command."""
PATIENCE = 2.0
"""Seconds after the first interrupt from which a line says how to end at once."""
HINT = b"interrupted: what runs on the device or compiles ends first; Ctrl-C again ends at once\n"


@contextmanager
def end_at_second_interrupt() -> Iterator[None]:
    """End the process at the second Ctrl-C, which Python itself would only note."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watcher = Thread(target=_watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.shutdown(socket.SHUT_RDWR)
            watcher.join()


def _watch(reader: socket.socket) -> None:
    """Read the numbers of signals: give a hint some time after the first interrupt; exit at the second."""
    interrupts = 0
    while number := reader.recv(1):
        interrupts += number[0] == signal.SIGINT
        if interrupts == 1 and not select.select([reader], [], [], PATIENCE)[0]:
            os.write(2, HINT)
        if interrupts == 2:
            os._exit(INTERRUPTED)
