"""Hugging Face folders: the meaning of their configs, and refusals by name."""

import ast
import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hf_variants import (
    VARIANTS,
    VOCAB,
    weights,
    write_sharded,
    write_tokenizer,
    write_variant,
)
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import convert.conversion
from benchmarks.demo_checkpoint.export import to_source
from convert.conversion import convert as convert_folder
from convert.hf import families
from convert.hf.config import parse_config
from convert.hf.weights import INDEX, SINGLE, Entry, HFWeights, list_entries, list_source_shapes
from zdc_jax.errors import ConversionError
from zdc_jax.model.params import embedding_shapes, layer_shapes

Change = Callable[[Path], object]


def edit_config(folder: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> Path:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    tensors = load_file(folder / SINGLE)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / SINGLE)
    return folder


def rename_tensors(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / SINGLE)
    save_file({key.replace(old, new): value for key, value in tensors.items()}, folder / SINGLE)


def parse(name: str, folder: Path, **changes: Any) -> Any:
    return parse_config(edit_config(write_variant(name, folder), **changes), "float32")


def refuse(folder: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that conversion raises this message before a writer exists."""

    def no_writer(*_: Any, **__: Any) -> None:
        raise AssertionError("an error visible in headers came after writing began")

    monkeypatch.setattr(convert.conversion, "CheckpointWriter", no_writer)
    with pytest.raises(ConversionError, match=message):
        convert_folder(folder, folder.parent / "output", progress=False)
    assert not list(folder.parent.glob("*output*"))


# --- The key table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_key_table_covers_exactly_the_checkpoint(name, tmp_path):
    config = parse(name, tmp_path)
    layers = (None, *range(config.num_layers))
    table = list_source_shapes(entry for layer in layers for entry in list_entries(config, layer))
    assert table == {key: value.shape for key, value in weights(VARIANTS[name]).items()}


@pytest.mark.parametrize("name", families.list_families())
def test_families_are_complete(name, tmp_path):
    # Each family has a variant here, and a key for exactly the parameters of its variants.
    family = families.get_family(name)
    assert all(vars(family).values())
    assert families.list_architectures()[family.architecture] == name
    with pytest.raises(ConversionError, match=r"family='bloom': unknown; must be one of \(.*'llama', "):
        families.get_family("bloom")
    variants = [each for each, variant in VARIANTS.items() if variant.config["model_type"] == name]
    layer, embeddings = set[str](), set[str]()
    for variant in variants:
        config = parse(variant, tmp_path / variant)
        for index in range(config.num_layers):
            layer |= flatten_dict(layer_shapes(config, index), sep="/").keys()
        for tied in (False, True):
            shapes = embedding_shapes(replace(config, tie_embeddings=tied))
            embeddings |= flatten_dict(shapes, sep="/").keys()
    assert family.layer.keys() == {path.removesuffix("_bias") for path in layer}
    assert family.embeddings.keys() == embeddings
    stacked = {"self_attn.qkv_proj.weight": 3, "mlp.gate_up_proj.weight": 2} if name == "phi3" else {}
    for table in (family.layer, family.embeddings):
        for key, count in Counter(table.values()).items():
            assert count == stacked.get(key, 1)


@pytest.mark.parametrize(
    ("path", "ours", "theirs"),
    [
        (("attention", "q"), (5, 2, 3), (6, 5)),
        (("attention", "o"), (2, 3, 5), (5, 6)),
        (("attention", "k_bias"), (2, 3), (6,)),
        (("mlp", "up"), (5, 7), (7, 5)),
        (("mlp_norm", "scale"), (5,), (5,)),
        (("mlp_output_norm", "bias"), (5,), (5,)),
        (("attention", "q_norm"), (3,), (3,)),
        (("tokens",), (9, 5), (9, 5)),
    ],
)
def test_entries_transpose_and_split_heads(path, ours, theirs):
    entry = Entry(path, "key", ours)
    assert entry.source_shape == theirs
    source = np.arange(np.prod(theirs), dtype=np.float32).reshape(theirs)
    turned = entry.to_ours(source)
    assert turned.shape == ours
    np.testing.assert_array_equal(to_source(entry, turned), source)
    if path == ("attention", "q"):  # Head n has rows 3n … 3n + 2 of the source.
        np.testing.assert_array_equal(turned[:, 1], source[3:6].T)
    if path == ("attention", "o"):
        np.testing.assert_array_equal(turned[1], source[:, 3:6].T)


def test_both_opt_prefixes_are_read(tmp_path):
    first = convert_folder(write_variant("opt", tmp_path / "a"), tmp_path / "A", progress=False)
    rename_tensors(write_variant("opt", tmp_path / "b"), "model.decoder.", "decoder.")
    second = convert_folder(tmp_path / "b", tmp_path / "B", progress=False)
    assert first.fingerprint == second.fingerprint


def test_known_buffers_and_a_tied_head_are_ignored(tmp_path):
    plain = convert_folder(write_variant("llama-tied", tmp_path / "a"), tmp_path / "A", progress=False)
    extra = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(6, np.float32),
        "lm_head__weight": np.ones((VOCAB, 48), np.float32),
    }
    edit_tensors(write_variant("llama-tied", tmp_path / "b"), **extra)
    assert convert_folder(tmp_path / "b", tmp_path / "B", progress=False).fingerprint == plain.fingerprint


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes_are_read_as_they_are(stored, tmp_path):
    write_variant("llama-gqa", tmp_path)
    tensors = {key: value.astype(stored) for key, value in load_file(tmp_path / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE)
    source = HFWeights(tmp_path)
    assert source.dtype == np.dtype(stored).name
    for key, value in tensors.items():
        np.testing.assert_array_equal(source.read(key).view(np.uint8), value.view(np.uint8))


# --- Refusals --------------------------------------------------------------------------------------------

NORM = "model__norm__weight"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def deal(folder: Path, count: int) -> dict[str, np.ndarray]:
    """Replace the single file by shards and return the tensors."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    write_sharded(folder, tensors, count)
    return tensors


def write_index(folder: Path, content: str) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(content)


def lose_shard(folder: Path) -> None:
    deal(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def repeat_key(folder: Path) -> None:
    tensors = deal(folder, 2)
    shard = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(shard) | {"lm_head.weight": tensors["lm_head.weight"]}, shard)


def only_bin(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])


WEIGHT_ERRORS: dict[str, tuple[Change, str]] = {
    "unknown": (
        lambda p: edit_tensors(p, model__extra=np.ones(2, np.float32)),
        r"unknown keys \(1\): model.extra",
    ),
    "unknown layer": (lambda p: edit_config(p, num_hidden_layers=1), r"unknown keys \(9\): model.layers.1"),
    "untied head": (lambda p: edit_tensors(p, lm_head__weight=None), r"missing keys \(1\): lm_head.weight"),
    "missing": (lambda p: edit_tensors(p, **{NORM: None}), r"missing keys \(1\): model.norm.weight"),
    "missing layer": (lambda p: edit_config(p, num_hidden_layers=3), r"missing keys \(9\): model.layers.2"),
    "shape": (
        lambda p: edit_tensors(p, **{NORM: np.ones(47, np.float32)}),
        r"'model.norm.weight' has shape \(47,\), but the config requires \(48,\)",
    ),
    "integers": (
        lambda p: edit_tensors(p, **{NORM: np.ones(48, np.int8)}),
        r"'model.norm.weight' has dtype I8; supported are \['BF16', 'F16', 'F32'\]",
    ),
    "doubles": (lambda p: edit_tensors(p, **{NORM: np.ones(48)}), "'model.norm.weight' has dtype F64"),
    "lost shard": (lose_shard, "lacks shards that .*index.json lists: model-00002-of-00003.safetensors"),
    "two shards": (repeat_key, "duplicate key 'lm_head.weight': in model-00001.* in model-00002"),
    "corrupt index": (lambda p: write_index(p, "{"), "cannot read .*index.json"),
    "empty index": (lambda p: write_index(p, "{}"), "weight_map must map keys"),
    "index of numbers": (
        lambda p: write_index(p, '{"weight_map": {"model.norm.weight": 5}}'),
        "weight_map must map keys to their shards",
    ),
    "shard elsewhere": (
        lambda p: write_index(p, '{"weight_map": {"model.norm.weight": "../hf/config.json"}}'),
        "lacks shards that .* lists: ../hf/config.json",
    ),
    "folder as shard": (
        lambda p: ((p / SINGLE).unlink(), (p / SINGLE).mkdir()),
        "cannot read .*model.safetensors",
    ),
    "empty file": (lambda p: (p / SINGLE).write_bytes(b""), "damaged or not a safetensors file"),
    "no tensors": (lambda p: save_file({}, p / SINGLE), "have no tensors"),
    "pointer": (lambda p: (p / SINGLE).write_text(LFS_POINTER), "Git-LFS pointer.*git lfs pull"),
    "cut off": (cut_off, "model.safetensors is damaged or not a safetensors file"),
    "only .bin": (only_bin, "only .bin weights; .*python -c .*from_pretrained.*hf.*save_pretrained"),
    "no weights": (lambda p: (p / SINGLE).unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", WEIGHT_ERRORS)
def test_wrong_weights_are_refused_before_writing(name, tmp_path, monkeypatch):
    change, message = WEIGHT_ERRORS[name]
    change(write_variant("llama-gqa", tmp_path / "hf"))
    refuse(tmp_path / "hf", message, monkeypatch)


def test_the_single_file_comes_before_an_index_as_in_transformers(tmp_path):
    tensors = weights(VARIANTS["llama-gqa"])
    write_variant("llama-gqa", tmp_path)
    write_sharded(tmp_path, {key: value + 1 for key, value in tensors.items()}, 2)
    np.testing.assert_array_equal(HFWeights(tmp_path).read("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["it's", 'a "quoted" one', "with space"])
def test_the_command_for_bin_weights_survives_the_shell(name, tmp_path):
    only_bin(write_variant("llama-gqa", tmp_path / name))
    with pytest.raises(ConversionError, match=r"only .bin weights") as raised:
        HFWeights(tmp_path / name)
    python, flag, code = shlex.split(str(raised.value).partition("is installed, with: ")[2])
    assert (python, flag) == ("python", "-c")
    loaded = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert loaded.count(str(tmp_path / name)) == 2


def test_one_weight_under_both_prefixes_is_refused(tmp_path, monkeypatch):
    write_variant("opt", tmp_path / "hf")
    extra = {"decoder.embed_tokens.weight": np.ones((VOCAB, 48), np.float32)}
    save_file(weights(VARIANTS["opt"]) | extra, tmp_path / "hf" / SINGLE)
    refuse(tmp_path / "hf", "duplicate key: .*decoder.embed_tokens.weight.* are the same weight", monkeypatch)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_weights_are_named_and_leave_nothing(value, stored, tmp_path):
    tensors = {key: x.astype(stored) for key, x in weights(VARIANTS["llama-gqa"]).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] = value
    write_variant("llama-gqa", tmp_path / "hf")
    save_file(tensors, tmp_path / "hf" / SINGLE)
    with pytest.raises(ConversionError, match=r"'model.layers.1.mlp.down_proj.weight' has NaN or Inf"):
        convert_folder(tmp_path / "hf", tmp_path / "output", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# --- Tokenizers ------------------------------------------------------------------------------------------


def panic(folder: Path) -> None:
    """Write a tokenizer on which the library panics; a panic is not an `Exception`."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def number_token(folder: Path, number: int) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["w5"] = number
    (folder / "tokenizer.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "tokenizer.json").unlink(), "hf has no tokenizer; add tokenizer.json"),
        (lambda p: (p / "tokenizer.json").write_text("{}"), "cannot read the tokenizer of"),
        (lambda p: write_tokenizer(p, VOCAB + 1), "the tokenizer has 97 tokens, more than the 96 of"),
        (panic, "cannot read the tokenizer of .*precompiled_charsmap"),
        (lambda p: number_token(p, 2**31), "the tokenizer has 2147483649 tokens"),
        (lambda p: number_token(p, -1), "cannot read the tokenizer of"),
    ],
)
def test_wrong_tokenizers_are_refused_before_writing(change, message, tmp_path, monkeypatch):
    change(write_variant("llama-gqa", tmp_path / "hf"))
    refuse(tmp_path / "hf", message, monkeypatch)


def test_a_smaller_tokenizer_is_copied(tmp_path):
    write_tokenizer(write_variant("llama-gqa", tmp_path / "hf"), 10)
    tokenizer = convert_folder(tmp_path / "hf", tmp_path / "output", progress=False).tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("w3 w9").ids == [3, 9]


def test_vocab_and_merges_become_a_tokenizer(tmp_path):
    write_variant("opt", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "ab", "abc"]
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    names = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = convert_folder(tmp_path / "hf", tmp_path / "output", progress=False).tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("abcab", add_special_tokens=False).ids == [8, 7]


def test_added_tokens_past_the_vocabulary_are_left_out(tmp_path, caplog):
    # An example is Gemma's tokens for images, for which text models have no row.
    path = write_variant("gemma3", tmp_path / "hf") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(path))
    checkpoint = convert_folder(tmp_path / "hf", tmp_path / "ours", progress=False)
    assert "tokens ['<image>'], which lie past the model's vocabulary of 96" in caplog.text
    assert checkpoint.tokenizer().get_vocab_size() == VOCAB
    assert checkpoint.tokenizer().encode("w5").ids == [5]
