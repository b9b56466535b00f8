"""Class `Basis`: inverse maps, model check, and saved folder."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from zdc_jax.basis import Basis
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.errors import CalibrationError, CheckpointError

CONFIG = ModelConfig(
    family="opt",
    layers=LayerSpec(mlp="plain").repeated(2),
    norm="layer",
    position_offset=2,
    embed_dim=12,
    ffn_dim=16,
    vocab_size=10,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    max_positions=8,
    norm_eps=1e-5,
    activation="relu",
    dtype="float32",
    tie_embeddings=True,
)


def make(**changes):
    rng = np.random.default_rng(0)
    head = (2, 3, 4)
    values = {
        "k_map": rng.normal(size=(*head, 4)),
        "v_map": rng.normal(size=(*head, 4)),
        "qk_kind": "balanced",
        "vo_kind": "output",
        "qk_spectrum": rng.random(head),
        "vo_spectrum": rng.random(head),
        "qk_error": rng.random((2, 3, 5)),
        "vo_error": rng.random((2, 3, 5)),
        "qk_condition": rng.random((2, 3)),
        "vo_condition": rng.random((2, 3)),
        "num_tokens": 7,
        "context_length": 8,
        "fingerprint": "abc",
        "record": {"candidates": {"balanced": 12.5}},
    }
    return Basis(**{**values, **changes})


def test_maps_leave_scores_and_outputs_unchanged():
    basis, rng = make(), np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 3, 5, 4))
    scores = (q @ basis.q_map) @ (k @ basis.k_map).swapaxes(-1, -2)
    np.testing.assert_allclose(scores, q @ k.swapaxes(-1, -2), atol=1e-10)
    np.testing.assert_allclose((v @ basis.v_map) @ basis.o_map, v, atol=1e-10)


def test_a_replaced_map_gets_its_own_inverse():
    basis = make()
    assert basis.q_map is basis.q_map
    doubled = replace(basis, k_map=2 * basis.k_map)
    np.testing.assert_allclose(doubled.q_map, basis.q_map / 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{name}_rms": np.full((2, 3, 4), 2.5) for name in "qkv"},
        {"key_shift": np.ones((2, 3, 4)), "shifted": [True, False]},
        {"key_mean": np.ones((2, 3, 4)), "value_mean": np.full((2, 3, 4), 2.0)},
        {"qk_kind": "pairs", "pairs": np.tile(np.array([1, 0], np.int32), (2, 3, 1))},
        # In a transposed view, the stored data must be its values, not its memory.
        {"k_map": np.random.default_rng(2).normal(size=(2, 3, 4, 4)).swapaxes(-1, -2)},
    ],
)
def test_save_and_load_round_trip(tmp_path, changes):
    basis = make(**changes)
    basis.save(tmp_path / "new" / "basis")
    loaded = Basis.load(tmp_path / "new" / "basis")
    for f in fields(Basis):
        mine, theirs = getattr(basis, f.name), getattr(loaded, f.name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(theirs, mine)
            assert theirs.dtype == mine.dtype
        else:
            assert theirs == mine


def test_a_folder_from_before_root_mean_squares_were_kept(tmp_path):
    make().save(tmp_path / "basis")
    rewrite(q_rms=..., k_rms=..., v_rms=...)(tmp_path / "basis")
    assert "rms" not in (tmp_path / "basis" / "basis.json").read_text()
    assert Basis.load(tmp_path / "basis").q_rms is None


@pytest.mark.parametrize("name", ["k_map", "v_map", "key_mean", "key_shift", "value_mean", "pairs"])
def test_the_hash_tells_coordinates_apart(tmp_path, name):
    # The hash changes only with the coordinates, and stays the same after loading.
    basis = make(key_mean=np.ones((2, 3, 4)), pairs=np.zeros((2, 3, 2), np.int32))
    value = getattr(basis, name)
    changed = np.ones((2, 3, 4)) if value is None else value.copy()
    changed[1, 2, 1] += 1
    assert replace(basis, **{name: changed}).coordinates_hash != basis.coordinates_hash
    same = replace(basis, k_map=np.asfortranarray(basis.k_map), num_tokens=9, record={})
    assert same.coordinates_hash == basis.coordinates_hash
    basis.save(tmp_path / "basis")
    assert Basis.load(tmp_path / "basis").coordinates_hash == basis.coordinates_hash


def test_a_folder_from_before_hashes_were_kept(tmp_path):
    make().save(tmp_path / "basis")
    rewrite(sha256=...)(tmp_path / "basis")
    assert Basis.load(tmp_path / "basis").num_tokens == 7


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    make().save(tmp_path / "basis")
    make(num_tokens=9).save(tmp_path / "basis")
    assert Basis.load(tmp_path / "basis").num_tokens == 9
    assert [path.name for path in tmp_path.iterdir()] == ["basis"]


def test_a_failed_save_keeps_the_old_basis(tmp_path):
    make().save(tmp_path / "basis")
    with pytest.raises(TypeError):
        make(record={"not JSON": object()}).save(tmp_path / "basis")
    assert Basis.load(tmp_path / "basis").num_tokens == 7
    assert [path.name for path in tmp_path.iterdir()] == ["basis"]


def test_a_failed_rename_puts_the_old_basis_back(tmp_path, monkeypatch):
    make().save(tmp_path / "basis")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if target.name == "basis" and not path.name.endswith(".old"):
            raise OSError
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError):
        make(num_tokens=9).save(tmp_path / "basis")
    assert Basis.load(tmp_path / "basis").num_tokens == 7
    assert [path.name for path in tmp_path.iterdir()] == ["basis"]


def test_folders_with_other_files_are_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(CheckpointError, match="not a saved basis"):
        make().save(tmp_path)
    with pytest.raises(CheckpointError, match="not a saved basis"):
        make().save(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def truncate(folder):
    path = folder / "basis.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_bit(folder):
    path = folder / "basis.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite(**changes):
    def edit(folder):
        path = folder / "basis.json"
        value = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot read basis"),
        (flip_a_bit, r"basis\.safetensors is damaged"),
        (lambda folder: (folder / "basis.safetensors").unlink(), "cannot read basis"),
        (lambda folder: (folder / "basis.json").write_text("{"), "cannot read basis"),
        (lambda folder: (folder / "basis.json").write_bytes(b"\xff"), "cannot read basis"),
        (lambda folder: (folder / "basis.json").write_text("[]"), "format_version=None"),
        (rewrite(format_version=99), "format_version=99 is not supported; this release reads 1"),
        (rewrite(colour="red"), "missing or unknown fields: colour"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, message):
    make().save(tmp_path / "basis")
    damage(tmp_path / "basis")
    with pytest.raises(CheckpointError, match=message):
        Basis.load(tmp_path / "basis")


def test_missing_folder_and_wrong_shapes_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read basis"):
        Basis.load(tmp_path / "nowhere")
    make(k_map=np.ones((2, 3, 4))).save(tmp_path / "basis")
    with pytest.raises(CheckpointError, match=r"are not \[L, K, H, H\]"):
        Basis.load(tmp_path / "basis")


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        make().save(tmp_path / "basis")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "basis").iterdir()} == {0o640}


def test_check_model():
    make().check_model("abc", CONFIG)
    with pytest.raises(CalibrationError, match="calibrated on model 'abc', this model is 'xyz'"):
        make().check_model("xyz", CONFIG)
    with pytest.raises(CalibrationError, match=r"\(2, 3, 4\), the model has \(5, 3, 4\)"):
        make().check_model("abc", replace(CONFIG, layers=CONFIG.layers[:1] * 5))


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        ({"key_shift": np.ones((2, 3, 4)), "shifted": [True, False]}, False),
        # Neither of these has a shift in any release.
        ({"qk_kind": "pairs", "pairs": np.tile(np.array([1, 0], np.int32), (2, 3, 1))}, False),
        ({"record": {"reduction": "kmeans"}}, False),
    ],
)
def test_a_folder_of_an_older_release_says_how_to_renew_it(tmp_path, caplog, changes, warns):
    make(**changes).save(tmp_path / "basis")
    Basis.load(tmp_path / "basis")
    assert ("zdc calibrate MODEL TEXT --overwrite" in caplog.text) == warns
