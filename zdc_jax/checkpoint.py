"""Reading and writing of converted folders: a model's original weights in the layout of this project.

A converted folder contains:

- `manifest.json`: format version, config, source, fingerprint and all hashes; written last
- `embeddings/`: one Orbax item with all parameters outside the layers
- `layers/000/`, …: one Orbax item per layer (`zdc_jax.model.params` lists names and shapes)
- `tokenizer.json`, …: files copied from the source
- `calibration/`: moments, basis and profile, written by `zdc calibrate`
"""

import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from zdc_jax.config import ModelConfig
from zdc_jax.errors import CheckpointError, describe_error, foreign_errors_as
from zdc_jax.files import hash_arrays, hash_file, load_json, replace_folder
from zdc_jax.model.params import embedding_shapes, layer_shapes

FORMAT_VERSION = 2
OLD_VERSION = 1
"""Older format version that can still be read. Its manifests have no checksum and no hashes of files."""
RECONVERT = "run `zdc convert` again with --overwrite, which also removes the calibration"
"""Advice in errors about an incomplete or damaged folder."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHUNK_BYTES = 16 * 2**20
"""Largest part of an array that is stored on its own. Parts are decompressed in parallel."""


def _layer_name(index: int) -> str:
    return f"layers/{index:03d}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Complete converted folder, read one item at a time.

    Attributes:
      path: the folder.
      config: architecture of the model.
      manifest: contents of `manifest.json`.
    """

    path: Path
    config: ModelConfig
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a folder; check its manifest and that all items and files exist.

        The hashes of items and files are checked when they are read.

        Raises:
          CheckpointError: the folder does not exist, is not a complete converted folder or has another format
            version; its manifest is damaged; an item or file is missing.
        """
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(f"path={path!r:.80} must be the path of a folder written by `zdc convert`")
        path = Path(path)
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {problem}; pass a folder written by `zdc convert`")
        manifest = _read_manifest(path)
        try:
            config = ModelConfig.from_json(manifest["config"])
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{path / MANIFEST}: corrupt config: {error}") from error
        for item in _items(config):
            if item not in manifest["sha256"] or not (path / item).is_dir():
                raise CheckpointError(f"{path}: item {item} is missing; {RECONVERT}")
        for name in manifest["files"]:
            if not (path / name).is_file():
                raise CheckpointError(f"{path}: file {name} is missing; {RECONVERT}")
        return cls(path, config, manifest)

    @property
    def fingerprint(self) -> str:
        """Hash of all weights, 16 hex digits. Plans and bases identify their model by it."""
        return self.manifest["fingerprint"]

    @property
    def calibration_path(self) -> Path:
        """Folder of the moments, basis and profile. It does not exist before `zdc calibrate`."""
        return self.path / "calibration"

    @property
    def calibration_advice(self) -> str:
        """Advice in errors about a folder without a calibrated basis: the command that makes one."""
        if (self.calibration_path / "moments").exists():
            return (
                f"run `zdc calibrate {self.path} --from-moments`, which makes the basis from the stored "
                "moments without reading the text again"
            )
        return f"run `zdc calibrate {self.path} TEXT`"

    def embeddings(self) -> dict[str, Any]:
        """Return the parameters outside the layers, a nested dict of numpy arrays (`embedding_shapes`).

        Raises:
          CheckpointError: the item is damaged (its hash changed) or does not match the config.
        """
        return self._read("embeddings", embedding_shapes(self.config))

    def layer(self, index: int) -> dict[str, Any]:
        """Return the parameters of one layer (`layer_shapes`).

        Raises:
          CheckpointError: the item is damaged (its hash changed) or does not match the config.
        """
        return self._read(_layer_name(index), layer_shapes(self.config, index))

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer without truncation and padding, or None if the folder has no tokenizer.

        All callers share one object, which they must not change.

        Raises:
          CheckpointError: the file is damaged (its hash changed) or unreadable.
        """
        if (path := self._find_file(TOKENIZER)) is None:
            return None
        with foreign_errors_as(CheckpointError, f"cannot read {path}"):
            return _read_tokenizer(path.resolve(), path.stat().st_mtime_ns)

    def text(self, name: str) -> str | None:
        """Return the contents of a text file in the folder, or None if the file does not exist.

        Raises:
          CheckpointError: the file is damaged (its hash changed) or not UTF-8.
        """
        if (path := self._find_file(name)) is None:
            return None
        with foreign_errors_as(CheckpointError, f"cannot read {path}"):
            return path.read_text(encoding="utf-8")

    def check(self) -> None:
        """Check the hashes of all items and files; raise `CheckpointError` for the first damaged one."""
        for item in _items(self.config):
            self._check_item(item)
        for name in self.manifest["files"]:
            self._check_file(name)

    def _check_item(self, item: str) -> None:
        with foreign_errors_as(CheckpointError, f"{self.path}: item {item} cannot be read"):
            digest = _hash_folder(self.path / item)
        if digest != self.manifest["sha256"][item]:
            raise CheckpointError(f"{self.path}: item {item} is damaged (its hash changed); {RECONVERT}")

    def _find_file(self, name: str) -> Path | None:
        """Return the path of a file after checking its hash, or None if the file does not exist."""
        path = self.path / name
        if not path.exists():
            return None
        self._check_file(name)
        return path

    def _check_file(self, name: str) -> None:
        """Check the hash of a file. Files that the manifest does not list are newer and are not checked."""
        with foreign_errors_as(CheckpointError, f"{self.path}: file {name} cannot be read"):
            digest = hash_file(self.path / name).hex()
        if digest != self.manifest["files"].get(name, digest):
            raise CheckpointError(f"{self.path}: file {name} is damaged (its hash changed); {RECONVERT}")

    def _read(self, item: str, shapes: dict[str, Any]) -> dict[str, Any]:
        # The hash is checked first because Orbax can wait forever on a damaged item.
        self._check_item(item)
        with foreign_errors_as(CheckpointError, f"{self.path}: item {item} cannot be read"):
            tree = _restore_arrays((self.path / item).resolve())
        stored_shapes = jax.tree.map(np.shape, tree)
        if stored_shapes != shapes:
            raise CheckpointError(f"{self.path}: item {item} has shapes {stored_shapes}, expected {shapes}")
        if wrong := {str(x.dtype) for x in jax.tree.leaves(tree)} - {self.config.dtype}:
            raise CheckpointError(
                f"{self.path}: item {item} has dtypes {sorted(wrong)}, expected {self.config.dtype}"
            )
        return tree


@lru_cache(maxsize=4)
def _read_tokenizer(path: Path, changed: int) -> Tokenizer:
    """Return the tokenizer in a file that was changed at the time `changed`, in nanoseconds."""
    tokenizer = Tokenizer.from_file(str(path))
    # Some tokenizers are saved with the truncation and padding of training batches.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _restore_arrays(path: Path) -> Any:
    """Return the numpy arrays of one item.

    The process reads alone, so processes need neither synchronize nor share one topology.
    """
    process = jax.process_index()
    multiprocessing = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=multiprocessing)
    with closing(ocp.Checkpointer(handler, multiprocessing_options=multiprocessing)) as orbax:
        stored = orbax.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
        return orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


class CheckpointWriter:
    """Context manager that writes a converted folder atomically.

    The folder is written under a temporary name in the same parent folder, and `finish` renames it. Leaving
    the context without `finish` deletes the temporary folder. Entering the context deletes the temporary
    folders of processes that were killed. Overwriting replaces the whole folder, including its calibration;
    only converted or empty folders are replaced.

    Args:
      output: folder to write.
      overwrite: whether to replace an existing converted folder.

    Raises:
      CheckpointError: the output exists and `overwrite` is False, or the output is not a converted folder,
        cannot be created, or exceeds the free disk space.
    """

    def __init__(self, output: str | Path, *, overwrite: bool = False):
        self.output = Path(output).resolve()
        self.overwrite = overwrite
        self.partial = self._sibling("partial", os.getpid())
        self._weights: dict[str, str] = {}

    def __enter__(self) -> Self:
        if glob.has_magic(str(self.output)):
            # Orbax expands the path as a glob pattern and would skip arrays silently.
            raise CheckpointError(f"{self.output}: the path must not contain any of * ? [")
        if self.output.exists():
            if not self.overwrite:
                raise CheckpointError(f"{self.output} exists; choose another folder or pass --overwrite")
            if not _is_replaceable(self.output):
                raise CheckpointError(
                    f"{self.output} is not a converted folder, and --overwrite replaces only converted "
                    "folders; delete it or choose another folder"
                )
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            self.partial.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.output}: {describe_error(error)}") from error
        self._orbax = ocp.StandardCheckpointer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._orbax.close()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)
        if _is_disk_full(error):
            raise CheckpointError(
                f"no space left on the disk of {self.output}; nothing was written there"
            ) from error

    def write_embeddings(self, tree: Mapping[str, Any]) -> None:
        """Write the parameters outside the layers."""
        self._write("embeddings", tree)

    def write_layer(self, index: int, tree: Mapping[str, Any]) -> None:
        """Write the parameters of one layer."""
        self._write(_layer_name(index), tree)

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a small file, for example the tokenizer."""
        data = content.encode() if isinstance(content, str) else content
        (self.partial / name).write_bytes(data)

    def finish(self, config: ModelConfig, source: Mapping[str, Any]) -> Checkpoint:
        """Write the manifest with the hashes of all items and files, and rename the folder to `output`.

        Args:
          config: architecture of the model.
          source: description of the original model, for the manifest.

        Raises:
          CheckpointError: an item of the model was not written.
        """
        items = _items(config)
        if missing := [item for item in items if item not in self._weights]:
            raise CheckpointError(f"{self.output}: items not written: {', '.join(missing)}")
        weights = "".join(self._weights[item] for item in items)
        manifest = {
            "format_version": FORMAT_VERSION,
            "config": config.to_json(),
            "source": dict(source),
            "fingerprint": hashlib.sha256(weights.encode()).hexdigest()[:16],
            "sha256": {item: _hash_folder(self.partial / item) for item in items},
            "files": {path.name: hash_file(path).hex() for path in self.partial.iterdir() if path.is_file()},
        }
        manifest["checksum"] = _checksum(manifest)
        (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*self.partial.rglob("*"), self.partial):
            _sync(path)
        if self.overwrite:
            replace_folder(self.partial, self.output, self._sibling("replaced", os.getpid()))
        else:
            self.partial.rename(self.output)
        _sync(self.output.parent)
        return Checkpoint.open(self.output)

    def _write(self, item: str, tree: Mapping[str, Any]) -> None:
        # The hash is that of the arrays. The files differ between runs because Orbax writes timestamps.
        leaves = jax.tree_util.tree_leaves_with_path(dict(tree))
        self._weights[item] = hash_arrays((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
        in_chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), dict(tree))
        self._orbax.save(self.partial / item, tree, save_args=in_chunks)
        self._orbax.wait_until_finished()

    def _sibling(self, role: str, pid: int | str) -> Path:
        return self.output.with_name(f".{self.output.name}.{role}-{pid}")

    def _remove_stale(self) -> None:
        """Delete the temporary folders of dead processes; replaced folders only if `output` exists."""
        for role in ("partial", "replaced") if self.output.exists() else ("partial",):
            for stale in self.output.parent.glob(glob.escape(self._sibling(role, "").name) + "*"):
                if not _is_other_process(stale.name.rpartition("-")[2]):
                    shutil.rmtree(stale, ignore_errors=True)


def _items(config: ModelConfig) -> list[str]:
    return ["embeddings", *(_layer_name(index) for index in range(config.num_layers))]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder after checking its version, checksum and required entries."""
    try:
        manifest = load_json(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a converted folder, or its conversion did not finish; "
            "run `zdc convert`"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / MANIFEST}: {describe_error(error)}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version not in (OLD_VERSION, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format_version={version!r:.80} is not supported; this release reads {OLD_VERSION} and "
            f"{FORMAT_VERSION}; {RECONVERT}"
        )
    # A new manifest whose version is damaged must not pass for an old one.
    if (version != OLD_VERSION or "checksum" in manifest) and manifest.get("checksum") != _checksum(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged (its checksum changed); {RECONVERT}")
    manifest = {"files": {}} | manifest
    for name, kind in (("config", dict), ("fingerprint", str), ("sha256", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"{path / MANIFEST}: {name} is missing or corrupt; {RECONVERT}")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of all entries of a manifest except `checksum`."""
    entries = {name: value for name, value in manifest.items() if name != "checksum"}
    with foreign_errors_as(CheckpointError, f"{MANIFEST} cannot be hashed"):
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _hash_folder(folder: Path) -> str:
    """Return the sha256 of the names and contents of all files, in order of name."""
    total = hashlib.sha256()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:
        for path, digest in zip(paths, threads.map(hash_file, paths), strict=True):
            total.update(os.fsencode(f"{path.relative_to(folder)}\n"))
            total.update(digest)
    return total.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_replaceable(path: Path) -> bool:
    """Return whether a folder is empty or was written by any version of `CheckpointWriter`."""
    try:
        return not any(path.iterdir()) or "format_version" in load_json(path / MANIFEST)
    except (OSError, ValueError, TypeError):
        return False


def _is_other_process(pid: str) -> bool:
    """Return whether another process with this id is running.

    The id of this process can be that of a killed process, because containers start counting at 1.
    """
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()


def _is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a full disk. Tensorstore reports it only in the message."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
