"""Compiled programs on disk: stored once, loaded by the next process, and never fatal."""

import shutil
import warnings
from collections import namedtuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from convert.cli import entry, programs

NAMES = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for programs, and forget it after the test."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in NAMES}
    compilation_cache.reset_cache()
    yield programs.find_folder()
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compute() -> float:
    """Compile and run a program that no other test has; a new function object is always compiled."""
    return float(jax.jit(lambda x: (x * 3.25 + 1.5).sum())(jnp.arange(7.0)))


def test_programs_are_stored_and_a_damaged_one_is_compiled_again(folder, capsys):
    programs.keep_programs()
    assert str(folder) in capsys.readouterr().err
    assert compute() == 21 * 3.25 + 7 * 1.5
    stored = {path: path.read_bytes() for path in folder.glob("*-cache")}
    assert stored
    assert compute() == 78.75
    assert {path: path.read_bytes() for path in folder.glob("*-cache")} == stored
    for path, value in stored.items():
        path.write_bytes(value[: len(value) // 2])
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        assert compute() == 78.75
    programs.keep_programs()
    assert capsys.readouterr().err == ""  # The folder is named once.


def fail() -> None:
    raise RuntimeError("no home")


def test_nothing_is_kept_on_a_full_disk_or_against_the_users_will(folder, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
        programs.keep_programs()
    assert "has 1 bytes left" in capsys.readouterr().err
    folder.rmdir()
    folder.write_text("a file")
    programs.keep_programs()
    assert "compiled programs are not kept: " in capsys.readouterr().err
    with monkeypatch.context() as homeless:
        homeless.setattr(programs, "find_folder", fail)
        programs.keep_programs()
    assert "compiled programs are not kept: no home" in capsys.readouterr().err
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    programs.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_flag_comes_before_the_command(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["zdc", programs.FLAG, "--version"])
    assert entry.main() == 0
    assert not folder.exists()
    assert "zdc " in capsys.readouterr().out


def test_only_a_lock_that_threads_wait_for_is_not_warned_of(folder):
    programs.keep_programs()
    warnings.warn(
        "Error writing persistent compilation cache entry for 'jit_f': Timeout: the lock", stacklevel=1
    )
    with pytest.warns(UserWarning, match="No space"):
        warnings.warn("Error writing persistent compilation cache entry for 'jit_f': No space", stacklevel=1)
