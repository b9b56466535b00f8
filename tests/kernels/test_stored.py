"""Values on disk: folders by version, damage, full disks, and the limit of their size."""

import os
from pathlib import Path

import jax
import pytest

from kernels_pallas import stored

SOURCES = Path(stored.__file__).parent


@pytest.fixture
def programs(tmp_path):
    """Return the folder in which JAX stores compiled programs during a test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_folder_belongs_to_a_version_of_the_sources(programs, tmp_path):
    (tmp_path / "sources").mkdir()
    source = tmp_path / "sources" / "one.py"
    source.write_text("1")
    folder = stored.find_folder("kind", tmp_path / "sources")
    assert folder == stored.find_folder("kind", tmp_path / "sources")
    assert folder.parent == programs / "kind"
    source.write_text("2")
    stored._hash_sources.cache_clear()  # As a new process has.
    assert stored.find_folder("kind", tmp_path / "sources") != folder
    assert stored.find_folder("kind", SOURCES) != folder


def test_nothing_is_kept_without_a_folder_or_in_a_remote_store(programs):
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert stored.find_folder("kind", SOURCES) is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert stored.find_folder("kind", SOURCES) is None


def test_values_replace_those_of_other_versions(tmp_path):
    old, file = tmp_path / "kind" / "old" / "one", tmp_path / "kind" / "new" / "one"
    assert stored.load(old) is None
    stored.store(old, {"a": 1})
    assert stored.load(old) == {"a": 1}
    stored.store(file, [2])
    assert stored.load(file) == [2]
    assert not old.parent.exists()
    file.write_bytes(file.read_bytes()[:3])
    assert stored.load(file) is None


def test_a_full_disk_stores_nothing(tmp_path, monkeypatch):
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    stored.store(tmp_path / "kind" / "version" / "one", 1)
    assert not any((tmp_path / "kind" / "version").iterdir())


def test_the_least_recently_used_values_are_deleted_first(tmp_path):
    for number, name in enumerate("abc"):
        (tmp_path / name).write_bytes(b"\x80\x04K\x01.")  # The number 1, pickled.
        os.utime(tmp_path / name, (number, number))
    stored.trim(tmp_path, 15)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
    assert stored.load(tmp_path / "a") == 1
    stored.trim(tmp_path, 14)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c"}
    stored.trim(tmp_path / "missing", 0)


def test_a_read_only_folder_is_read(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    stored.store(tmp_path / "kind" / "version" / "one", 1)
    monkeypatch.setattr(os, "utime", fail)
    assert stored.load(tmp_path / "kind" / "version" / "one") == 1
