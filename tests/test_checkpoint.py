"""Converted folder: equal when read back, damage refused by name, and either complete or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from conftest import CONFIGS, LLAMA
from hf_variants import write_tokenizer
from tokenizers import Tokenizer, models

from benchmarks.random_weights import random_params
from zdc_jax import checkpoint as checkpoints
from zdc_jax.checkpoint import MANIFEST, TOKENIZER, Checkpoint, CheckpointWriter
from zdc_jax.config import DTYPES, ModelConfig
from zdc_jax.errors import CheckpointError

ITEMS = ("embeddings", "layers/000", "layers/001", "layers/002")


def parameters(config: ModelConfig, seed: int = 0) -> dict:
    return jax.tree.map(np.asarray, random_params(config, jax.random.key(seed)))


def write(path: Path, config: ModelConfig = LLAMA, *, seed: int = 0, overwrite: bool = False) -> Checkpoint:
    params = parameters(config, seed)
    with CheckpointWriter(path, overwrite=overwrite) as writer:
        writer.write_embeddings(params["embeddings"])
        for index, layer in enumerate(params["layers"]):
            writer.write_layer(index, layer)
        return writer.finish(config, {"name": "random"})


def interrupt(path: Path, error: BaseException | type[BaseException], *, overwrite: bool = False) -> None:
    """Write one item, then fail."""
    with CheckpointWriter(path, overwrite=overwrite) as writer:
        writer.write_embeddings(parameters(LLAMA, 1)["embeddings"])
        raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_equal_trees(found: dict, expected: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, np.ndarray)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.matrix
def test_items_are_read_back_as_numpy(family, dtype, tmp_path):
    config = replace(CONFIGS[family], dtype=dtype)
    write(tmp_path / "model", config)
    checkpoint, expected = Checkpoint.open(tmp_path / "model"), parameters(config)
    assert checkpoint.config == config
    assert checkpoint.manifest["source"] == {"name": "random"}
    assert_equal_trees(checkpoint.embeddings(), expected["embeddings"])
    for index, layer in enumerate(expected["layers"]):
        assert_equal_trees(checkpoint.layer(index), layer)
    checkpoint.check()


def test_large_arrays_are_stored_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 1024)
    stored, expected = write(tmp_path / "model").embeddings(), parameters(LLAMA)["embeddings"]
    assert_equal_trees(stored, expected)
    base = f"file://{tmp_path}/model/embeddings/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base}, "path": "tokens"}
    chunk = tensorstore.open(spec, read=True).result().chunk_layout.read_chunk.shape
    assert np.prod(chunk) * stored["tokens"].itemsize <= 1024 < stored["tokens"].nbytes


def test_fingerprint_names_the_weights(tmp_path):
    first, again = write(tmp_path / "a"), write(tmp_path / "b")
    assert first.fingerprint == again.fingerprint == Checkpoint.open(tmp_path / "a").fingerprint
    assert write(tmp_path / "c", seed=1).fingerprint != first.fingerprint
    assert write(tmp_path / "d", replace(LLAMA, dtype="bfloat16")).fingerprint != first.fingerprint


def test_tokenizer_and_calibration_lie_beside(tmp_path):
    checkpoint = write(tmp_path / "model")
    assert checkpoint.tokenizer() is None
    write_tokenizer(checkpoint.path, 7)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer.get_vocab_size() == 7
    assert checkpoint.calibration_path == tmp_path / "model" / "calibration"


def test_a_tokenizer_is_read_once_until_its_file_changes(tmp_path):
    folder = tmp_path / "model"
    write(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / TOKENIZER))
    first = Checkpoint.open(folder).tokenizer()
    assert first is Checkpoint.open(folder).tokenizer() is not None
    Tokenizer(models.WordLevel({"b": 0}, unk_token="b")).save(str(folder / TOKENIZER))
    os.utime(folder / TOKENIZER, ns=(0, 0))
    assert Checkpoint.open(folder).tokenizer().get_vocab() == {"b": 0}


def test_no_prompt_is_cut_or_padded(tmp_path):
    checkpoint = write(tmp_path / "model")
    write_tokenizer(checkpoint.path, 7)
    saved = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=10**9)
    saved.save(str(checkpoint.path / "tokenizer.json"))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("w1 w2 w3").ids == [1, 2, 3]


# --- Opening what is not a converted folder --------------------------------------------------------------


def make_old(path: Path, **changes: object) -> None:
    """Rewrite the manifest in the format of the first releases, without hashes of itself and of files."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["checksum"], manifest["files"]
    (path / MANIFEST).write_text(json.dumps(manifest | {"format_version": 1} | changes))


def edit_config(path: Path, **changes: object) -> None:
    make_old(path, config=json.loads((path / MANIFEST).read_text())["config"] | changes)


def describe_at_once(path: Path, num_layers: int) -> None:
    """Rewrite the config in the format of the first releases, with one description of all layers."""
    config = json.loads((path / MANIFEST).read_text())["config"]
    rope = config.pop("layers")[0]["rope"]
    make_old(path, config=config | {"num_layers": num_layers, "rope": rope, "pre_norm": True})


def remove_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), "conversion did not finish.*zdc convert"),
    "manifest is no JSON": (lambda p: (p / MANIFEST).write_text("{"), "cannot read .*manifest.json"),
    "manifest is a list": (lambda p: (p / MANIFEST).write_text("[]"), "format_version=None"),
    "other version": (
        lambda p: make_old(p, format_version=3),
        "format_version=3 is not supported; this release reads 1 and 2",
    ),
    "config lacks fields": (lambda p: make_old(p, config={"rope": None}), "corrupt config"),
    "a count is text": (lambda p: edit_config(p, num_layers="3"), "corrupt config: "),
    "no KV heads": (lambda p: edit_config(p, num_kv_heads=0), "corrupt config: "),
    "endless layers": (lambda p: describe_at_once(p, 2**31), "num_layers.*from 1 to 4096"),
    "a huge count": (lambda p: edit_config(p, max_positions=2**31), "max_positions=.* from 1 to 2147483647"),
    "NaN": (lambda p: edit_config(p, norm_eps=float("nan")), "norm_eps=nan must be"),
    "no hashes": (lambda p: make_old(p, sha256={}), "item embeddings is missing"),
    "hashes are no table": (lambda p: make_old(p, sha256=None), "sha256 is missing or corrupt"),
    "nested junk": (lambda p: (p / MANIFEST).write_text("[" * 10**5), "cannot read .*nested too deep"),
    "no layer": (lambda p: remove_folder(p / "layers/001"), "item layers/001 is missing"),
    "no embeddings": (lambda p: remove_folder(p / "embeddings"), "item embeddings is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.matrix
def test_open_names_what_is_wrong(name, tmp_path):
    write(tmp_path / "model")
    damage, message = DAMAGE[name]
    damage(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "model")


def test_open_names_paths_that_are_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="absent does not exist"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is not a folder"):
        Checkpoint.open(tmp_path / "file")


def test_folders_of_the_first_version_are_read(tmp_path):
    new = write(tmp_path / "model")
    describe_at_once(new.path, LLAMA.num_layers)
    old = Checkpoint.open(new.path)
    old.check()
    assert (old.config, old.fingerprint) == (new.config, new.fingerprint)
    assert_equal_trees(old.layer(0), parameters(LLAMA)["layers"][0])


def test_any_change_of_the_manifest_is_found(tmp_path):
    path = write(tmp_path / "model").path / MANIFEST
    manifest = json.loads(path.read_text())
    for name in manifest:
        path.write_text(json.dumps({key: value for key, value in manifest.items() if key != name}))
        with pytest.raises(CheckpointError, match=r"damaged|format_version=None"):
            Checkpoint.open(path.parent)
    for change in ({"source": {}}, {"fingerprint": "0"}, {"config": manifest["config"] | {"norm_eps": 1e-3}}):
        for version in (1, 2):
            path.write_text(json.dumps(manifest | change | {"format_version": version}))
            with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(its checksum changed\)"):
                Checkpoint.open(path.parent)


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.matrix
def test_one_flipped_byte_in_any_file_is_found(item, tmp_path):
    checkpoint = write(tmp_path / "model")
    read = checkpoint.embeddings if item == "embeddings" else lambda: checkpoint.layer(int(item[-3:]))
    for path in sorted(path for path in (checkpoint.path / item).rglob("*") if path.is_file()):
        content = path.read_bytes()
        if not content:
            continue
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        for use in (checkpoint.check, read):
            with pytest.raises(CheckpointError, match=f"item {item} is damaged"):
                use()
        path.write_bytes(content)
    checkpoint.check()


def test_damaged_files_beside_the_items_are_found(tmp_path):
    with CheckpointWriter(tmp_path / "model") as writer:
        for name in ("tokenizer.json", "generation_config.json"):
            writer.write_file(name, "{}")
        for index, layer in enumerate(parameters(LLAMA)["layers"]):
            writer.write_layer(index, layer)
        writer.write_embeddings(parameters(LLAMA)["embeddings"])
        checkpoint = writer.finish(LLAMA, {})
    (checkpoint.path / "tokenizer.json").write_text("{ }")
    for use in (checkpoint.tokenizer, checkpoint.check):
        with pytest.raises(CheckpointError, match=r"file tokenizer.json is damaged \(its hash changed\)"):
            use()
    (checkpoint.path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"file generation_config.json is missing"):
        Checkpoint.open(checkpoint.path)


def test_check_catches_lost_files(tmp_path):
    checkpoint = write(tmp_path / "model")
    next(path for path in (checkpoint.path / "layers/002").rglob("*") if path.is_file()).unlink()
    with pytest.raises(CheckpointError, match="item layers/002 is damaged"):
        checkpoint.check()


def test_reading_a_gutted_item_names_it(tmp_path):
    checkpoint = write(tmp_path / "model")
    for path in (checkpoint.path / "layers/001").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(CheckpointError, match="item layers/001 is damaged"):
        checkpoint.layer(1)


def test_what_orbax_cannot_read_is_named(tmp_path, monkeypatch):
    checkpoint = write(tmp_path / "model")
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda *_, **__: 1 / 0)
    with pytest.raises(CheckpointError, match="item layers/001 cannot be read: division by zero"):
        checkpoint.layer(1)


def test_cut_off_arrays_name_the_item(tmp_path):
    checkpoint = write(tmp_path / "model")
    for path in (checkpoint.path / "embeddings").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="item embeddings is damaged"):
        checkpoint.embeddings()


def test_an_unreadable_tokenizer_is_named(tmp_path):
    checkpoint = write(tmp_path / "model")
    (checkpoint.path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer.json"):
        checkpoint.tokenizer()


def test_shapes_and_dtypes_are_checked_against_the_config(tmp_path):
    checkpoint = write(tmp_path / "model")
    wider = Checkpoint(checkpoint.path, replace(LLAMA, ffn_dim=100), checkpoint.manifest)
    with pytest.raises(CheckpointError, match=r"item layers/000 has shapes .*96.*expected .*100"):
        wider.layer(0)
    half = Checkpoint(checkpoint.path, replace(LLAMA, dtype="float16"), checkpoint.manifest)
    with pytest.raises(CheckpointError, match=r"embeddings has dtypes \['float32'\], expected float16"):
        half.embeddings()


# --- Complete or not there at all ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(error, tmp_path):
    with pytest.raises(error):
        interrupt(tmp_path / "model", error)
    assert names(tmp_path) == []


def test_leaving_without_finish_leaves_nothing(tmp_path):
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_embeddings(parameters(LLAMA)["embeddings"])
    assert names(tmp_path) == []


def test_finish_names_items_never_written(tmp_path):
    params = parameters(LLAMA)
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_embeddings(params["embeddings"])
        writer.write_layer(0, params["layers"][0])
        with pytest.raises(CheckpointError, match="items not written: layers/001, layers/002"):
            writer.finish(LLAMA, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError("RESOURCE_EXHAUSTED: write failed [No space left on device]"),
    ],
    ids=["ENOSPC", "EDQUOT", "tensorstore"],
)
def test_a_full_disk_is_named_and_leaves_nothing(full, tmp_path):
    with pytest.raises(CheckpointError, match=r"no space left on the disk of .*model; nothing was written"):
        interrupt(tmp_path / "model", full)
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys
from zdc_jax.checkpoint import CheckpointWriter
with CheckpointWriter(sys.argv[1]) as writer:
    writer.write_file("tokenizer.json", "{}")
    print(writer.partial.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_killed_process_leaves_nothing_that_loads_and_is_cleaned_up(tmp_path):
    output = tmp_path / "model 1"
    killed = subprocess.run([sys.executable, "-c", KILLED, output], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    assert names(tmp_path) == [killed.stdout.strip()]
    with pytest.raises(CheckpointError, match="conversion did not finish"):
        Checkpoint.open(tmp_path / killed.stdout.strip())
    write(output)
    assert names(tmp_path) == [output.name]


def test_paths_that_are_glob_patterns_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"must not contain any of \* \? \["):
        write(tmp_path / "model[1]")
    assert names(tmp_path) == []


def test_only_leftovers_of_dead_processes_are_removed(tmp_path):
    alive, own = f".model.partial-{os.getppid()}", f".model.partial-{os.getpid()}"
    for name in (alive, own, ".model.partial-notes", ".other.partial-1"):
        (tmp_path / name).mkdir()
    write(tmp_path / "model")
    assert names(tmp_path) == sorted([alive, ".other.partial-1", "model"])


# --- Overwriting -----------------------------------------------------------------------------------------


def test_an_existing_output_is_refused(tmp_path):
    before = write(tmp_path / "model").fingerprint
    with pytest.raises(CheckpointError, match=r"exists; .*--overwrite"):
        write(tmp_path / "model", seed=1)
    assert Checkpoint.open(tmp_path / "model").fingerprint == before


def test_overwrite_replaces_the_whole_folder(tmp_path):
    before = write(tmp_path / "model")
    before.calibration_path.mkdir()
    after = write(tmp_path / "model", seed=1, overwrite=True)
    assert after.fingerprint != before.fingerprint
    assert not after.calibration_path.exists()
    assert names(tmp_path) == ["model"]


def test_overwrite_fills_an_empty_folder(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", overwrite=True).check()


def test_overwrite_follows_a_link(tmp_path):
    write(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    after = write(tmp_path / "link", seed=1, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Checkpoint.open(tmp_path / "model").fingerprint == after.fingerprint


@pytest.mark.parametrize("content", ["letter.txt", MANIFEST])
def test_overwrite_leaves_other_folders_alone(content, tmp_path):
    kept = tmp_path / "home" / content
    kept.parent.mkdir()
    kept.write_text('{"name": "another program"}')
    with pytest.raises(
        CheckpointError, match="not a converted folder, and --overwrite replaces only converted folders"
    ):
        write(tmp_path / "home", overwrite=True)
    assert kept.exists()
    with pytest.raises(CheckpointError, match="not a converted folder"):
        write(kept, overwrite=True)


def test_an_output_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/model"):
        write(tmp_path / "file" / "model")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.matrix
def test_a_failed_overwrite_keeps_the_old(error, tmp_path):
    before = write(tmp_path / "model").fingerprint
    with pytest.raises(error):
        interrupt(tmp_path / "model", error, overwrite=True)
    after = Checkpoint.open(tmp_path / "model")
    after.check()
    assert after.fingerprint == before
    assert names(tmp_path) == ["model"]


def test_a_failed_rename_puts_the_old_back(tmp_path, monkeypatch):
    before = write(tmp_path / "model").fingerprint
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if ".partial-" in path.name and target.name == "model":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="no space left"):
        write(tmp_path / "model", seed=1, overwrite=True)
    assert Checkpoint.open(tmp_path / "model").fingerprint == before
    assert names(tmp_path) == ["model"]
