"""Compiled programs on disk, so that a second start of `zdc` does not compile again."""

import os
import shutil
import sys
import warnings
from pathlib import Path

FLAG = "--no-program-cache"
"""Argument before the command that keeps no programs."""
MOST_BYTES = 4 * 2**30
"""Largest size of all programs. The least recently used ones are deleted first."""
LEAST_FREE_BYTES = 2**30
"""Free space below which no programs are kept: one that is cut off would fail to load at every start."""


def find_folder() -> Path:
    """Return the folder of programs, in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zdc-jax" / "programs"


def keep_programs() -> None:
    """Store programs that JAX compiles, and load those that an earlier process stored.

    Several processes may share the folder. If it cannot be written, or its disk is nearly full, nothing is
    kept, and a line on standard error says so. The user's own settings of JAX's cache take precedence.
    """
    if {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & os.environ.keys():
        return
    try:
        folder = find_folder()
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # Who writes here runs code in this process.
        if (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
            raise OSError(f"{folder} has {free:,} bytes left")
        if not os.access(folder, os.W_OK):
            raise OSError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # A user without a home folder is a `RuntimeError`.
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return
    if is_new:
        print(f"compiled programs are kept in {folder}; zdc {FLAG} COMMAND keeps none", file=sys.stderr)
    # Threads that store many programs wait for each other, and then leave one out.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry.*Timeout")
    import jax  # Help imports this module, and JAX takes a second.

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
