"""The converted folder: unmodified weights in our layout, complete or not there at all.

    manifest.json      format version, config, source, hash of every item; written last
    embeddings/        one Orbax item: everything outside the layers
    layers/000/ …      one Orbax item a layer (`zdc_jax.model.params` lists names and shapes)
    tokenizer.json …   copied from the source
    calibration/       moments and basis, written by `zdc calibrate`
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from zdc_jax.config import ModelConfig
from zdc_jax.errors import CheckpointError
from zdc_jax.model.params import embedding_shapes, layer_shapes

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


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
        """Reads the manifest and checks that every item is there.

        Raises:
          CheckpointError: no such folder, not a (finished) converted folder, another format version, an
            item missing.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; give one written by `zdc convert`")
        try:
            manifest = json.loads((path / MANIFEST).read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} has no {MANIFEST}: not a converted folder, or its conversion did not finish; "
                "run `zdc convert`"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path / MANIFEST}: {error}") from error
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version={version!r}, this release reads {FORMAT_VERSION}; convert again"
            )
        try:
            config = ModelConfig.from_json(manifest["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path / MANIFEST}: corrupt config: {error}") from error
        for item in _items(config):
            if item not in manifest.get("sha256", {}) or not (path / item).is_dir():
                raise CheckpointError(f"{path}: item {item} is missing; convert again")
        return cls(path, config, manifest)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all weights; plans and bases name the model by it."""
        joined = "".join(self.manifest["sha256"][item] for item in _items(self.config))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    @property
    def calibration_path(self) -> Path:
        """Folder of moments and basis; absent before calibration."""
        return self.path / "calibration"

    def embeddings(self) -> dict[str, Any]:
        """Parameters outside the layers: nested dict of numpy arrays, see `embedding_shapes`."""
        return self._read("embeddings", embedding_shapes(self.config))

    def layer(self, index: int) -> dict[str, Any]:
        """Parameters of one layer: nested dict of numpy arrays, see `layer_shapes`."""
        return self._read(_layer_name(index), layer_shapes(self.config))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where the folder has none."""
        path = self.path / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.exists() else None

    def check(self) -> None:
        """Recomputes all hashes; raises `CheckpointError` naming the first damaged item."""
        for item in _items(self.config):
            if _hash_folder(self.path / item) != self.manifest["sha256"][item]:
                raise CheckpointError(f"{self.path}: item {item} is damaged (its hash changed)")

    def _read(self, item: str, shapes: dict[str, Any]) -> dict[str, Any]:
        try:
            tree = ocp.StandardCheckpointer().restore((self.path / item).resolve())
        except Exception as error:
            # Orbax raises many kinds for a damaged item; all mean the same here.
            raise CheckpointError(f"{self.path}: item {item} cannot be read: {error}") from error
        found = jax.tree.map(np.shape, tree)
        if found != shapes:
            raise CheckpointError(f"{self.path}: item {item} holds {found}, expected {shapes}")
        return jax.tree.map(np.asarray, tree)


class CheckpointWriter:
    """Writes a converted folder beside its final place and renames it there when complete.

    Used as a context manager; leaving it without `finish` (an error, an interrupt) removes what was written.

    Raises:
      CheckpointError: the output exists and `overwrite` is False, its parent is no folder, or the disk is
        full.
    """

    def __init__(self, output: str | Path, *, overwrite: bool = False):
        self.output = Path(output).absolute()
        self.overwrite = overwrite
        self.partial = self.output.with_name(f".{self.output.name}.partial-{os.getpid()}")
        self._orbax = ocp.StandardCheckpointer()

    def __enter__(self) -> Self:
        if self.output.exists() and not self.overwrite:
            raise CheckpointError(f"{self.output} exists; choose another folder or pass --overwrite")
        if self.output.is_file():
            raise CheckpointError(f"{self.output} is a file; give a folder")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        for stale in self.output.parent.glob(f".{self.output.name}.partial-*"):
            if not _is_alive(stale.name.rpartition("-")[2]):
                shutil.rmtree(stale, ignore_errors=True)
        self.partial.mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._orbax.close()
        shutil.rmtree(self.partial, ignore_errors=True)
        if _is_disk_full(error):
            raise CheckpointError(
                f"no space left for {self.output}; nothing was written there"
            ) from error

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
        """Hashes every item, writes the manifest last, and renames the folder into place."""
        manifest = {
            "format_version": FORMAT_VERSION,
            "config": config.to_json(),
            "source": dict(source),
            "sha256": {item: _hash_folder(self.partial / item) for item in _items(config)},
        }
        with (self.partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if self.output.exists():
            aside = self.output.with_name(f".{self.output.name}.replaced-{os.getpid()}")
            self.output.rename(aside)
            self.partial.rename(self.output)
            shutil.rmtree(aside)
        else:
            self.partial.rename(self.output)
        return Checkpoint.open(self.output)

    def _write(self, item: str, tree: Mapping[str, Any]) -> None:
        self._orbax.save(self.partial / item, tree)
        self._orbax.wait_until_finished()


def _items(config: ModelConfig) -> list[str]:
    return ["embeddings", *(_layer_name(index) for index in range(config.num_layers))]


def _hash_folder(folder: Path) -> str:
    """sha256 over names and contents of all files, in order of name."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder)}\n".encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk (tensorstore only says so in its text)."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
