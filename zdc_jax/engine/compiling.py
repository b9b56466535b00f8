"""Compilation of an engine's programs, several at a time, with a line of the log for each."""

import itertools
import logging
import signal
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import jax
from jax.stages import Compiled

from zdc_jax.engine import stored_programs
from zdc_jax.engine.uncompiled import Program
from zdc_jax.errors import CacheMemoryError

logger = logging.getLogger("zdc_jax.engine")


def compile_all(programs: dict[str, Program]) -> dict[str, Compiled]:
    """Compile programs and log each of them, since all together take up to minutes.

    Programs that an earlier process stored are loaded. XLA runs products to choose their kernels; programs
    that find too little memory next to others are compiled again, one by one. An interrupt waits for the
    programs that are being compiled. Meanwhile SIGINT ends the process.

    Raises:
      CacheMemoryError: the cache leaves too little memory to compile a program.
    """
    threads = ThreadPoolExecutor()
    files = {name: stored_programs.find_file(program) for name, program in programs.items()}
    compiled = _load_all(programs, files, threads)
    missing = {name: program for name, program in programs.items() if name not in compiled}
    counter, stopped, tracing = itertools.count(1), threading.Event(), threading.Lock()
    # Each thread has its own settings.
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision

    def compile_one(name: str) -> Compiled:
        with jax.default_device(device), jax.default_matmul_precision(precision):
            with tracing:  # Python's lock lets only one go on, and the first shall not wait for the last.
                if stopped.is_set():
                    raise CancelledError
                traced = missing[name].trace()
            lowered = traced.lower()
        began = time.monotonic()
        program = lowered.compile()
        seconds = time.monotonic() - began
        logger.info("compiled %d of %d programs (%s: %.1f s)", next(counter), len(missing), name, seconds)
        stored_programs.store(files[name], program)
        return program

    slow = "" if jax.default_backend() == "gpu" else "; without a GPU this takes minutes"
    if missing:
        logger.info("compiling %d programs%s", len(missing), slow)
    is_stored = any(files[name] for name in missing)
    try:
        with stored_programs.compile_anew() if is_stored else nullcontext():
            futures = {name: threads.submit(compile_one, name) for name in missing}
            together, short = _gather(futures)
            compiled |= together
            for name in short:
                compiled[name] = compile_one(name)
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise CacheMemoryError(
            f"the cache leaves too little memory to compile programs: {error}; lower cache_tokens, "
            "max_sequences or max_model_len"
        ) from error
    except KeyboardInterrupt:
        stopped.set()
        logger.warning("interrupted: programs that are being compiled end first; Ctrl-C ends at once")
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        threads.shutdown(cancel_futures=True)
        signal.signal(signal.SIGINT, before)
        raise
    finally:
        stopped.set()  # An interrupt or a failure drops the remaining programs.
        threads.shutdown(cancel_futures=True)
    stored_programs.trim()
    return compiled


def _gather(futures: dict[str, Future[Compiled]]) -> tuple[dict[str, Compiled], list[str]]:
    """Wait for programs; return the compiled ones, and the names of those that were short of memory."""
    compiled, short = {}, []
    for name, future in futures.items():
        try:
            compiled[name] = future.result()
        except jax.errors.JaxRuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            short.append(name)
    if short:
        logger.info("memory was short for %d programs next to others: compiling them again", len(short))
    return compiled, short


def _is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _load_all(
    programs: dict[str, Program], files: dict[str, Path | None], threads: ThreadPoolExecutor
) -> dict[str, Compiled]:
    """Load the programs that are stored, and log how many."""
    began = time.monotonic()
    results = threads.map(stored_programs.load, files.values(), programs.values())
    loaded = {name: program for name, program in zip(programs, results, strict=True) if program}
    if loaded:
        seconds = time.monotonic() - began
        logger.info("loaded %d of %d programs (%.1f s)", len(loaded), len(programs), seconds)
    return loaded


def needed_bytes(program: Compiled) -> int:
    """Return the bytes that a program needs in addition to its arguments; 0 if the device does not tell."""
    if (memory := program.memory_analysis()) is None:
        return 0
    # Results that reuse the memory of arguments need none of their own.
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
