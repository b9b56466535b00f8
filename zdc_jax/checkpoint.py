"""The converted folder: unmodified weights in our layout, complete or not there at all.

manifest.json      format version, config, source, fingerprint, all hashes; written last
embeddings/        one Orbax item: everything outside the layers
layers/000/ …      one Orbax item a layer (`zdc_jax.model.params` lists names and shapes)
tokenizer.json …   copied from the source
calibration/       moments and basis, written by `zdc calibrate`
"""

import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from zdc_jax.config import ModelConfig
from zdc_jax.errors import CheckpointError, foreign_errors_as
from zdc_jax.files import load_json, replace_folder
from zdc_jax.model.params import embedding_shapes, layer_shapes

FORMAT_VERSION = 2
OLD_VERSION = 1
"""Read too: such manifests hash neither themselves nor files beside the items."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


def _layer_name(index: int) -> str:
    return f"layers/{index:03d}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete converted folder, read item by item."""

    path: Path
    config: ModelConfig
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Reads the manifest, checks it, and that every item and file is there; those are hashed when read.

        Raises:
          CheckpointError: no such folder, not a (finished) converted folder, another format version, a
            damaged manifest, an item or file missing.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {what}; give a folder written by `zdc convert`")
        manifest = _read_manifest(path)
        try:
            config = ModelConfig.from_json(manifest["config"])
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{path / MANIFEST}: corrupt config: {error}") from error
        for item in _items(config):
            if item not in manifest["sha256"] or not (path / item).is_dir():
                raise CheckpointError(f"{path}: item {item} is missing; convert again")
        for name in manifest["files"]:
            if not (path / name).is_file():
                raise CheckpointError(f"{path}: file {name} is missing; convert again")
        return cls(path, config, manifest)

    @property
    def fingerprint(self) -> str:
        """Short hash of all weights, equal for equal weights; plans and bases name the model by it."""
        return self.manifest["fingerprint"]

    @property
    def calibration_path(self) -> Path:
        """Folder of moments and basis; absent before calibration."""
        return self.path / "calibration"

    def embeddings(self) -> dict[str, Any]:
        """Parameters outside the layers: nested dict of numpy arrays, see `embedding_shapes`.

        Raises:
          CheckpointError: the item is damaged (its hash changed), or does not fit the config.
        """
        return self._read("embeddings", embedding_shapes(self.config))

    def layer(self, index: int) -> dict[str, Any]:
        """Parameters of one layer, see `layer_shapes`; raises as `embeddings`."""
        return self._read(_layer_name(index), layer_shapes(self.config, index))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, without truncation and padding, or None where the folder has none.

        Raises:
          CheckpointError: it is damaged (its hash changed) or unreadable.
        """
        if (path := self._whole_file(TOKENIZER)) is None:
            return None
        with foreign_errors_as(CheckpointError, f"cannot read {path}"):
            tokenizer = Tokenizer.from_file(str(path))
            # Some are saved with what batches of training need; a prompt is taken whole, and as it is.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        return tokenizer

    def text(self, name: str) -> str | None:
        """A small text file beside the weights, or None where the folder has none of this name.

        Raises:
          CheckpointError: it is damaged (its hash changed) or no UTF-8.
        """
        if (path := self._whole_file(name)) is None:
            return None
        with foreign_errors_as(CheckpointError, f"cannot read {path}"):
            return path.read_text(encoding="utf-8")

    def check(self) -> None:
        """Recomputes all hashes; raises `CheckpointError` naming the first damaged item or file."""
        for item in _items(self.config):
            self._check_item(item)
        for name in self.manifest["files"]:
            self._check_file(name)

    def _check_item(self, item: str) -> None:
        with foreign_errors_as(CheckpointError, f"{self.path}: item {item} cannot be read"):
            found = _hash_folder(self.path / item)
        if found != self.manifest["sha256"][item]:
            raise CheckpointError(f"{self.path}: item {item} is damaged (its hash changed); convert again")

    def _whole_file(self, name: str) -> Path | None:
        """Path of a file whose hash was checked, or None where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        self._check_file(name)
        return path

    def _check_file(self, name: str) -> None:
        """Of a file that the manifest does not list nothing is known: it came later."""
        with foreign_errors_as(CheckpointError, f"{self.path}: file {name} cannot be read"):
            found = _hash_file(self.path / name).hex()
        if found != self.manifest["files"].get(name, found):
            raise CheckpointError(f"{self.path}: file {name} is damaged (its hash changed); convert again")

    def _read(self, item: str, shapes: dict[str, Any]) -> dict[str, Any]:
        # Hashed first: Orbax may wait for ever on a damaged item. It takes a third of the time of reading.
        self._check_item(item)
        with foreign_errors_as(CheckpointError, f"{self.path}: item {item} cannot be read"):
            tree = _restored((self.path / item).resolve())
        found = jax.tree.map(np.shape, tree)
        if found != shapes:
            raise CheckpointError(f"{self.path}: item {item} holds {found}, expected {shapes}")
        if wrong := {str(x.dtype) for x in jax.tree.leaves(tree)} - {self.config.dtype}:
            raise CheckpointError(
                f"{self.path}: item {item} holds {sorted(wrong)}, expected {self.config.dtype}"
            )
        return tree


def _restored(path: Path) -> Any:
    """Numpy arrays of one item, by this process alone: several need not read in step, nor on one topology."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with closing(ocp.Checkpointer(handler, multiprocessing_options=alone)) as orbax:
        stored = orbax.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
        return orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


class CheckpointWriter:
    """Writes a converted folder beside its final place and renames it there when complete.

    Used as a context manager; leaving it without `finish` (an error, an interrupt) removes what was written,
    entering it what killed processes left. Overwriting replaces the whole folder, its calibration included,
    and only ever a converted (or empty) one.

    Raises:
      CheckpointError: the output exists and `overwrite` is False or it is no converted folder, it cannot be
        made, or the disk is full.
    """

    def __init__(self, output: str | Path, *, overwrite: bool = False):
        self.output = Path(output).resolve()
        self.overwrite = overwrite
        self.partial = self._sibling("partial", os.getpid())
        self._weights: dict[str, str] = {}

    def __enter__(self) -> Self:
        if glob.has_magic(str(self.output)):
            # Orbax globs inside the folder it writes and would leave out arrays without a word.
            raise CheckpointError(f"{self.output}: the path must not hold any of * ? [")
        if self.output.exists():
            if not self.overwrite:
                raise CheckpointError(f"{self.output} exists; choose another folder or pass --overwrite")
            if not _is_replaceable(self.output):
                raise CheckpointError(
                    f"{self.output} is not a converted folder, so --overwrite leaves it alone; "
                    "choose another or delete it yourself"
                )
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            self.partial.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.output}: {error}") from error
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
            raise CheckpointError(f"no space left for {self.output}; nothing was written there") from error

    def write_embeddings(self, tree: Mapping[str, Any]) -> None:
        """Writes the parameters outside the layers."""
        self._write("embeddings", tree)

    def write_layer(self, index: int, tree: Mapping[str, Any]) -> None:
        """Writes one layer's parameters."""
        self._write(_layer_name(index), tree)

    def write_file(self, name: str, content: str | bytes) -> None:
        """Writes a small file, such as the tokenizer."""
        data = content.encode() if isinstance(content, str) else content
        (self.partial / name).write_bytes(data)

    def finish(self, config: ModelConfig, source: Mapping[str, Any]) -> Checkpoint:
        """Hashes every item and file, writes the manifest last, and renames the folder into place.

        Raises:
          CheckpointError: an item of this config was not written.
        """
        items = _items(config)
        if absent := [item for item in items if item not in self._weights]:
            raise CheckpointError(f"{self.output}: items never written: {', '.join(absent)}")
        weights = "".join(self._weights[item] for item in items)
        manifest = {
            "format_version": FORMAT_VERSION,
            "config": config.to_json(),
            "source": dict(source),
            "fingerprint": hashlib.sha256(weights.encode()).hexdigest()[:16],
            "sha256": {item: _hash_folder(self.partial / item) for item in items},
            "files": {path.name: _hash_file(path).hex() for path in self.partial.iterdir() if path.is_file()},
        }
        manifest["checksum"] = _checksum(manifest)
        (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*self.partial.rglob("*"), self.partial):
            _sync(path)
        self._publish()
        return Checkpoint.open(self.output)

    def _write(self, item: str, tree: Mapping[str, Any]) -> None:
        self._weights[item] = _hash_arrays(tree)
        self._orbax.save(self.partial / item, tree)
        self._orbax.wait_until_finished()

    def _publish(self) -> None:
        """Renames the finished folder into place; a failure leaves the old one where it was."""
        if self.overwrite:
            replace_folder(self.partial, self.output, self._sibling("replaced", os.getpid()))
        else:
            self.partial.rename(self.output)
        _sync(self.output.parent)

    def _sibling(self, role: str, pid: int | str) -> Path:
        return self.output.with_name(f".{self.output.name}.{role}-{pid}")

    def _remove_stale(self) -> None:
        """Removes what dead processes left; a replaced folder only if its successor is in place."""
        for role in ("partial", "replaced") if self.output.exists() else ("partial",):
            for stale in self.output.parent.glob(glob.escape(self._sibling(role, "").name) + "*"):
                if not _is_other_process(stale.name.rpartition("-")[2]):
                    shutil.rmtree(stale, ignore_errors=True)


def _items(config: ModelConfig) -> list[str]:
    return ["embeddings", *(_layer_name(index) for index in range(config.num_layers))]


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder, whole, of a version that is read, and with the tables that are read."""
    try:
        manifest = load_json(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: not a converted folder, or its conversion did not finish; "
            "run `zdc convert`"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / MANIFEST}: {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version not in (OLD_VERSION, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format_version={version!r:.80}, this release reads {OLD_VERSION} and {FORMAT_VERSION}; "
            "convert again"
        )
    # A damaged version does not make a new manifest an old one.
    if (version != OLD_VERSION or "checksum" in manifest) and manifest.get("checksum") != _checksum(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged (its checksum changed); convert again")
    manifest = {"files": {}} | manifest
    for name, kind in (("config", dict), ("fingerprint", str), ("sha256", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"{path / MANIFEST}: {name} is missing or corrupt; convert again")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 over what a manifest says besides."""
    said = {name: value for name, value in manifest.items() if name != "checksum"}
    with foreign_errors_as(CheckpointError, f"{MANIFEST} cannot be hashed"):
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _hash_folder(folder: Path) -> str:
    """sha256 over names and contents of all files, in order of name."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(os.fsencode(f"{path.relative_to(folder)}\n"))
        total.update(_hash_file(path))
    return total.hexdigest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _hash_arrays(tree: Mapping[str, Any]) -> str:
    """sha256 over paths, dtypes, shapes and values; the files differ between runs, as Orbax dates them."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(tree)):
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}\n".encode())
        total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return total.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_replaceable(path: Path) -> bool:
    """Whether a folder is empty or was written by `CheckpointWriter`, of whatever version."""
    try:
        return not any(path.iterdir()) or "format_version" in load_json(path / MANIFEST)
    except (OSError, ValueError, TypeError):
        return False


def _is_other_process(pid: str) -> bool:
    """Whether another process has this id; our own may be a killed one's, as containers all start at 1."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk (tensorstore only says so in its text)."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
