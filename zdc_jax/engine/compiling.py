"""Compilation of an engine's programs, several at a time, with a line of the log for each."""

import itertools
import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.stages import Compiled, Lowered

logger = logging.getLogger("zdc_jax.engine")

Lowering = Callable[[], Lowered]
"""Function that lowers a program."""


def compile_all(lowerings: dict[str, Lowering]) -> dict[str, Compiled]:
    """Compile programs and log each of them, since all together take up to minutes.

    An interrupt waits for the programs that are being compiled. Meanwhile SIGINT ends the process.
    """
    counter = itertools.count(1)

    def compile_one(name: str, lowered: Lowered) -> Compiled:
        began = time.monotonic()
        program = lowered.compile()
        seconds = time.monotonic() - began
        logger.info("compiled %d of %d programs (%s: %.1f s)", next(counter), len(lowerings), name, seconds)
        return program

    # XLA compiles without Python's lock, so the next program is lowered meanwhile.
    threads = ThreadPoolExecutor()
    slow = "" if jax.default_backend() == "gpu" else "; without a GPU this takes minutes"
    logger.info("compiling %d programs%s", len(lowerings), slow)
    try:
        futures = {name: threads.submit(compile_one, name, lower()) for name, lower in lowerings.items()}
        return {name: future.result() for name, future in futures.items()}
    except KeyboardInterrupt:
        logger.warning("interrupted: programs that are being compiled end first; Ctrl-C ends at once")
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        threads.shutdown(cancel_futures=True)
        signal.signal(signal.SIGINT, before)
        raise
    finally:
        threads.shutdown(cancel_futures=True)  # An interrupt drops the remaining programs.
