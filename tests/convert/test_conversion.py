"""Conversion: exact arrays, bounded memory, and an output that is complete or absent."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hf_variants import VARIANTS, weights, write_sharded, write_tokenizer, write_variant
from safetensors.numpy import load_file, save_file

from benchmarks.demo_checkpoint.export import export_tensors
from convert.conversion import convert, verify_against_transformers
from convert.hf.weights import SINGLE, HFWeights
from zdc_jax.checkpoint import Checkpoint, CheckpointWriter
from zdc_jax.errors import CheckpointError, ConversionError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def all_params(checkpoint: Checkpoint) -> dict[str, Any]:
    layers = [checkpoint.layer(index) for index in range(checkpoint.config.num_layers)]
    return {"embeddings": checkpoint.embeddings(), "layers": layers}


def write_model(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write the GQA variant with these tensors."""
    write_variant("llama-gqa", folder)
    save_file(tensors, folder / SINGLE)
    return folder


# --- Exact arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.matrix
def test_every_weight_arrives(name, tmp_path):
    checkpoint = convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    checkpoint.check()
    params, expected = all_params(checkpoint), weights(VARIANTS[name])
    found = export_tensors(params, checkpoint.config)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, strict=True)


def test_shards_give_the_same_as_one_file(tmp_path):
    single = convert(write_variant("llama-gqa", tmp_path / "one"), tmp_path / "A", progress=False)
    write_variant("llama-gqa", tmp_path / "many")
    write_sharded(tmp_path / "many", load_file(tmp_path / "many" / SINGLE), 3)
    (tmp_path / "many" / SINGLE).unlink()
    sharded = convert(tmp_path / "many", tmp_path / "B", progress=False)
    assert sharded.fingerprint == single.fingerprint


def test_one_changed_weight_changes_the_fingerprint(tmp_path):
    tensors = weights(VARIANTS["llama-gqa"])
    before = convert(write_model(tmp_path / "a", tensors), tmp_path / "A", progress=False)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-3
    after = convert(write_model(tmp_path / "b", tensors), tmp_path / "B", progress=False)
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_rounds_every_weight_once(dtype, tmp_path):
    write_variant("llama-gqa", tmp_path / "hf")
    checkpoint = convert(tmp_path / "hf", tmp_path / "ours", dtype=dtype, progress=False)
    assert checkpoint.config.dtype == dtype
    found = export_tensors(all_params(checkpoint), checkpoint.config)
    for key, value in weights(VARIANTS["llama-gqa"]).items():
        np.testing.assert_array_equal(found[key], value.astype(dtype), strict=True)


def test_default_dtype_is_that_of_most_tensors(tmp_path):
    tensors = weights(VARIANTS["llama-gqa"])
    mixed = {key: x if x.ndim == 1 else x.astype(ml_dtypes.bfloat16) for key, x in tensors.items()}
    checkpoint = convert(write_model(tmp_path / "hf", mixed), tmp_path / "ours", progress=False)
    assert checkpoint.config.dtype == "bfloat16"
    assert {str(x.dtype) for x in jax.tree.leaves(all_params(checkpoint))} == {"bfloat16"}


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_float16_overflow_is_named_and_leaves_nothing(stored, tmp_path):
    tensors = {key: x.astype(stored) for key, x in weights(VARIANTS["llama-gqa"]).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = 70_000
    write_model(tmp_path / "hf", tensors)
    message = "dtype='float16': 'model.layers.0.mlp.up_proj.weight' holds values beyond .*choose 'bfloat16'"
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "hf", tmp_path / "ours", dtype="float16", progress=False)
    assert names(tmp_path) == ["hf"]
    convert(tmp_path / "hf", tmp_path / "ours", dtype="bfloat16", progress=False)


def test_unknown_dtype_is_named(tmp_path):
    with pytest.raises(ConversionError, match=r"dtype='int8': must be one of \('float32', 'bfloat16'"):
        convert(tmp_path, tmp_path / "ours", dtype="int8")


def test_origin_and_small_files_are_kept(tmp_path):
    write_variant("llama-gqa", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"transformers_version": "5.1.0"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_text('{"eos_token_id": [2, 7]}')
    checkpoint = convert(tmp_path / "hf", tmp_path / "ours", progress=False)
    origin = {"name": "hf", "dtype": "float32", "transformers_version": "5.1.0"}
    assert checkpoint.manifest["source"] == origin
    assert checkpoint.config.eos_ids == (2, 7)
    assert names(checkpoint.path) == [
        "embeddings",
        "generation_config.json",
        "layers",
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_progress_can_be_silent(tmp_path, capfd):
    write_variant("llama-gqa", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "quiet", progress=False)
    quiet = capfd.readouterr()
    assert quiet.out.strip() == ""
    assert "layers" not in quiet.err
    convert(tmp_path / "hf", tmp_path / "loud")
    assert "layers" in capfd.readouterr().err


# --- Complete or absent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("reads", [0, 1, 8, 20])
def test_interruption_anywhere_leaves_nothing(error, reads, tmp_path, monkeypatch):
    write_variant("llama-gqa", tmp_path / "hf")
    read, left = HFWeights.read, iter(range(reads))

    def failing(weights: HFWeights, key: str, rows: slice | None) -> np.ndarray:
        if next(left, None) is None:
            raise error
        return read(weights, key)

    monkeypatch.setattr(HFWeights, "read", failing)
    with pytest.raises(error):
        convert(tmp_path / "hf", tmp_path / "ours", progress=False)
    assert names(tmp_path) == ["hf"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failing_to_write_a_layer_leaves_what_was_there(error, overwrite, tmp_path, monkeypatch):
    write_variant("llama-gqa", tmp_path / "hf")
    if overwrite:
        before = convert(tmp_path / "hf", tmp_path / "ours", progress=False).fingerprint
    write_layer = CheckpointWriter.write_layer

    def failing(writer: CheckpointWriter, index: int, tree: Any) -> None:
        if index == 1:
            raise error
        write_layer(writer, index, tree)

    monkeypatch.setattr(CheckpointWriter, "write_layer", failing)
    with pytest.raises(error):
        convert(tmp_path / "hf", tmp_path / "ours", dtype="bfloat16", overwrite=overwrite, progress=False)
    assert names(tmp_path) == (["hf", "ours"] if overwrite else ["hf"])
    if overwrite:
        kept = Checkpoint.open(tmp_path / "ours")
        kept.check()
        assert kept.fingerprint == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(overwrite, tmp_path, monkeypatch):
    write_variant("llama-gqa", tmp_path / "hf")
    if overwrite:
        before = convert(tmp_path / "hf", tmp_path / "ours", progress=False).fingerprint
    save = ocp.StandardCheckpointer.save

    def full(orbax: ocp.StandardCheckpointer, path: Path, tree: Any, **options: Any) -> None:
        if path.name == "001":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(orbax, path, tree, **options)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", full)
    with pytest.raises(CheckpointError, match=r"no space left on the disk of .*ours"):
        convert(tmp_path / "hf", tmp_path / "ours", dtype="bfloat16", overwrite=overwrite, progress=False)
    if overwrite:
        kept = Checkpoint.open(tmp_path / "ours")
        kept.check()
        assert kept.fingerprint == before
    assert names(tmp_path) == (["hf", "ours"] if overwrite else ["hf"])


def test_overwrite(tmp_path):
    write_variant("llama-gqa", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", progress=False)
    with pytest.raises(CheckpointError, match="--overwrite"):
        convert(tmp_path / "hf", tmp_path / "ours", dtype="float16", progress=False)
    convert(tmp_path / "hf", tmp_path / "ours", dtype="float16", overwrite=True, progress=False)
    assert Checkpoint.open(tmp_path / "ours").config.dtype == "float16"


@pytest.mark.parametrize("output", ["hf", ".", "link"])
def test_the_source_is_never_overwritten(output, tmp_path):
    write_variant("llama-gqa", tmp_path / "hf")
    (tmp_path / "link").symlink_to("hf")
    before = names(tmp_path / "hf")
    with pytest.raises(ConversionError, match="must not be or contain the source"):
        convert(tmp_path / "hf", tmp_path / output, overwrite=True, progress=False)
    assert names(tmp_path / "hf") == before


def test_verifying_needs_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConversionError, match="--verify: needs torch"):
        verify_against_transformers(tmp_path, lambda tokens: tokens, vocab_size=9)


# --- Memory ----------------------------------------------------------------------------------------------

MEASURED = """
import sys
from pathlib import Path
from convert.conversion import convert

def peak():  # Of this process alone; ru_maxrss would count the parent it was forked from.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

small, large, output = sys.argv[1:]
convert(small, output + "-small", progress=False)
before = peak()
convert(large, output, progress=False)
print(before, peak())
"""


def peak_memory(source: Path, small: Path, output: Path) -> tuple[int, int]:
    """Return the peak bytes of a fresh process after converting `small` and after converting `source`."""
    command = [sys.executable, "-c", MEASURED, small, source, output]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    return before, after


def write_random_llama(folder: Path, config: dict[str, Any], dtype: Any) -> tuple[int, int]:
    """Write a Llama, one shard per layer, and return the bytes of one layer and of the largest tensor."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = D // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"q_proj": (D, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, D)}
    layer = {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}
    layer |= {f"mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")} | {"mlp.down_proj.weight": (D, F)}
    layer |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    outside = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
    parts = [outside]
    for index in range(config["num_hidden_layers"]):
        parts.append({f"model.layers.{index}.{key}": shape for key, shape in layer.items()})

    folder.mkdir()
    rng, weight_map = np.random.Generator(np.random.PCG64(0)), {}
    for index, part in enumerate(parts):
        name = f"model-{index:05d}.safetensors"
        save_file(
            {k: rng.standard_normal(s, np.float32).astype(dtype) for k, s in part.items()}, folder / name
        )
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(VARIANTS["llama-mha"].config | config))
    write_tokenizer(folder)
    itemsize = np.dtype(dtype).itemsize
    return itemsize * sum(int(np.prod(shape)) for shape in layer.values()), itemsize * V * D


MIDDLE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 12_000,
}
TINYLLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
LLAMA_7B = TINYLLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
}


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path):
    layer, tensor = write_random_llama(tmp_path / "hf", MIDDLE, ml_dtypes.bfloat16)
    before, after = peak_memory(
        tmp_path / "hf", write_variant("llama-gqa", tmp_path / "s"), tmp_path / "ours"
    )
    bound, whole = 3 * (2 * tensor) + 2 * layer, 2 * tensor + 24 * layer
    mebibytes = [round(size / 2**20) for size in (after - before, before, bound, whole)]
    print("{} MiB above {}; bound {}, model {}".format(*mebibytes))
    assert bound < whole / 2
    assert after - before < bound  # Embeddings exist as read, transposed, and copied once by Orbax.


on_demand = pytest.mark.skipif("ZDC_TEST_7B" not in os.environ, reason="28 GB of disk: set ZDC_TEST_7B")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(TINYLLAMA, id="1.1B"), pytest.param(LLAMA_7B, id="7B", marks=on_demand)]
)
def test_large_models_convert_within_2_gib(config, tmp_path):
    source, output = tmp_path / "hf", tmp_path / "ours"
    try:
        write_random_llama(source, config, ml_dtypes.bfloat16)
        began = time.perf_counter()
        before, after = peak_memory(source, write_variant("llama-gqa", tmp_path / "small"), output)
        print(f"{after / 2**30:.2f} GiB (imports {before / 2**30:.2f}) {time.perf_counter() - began:.0f} s")
        assert Checkpoint.open(output).config.num_layers == config["num_hidden_layers"]
        assert after < 2 * 2**30
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)
