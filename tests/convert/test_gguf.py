"""GGUF files: the same model as from the Hugging Face folder, and damage refused by name."""

import json

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    VARIANTS_IN_GGUF,
    WIDE,
    WORDS,
    converted,
    gguf_tensors,
    gguf_values,
    in_gguf,
    random_blocks,
    write_gguf,
    write_variant_gguf,
)
from hf_variants import LLAMA, VARIANTS, VOCAB, token_ids, weights, write_variant
from test_conversion import MIDDLE, all_params, peak_memory
from test_gguf_damage import refuse

from benchmarks.demo_checkpoint.export import export_tensors
from convert.cli.main import main
from convert.conversion import convert, open_source
from convert.gguf.reader import read_gguf
from convert.gguf.settings import derive_llama3_rope
from convert.gguf.tensors import CHUNK, is_supported, read_tensor
from zdc_jax import Checkpoint, load
from zdc_jax.errors import ConversionError

SUPPORTED = [kind for kind in Kind if is_supported(kind)]


# --- The same model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS_IN_GGUF)
@pytest.mark.matrix("llama-mha", "granite")
def test_a_file_is_the_model_of_the_folder(name, tmp_path):
    # In files, Gemma's norms are rounded once more, and Phi-3's attention factor is a float32.
    folder = write_variant(name, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(in_gguf(name).config))
    expected, found = converted(folder), converted(write_variant_gguf(name, tmp_path / "a.gguf"))
    ours, theirs = found.config.to_json(), expected.config.to_json()
    assert ours | {"layers": None} == theirs | {"layers": None, "family": ours["family"]}
    for one, other in zip(ours["layers"], theirs["layers"], strict=True):
        factors = [layer["rope"].pop("attention_factor", None) for layer in (one, other)]
        assert factors[0] == pytest.approx(factors[1], rel=1e-6)
        assert one == other
    if name != "gemma3":
        assert found.fingerprint == expected.fingerprint
        return
    values = export_tensors(all_params(found), found.config)
    for key, value in export_tensors(all_params(expected), expected.config).items():
        np.testing.assert_allclose(values[key], value, rtol=0, atol=2e-7 if "norm" in key else 0)


@pytest.mark.parametrize("name", ["llama3-new", "gemma3", "phi3-long"])
@pytest.mark.matrix
def test_logits_are_those_of_the_folder(name, tmp_path):
    folder = write_variant(name, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(in_gguf(name).config))
    tokens = jnp.asarray(token_ids(VOCAB, (2, 24)))
    logits = []
    for source in (folder, write_variant_gguf(name, tmp_path / "a.gguf")):
        model = load(converted(source).path, max_positions=VARIANTS[name].max_positions)
        logits.append(np.asarray(model.network(tokens)))
    tolerance = 0 if name == "llama3-new" else 1e-5 * np.abs(logits[0]).max()
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=tolerance)


def test_headers_are_read_as_the_package_reads_them(tmp_path):
    path = write_variant_gguf("llama3-new", tmp_path / "a.gguf")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, field in fields.items():
        value = ours.metadata[key]
        assert value == (
            pytest.approx(field.contents(), rel=1e-7) if type(value) is float else field.contents()
        )
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.start, mine.bytes, mine.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize("suffix", ["gguf", "bin"])
def test_what_the_folder_keeps(suffix, tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf").rename(tmp_path / f"a.{suffix}")
    checkpoint = converted(path)
    checkpoint.check()
    source = {"name": f"a.{suffix}", "dtype": "float32", "types": {"F32": 16}}
    assert checkpoint.manifest["source"] == source
    assert json.loads((checkpoint.path / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }


def test_all_tokens_that_end_are_kept(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 2}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=WORDS | ends)
    assert converted(path).config.eos_ids == (2, 4)


def test_adapters_are_told_to_be_merged(tmp_path):
    words = WORDS | {"general.type": "adapter", "adapter.type": "lora"}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=words)
    refuse(path, r"a.gguf is an adapter \(adapter.type='lora'\), not a model; merge it")


def test_tokens_that_end_by_lists_and_by_their_names(tmp_path):
    tokens = list(WORDS["tokenizer.ggml.tokens"])
    types = list(WORDS["tokenizer.ggml.token_type"])
    # Qwen2.5-Coder's file names `<|im_end|>` only. A normal token is text, whatever its name.
    tokens[10:14], types[10:14] = (
        ["<|file_sep|>", "<|endoftext|>", "<|fim_middle|>", "<|eot_id|>"],
        [3, 4, 3, 1],
    )
    words = WORDS | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    words |= {"tokenizer.ggml.eos_token_ids": [2, 7], "tokenizer.ggml.fim_pad_token_id": 9}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=words)
    assert converted(path).config.eos_ids == (2, 9, 7, 10, 11)


@pytest.mark.parametrize("ids", [3, [2, VOCAB], ["2"]])
def test_lists_of_ends_that_are_no_tokens_are_refused(ids, tmp_path):
    words = WORDS | {"tokenizer.ggml.eos_token_ids": ids}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=words)
    refuse(path, r"tokenizer.ggml.eos_token_ids=.* must be")


@pytest.mark.parametrize("token", [[2], "2", VOCAB, True])
@pytest.mark.parametrize("name", ["bos", "eos", "eot"])
def test_ends_that_are_no_tokens_are_refused(name, token, tmp_path):
    ends = WORDS | {f"tokenizer.ggml.{name}_token_id": token}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=ends)
    refuse(path, rf"tokenizer.ggml.{name}_token_id=.* must be an id below 96")


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.matrix
def test_any_part_of_a_split_file_gives_the_whole(parts, tmp_path):
    whole = converted(write_variant_gguf("llama-gqa", tmp_path / "whole.gguf"))
    write_variant_gguf("llama-gqa", tmp_path / "a.gguf", parts=parts)
    written = sorted(tmp_path.glob("a-*.gguf"))
    assert len(written) == parts
    for part in written:
        assert converted(part).fingerprint == whole.fingerprint


def test_transformers_is_asked_for_the_same_model(tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    reference = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "a.gguf"}
    assert open_source(path).reference == reference
    assert open_source(tmp_path).reference == {"pretrained_model_name_or_path": tmp_path}


def test_the_folder_of_a_file_is_not_overwritten(tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    with pytest.raises(ConversionError, match="must not be or contain the source"):
        convert(path, tmp_path, overwrite=True, progress=False)


def test_a_folder_of_files_asks_for_one(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    path = write_variant_gguf("llama-gqa", tmp_path / "in" / "a.gguf")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "ours")]) == 2
    assert f"give one of its files, such as {path}" in capsys.readouterr().err


def test_the_command_converts(tmp_path, capsys):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    assert main(["convert", str(path), str(tmp_path / "ours")]) == 0
    assert "converted" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "b.gguf"), str(tmp_path / "other")]) == 2
    assert "b.gguf" in capsys.readouterr().err


# --- Types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.matrix
def test_every_type_is_dequantised(kind, tmp_path):
    # The expected values are the gguf package's for whole tensors.
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    blocks = {name: (kind, random_blocks(kind, x.shape)) for name, x in tensors.items() if x.ndim > 1}
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, blocks=blocks)
    checkpoint = converted(path, dtype="float32")
    params = all_params(checkpoint)
    expected = {name: gguf.dequantize(data, kind) for name, (_, data) in blocks.items()}
    layer = params["layers"][0]
    np.testing.assert_array_equal(params["embeddings"]["tokens"], expected["token_embd.weight"])
    np.testing.assert_array_equal(layer["mlp"]["down"], expected["blk.0.ffn_down.weight"].T)
    found = export_tensors(params, checkpoint.config)
    again = gguf_tensors(WIDE.config, found)
    for name, value in expected.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.BF16], ids=lambda kind: kind.name)
def test_quantised_weights_are_near_the_original(kind, tmp_path):
    tensors = weights(WIDE)
    path = write_gguf(
        tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), gguf_tensors(WIDE.config, tensors), kind=kind
    )
    checkpoint = converted(path, dtype="float32")
    found = export_tensors(all_params(checkpoint), checkpoint.config)
    steps = {Kind.Q4_0: 16, Kind.Q8_0: 254, Kind.BF16: 256}[kind]
    for key, value in tensors.items():
        assert np.abs(found[key] - value).max() <= 2.1 * np.abs(value).max() / steps


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, "float32"),
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        (Kind.Q4_1, "bfloat16"),
        (Kind.Q8_0, "bfloat16"),
    ],
)
def test_default_dtype_is_that_of_most_matrices(kind, dtype, tmp_path):
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, kind=kind)
    assert converted(path).config.dtype == dtype
    key = "blk.0.ffn_up.weight"
    data = gguf.dequantize(gguf.quantize(tensors[key], kind), kind)
    found = np.asarray(Checkpoint.open(tmp_path / "a-ours").layer(0)["mlp"]["up"])
    np.testing.assert_array_equal(found, data.T.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def test_rows_are_read_alone_and_in_pieces(tmp_path, monkeypatch):
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, kind=Kind.Q5_1)
    tensor = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    whole = read_tensor(tensor)
    assert whole.size <= CHUNK
    monkeypatch.setattr("convert.gguf.tensors.CHUNK", 3 * 256)
    np.testing.assert_array_equal(read_tensor(tensor), whole)
    np.testing.assert_array_equal(read_tensor(tensor, slice(5, 77)), whole[5:77])


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path):
    # The file is quantized. The largest tensor counts in float32, since it is dequantized.
    config = LLAMA | MIDDLE
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    values = gguf_values(config) | {"vocab_size": V}
    kv = D * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"attn_q": (D, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, D)}
    shapes |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    layers = range(config["num_hidden_layers"])
    blocks = {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in shapes.items()}
    blocks |= {"token_embd.weight": (V, D), "output.weight": (V, D)}
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in layers for name in ("attn", "ffn"))]
    path = write_gguf(
        tmp_path / "a.gguf",
        "llama",
        values,
        {f"{name}.weight": np.ones(D, np.float32) for name in norms},
        blocks={name: (Kind.Q4_K, random_blocks(Kind.Q4_K, shape)) for name, shape in blocks.items()},
    )
    small = write_variant_gguf("llama-gqa", tmp_path / "small.gguf")
    before, after = peak_memory(path, small, tmp_path / "ours")
    layer = 4 * sum(height * width for height, width in shapes.values())
    bound, whole = 3 * 4 * V * D + layer, 2 * 4 * V * D + len(layers) * layer
    mebibytes = [round(size / 2**20) for size in (after - before, before, bound, whole)]
    print("{} MiB above {}; bound {}, model {}".format(*mebibytes))
    assert bound < whole / 3
    assert after - before < bound


# --- Rotary factors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "theta", "head_dim"), [(8.0, 5e5, 128), (32.0, 5e5, 64)])
def test_factors_of_the_real_llama_3_give_its_settings(factor, theta, head_dim):
    # The formula is that of transformers, whose products are float32.
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)
    scaled = (1 - smooth) * frequencies / factor + smooth * frequencies
    factors = (frequencies / scaled).astype(np.float32)
    assert derive_llama3_rope([float(x) for x in factors], theta) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_are_refused():
    with pytest.raises(ConversionError, match="not the factors of Llama 3's rotary embedding"):
        derive_llama3_rope([1.0, 2.0, 1.0, 8.0], 1e4)
    assert derive_llama3_rope([1.0, 1.0], 1e4) == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.ones(5, np.float32), r"'rope_freqs.weight' is F32 \(5,\), expected F32 \(6,\)"),
        (np.ones(6, np.float16), "'rope_freqs.weight' is F16"),
        (
            np.array([1, 1, 1, 1, 1, np.inf], np.float32),
            "'rope_freqs.weight' must have finite numbers > 0 only",
        ),
    ],
)
def test_damaged_factors_are_refused(tensor, message, tmp_path):
    config = in_gguf("llama-gqa").config
    tensors = gguf_tensors(config, weights(VARIANTS["llama-gqa"]))
    kind = Kind.F16 if tensor.dtype == np.float16 else Kind.F32
    blocks = {"rope_freqs.weight": (kind, tensor)}
    refuse(write_gguf(tmp_path / "a.gguf", "llama", gguf_values(config), tensors, blocks=blocks), message)


def test_factors_beside_another_scaling_are_refused(tmp_path):
    config = in_gguf("llama3-new").config
    tensors = gguf_tensors(config, weights(VARIANTS["llama3-new"]))
    values = gguf_values(config) | {"rope.scaling.factor": 2.0}
    refuse(
        write_gguf(tmp_path / "a.gguf", "llama", values, tensors),
        r"llama.rope.scaling.type='linear' with factor 2.0 is not supported together with the tensors",
    )


def test_one_of_two_sets_of_factors_is_refused(tmp_path):
    config = in_gguf("phi3-long").config
    tensors = gguf_tensors(config, weights(VARIANTS["phi3-long"]))
    del tensors["rope_factors_short.weight"]
    refuse(
        write_gguf(tmp_path / "a.gguf", "phi3", gguf_values(config), tensors),
        "has no tensor 'rope_factors_short.w",
    )
