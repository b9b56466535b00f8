"""Compilation of an engine's programs, several at a time, with a line of the log for each."""

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jax.stages import Compiled, Lowered

logger = logging.getLogger("zdc_jax.engine")

Lowering = Callable[[], Lowered]
"""Function that lowers a program."""


def compile_all(lowerings: dict[str, Lowering]) -> dict[str, Compiled]:
    """Compile programs and log each of them, since all together take up to minutes."""
    counter = itertools.count(1)

    def compile_one(name: str, lowered: Lowered) -> Compiled:
        began = time.monotonic()
        program = lowered.compile()
        seconds = time.monotonic() - began
        logger.info("compiled %d of %d programs (%s: %.1f s)", next(counter), len(lowerings), name, seconds)
        return program

    # XLA compiles without Python's lock, so the next program is lowered meanwhile.
    threads = ThreadPoolExecutor()
    try:
        futures = {name: threads.submit(compile_one, name, lower()) for name, lower in lowerings.items()}
        return {name: future.result() for name, future in futures.items()}
    finally:
        threads.shutdown(cancel_futures=True)  # An interrupt drops the remaining programs.
