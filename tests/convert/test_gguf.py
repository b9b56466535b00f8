"""GGUF files: the same model as from Hugging Face's folder, and every damage refused by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    VARIANTS_IN_GGUF,
    WORDS,
    gguf_tensors,
    gguf_values,
    in_gguf,
    write_gguf,
    write_variant_gguf,
)
from hf_variants import LLAMA, VARIANTS, VOCAB, Variant, token_ids, weights, write_variant
from test_conversion import MIDDLE, all_params, names, peak_memory

from convert.cli.main import main
from convert.conversion import convert, open_source
from convert.gguf.reader import read_gguf
from convert.gguf.settings import hf_settings, llama3_rope
from convert.gguf.tensors import PIECE, is_supported, read_tensor
from convert.hf.export import source_tensors
from zdc_jax import Checkpoint, load
from zdc_jax.errors import ConversionError

SUPPORTED = [kind for kind in Kind if is_supported(kind)]


def converted(source: Path, **options: Any) -> Checkpoint:
    """The converted folder beside a source."""
    return convert(source, source.with_name(f"{source.stem}-ours"), progress=False, **options)


def refuse(path: Path, message: str) -> None:
    """Converting must fail with this, and leave nothing."""
    before = names(path.parent)
    with pytest.raises(ConversionError, match=message):
        convert(path, path.parent / "ours", progress=False)
    assert names(path.parent) == before


# --- The same model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS_IN_GGUF)
def test_a_file_is_the_model_of_the_folder(name, tmp_path):
    """Gemma's norms are rounded once more in files, and Phi-3's attention factor is a float32 there."""
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
    values = source_tensors(all_params(found), found.config)
    for key, value in source_tensors(all_params(expected), expected.config).items():
        np.testing.assert_allclose(values[key], value, rtol=0, atol=2e-7 if "norm" in key else 0)


@pytest.mark.parametrize("name", ["llama3-new", "gemma3", "phi3-long"])
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


@pytest.mark.parametrize("token", [[2], "2", VOCAB, True])
@pytest.mark.parametrize("name", ["bos", "eos", "eot"])
def test_ends_that_are_no_tokens_are_refused(name, token, tmp_path):
    ends = WORDS | {f"tokenizer.ggml.{name}_token_id": token}
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf", tokenizer=ends)
    refuse(path, rf"tokenizer.ggml.{name}_token_id=.* must be an id below 96")


@pytest.mark.parametrize("parts", [2, 3])
def test_any_part_of_a_split_file_gives_the_whole(parts, tmp_path):
    whole = converted(write_variant_gguf("llama-gqa", tmp_path / "whole.gguf"))
    write_variant_gguf("llama-gqa", tmp_path / "a.gguf", parts=parts)
    for part in sorted(tmp_path.glob("a-*.gguf")):
        assert converted(part).fingerprint == whole.fingerprint


def test_transformers_is_asked_for_the_same_model(tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    reference = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "a.gguf"}
    assert open_source(path).reference == reference
    assert open_source(tmp_path).reference == {"pretrained_model_name_or_path": tmp_path}


def test_the_folder_of_a_file_is_not_overwritten(tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    with pytest.raises(ConversionError, match="must not be or hold the source"):
        convert(path, tmp_path, overwrite=True, progress=False)


def test_the_command_converts(tmp_path, capsys):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    assert main(["convert", str(path), str(tmp_path / "ours")]) == 0
    assert "converted" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "b.gguf"), str(tmp_path / "other")]) == 2
    assert "b.gguf" in capsys.readouterr().err


# --- Types -----------------------------------------------------------------------------------------------

WIDE = Variant(LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
"""Its rows are whole blocks of every type."""


def random_blocks(kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of any bits but for exponents, whose highest stay clear: no NaN, no Inf."""
    rng = np.random.Generator(np.random.PCG64(int(kind)))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(256, size=(*shape[:-1], shape[-1] // block * size), dtype=np.uint8) & 0x3B


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_every_type_is_dequantised(kind, tmp_path):
    """To what the package makes of a whole tensor at once."""
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    blocks = {name: (kind, random_blocks(kind, x.shape)) for name, x in tensors.items() if x.ndim > 1}
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, blocks=blocks)
    checkpoint = converted(path, dtype="float32")
    params = all_params(checkpoint)
    expected = {name: gguf.dequantize(data, kind) for name, (_, data) in blocks.items()}
    layer = params["layers"][0]
    np.testing.assert_array_equal(params["embeddings"]["tokens"], expected["token_embd.weight"])
    np.testing.assert_array_equal(layer["mlp"]["down"], expected["blk.0.ffn_down.weight"].T)
    found = source_tensors(params, checkpoint.config)
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
    found = source_tensors(all_params(checkpoint), checkpoint.config)
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
    assert whole.size <= PIECE
    monkeypatch.setattr("convert.gguf.tensors.PIECE", 3 * 256)
    np.testing.assert_array_equal(read_tensor(tensor), whole)
    np.testing.assert_array_equal(read_tensor(tensor, slice(5, 77)), whole[5:77])


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Quantised; the largest tensor is counted in float32, as it is dequantised."""
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


# --- Damage ----------------------------------------------------------------------------------------------

Change = Callable[[bytearray], object]


def patched(at: int, form: str, value: int) -> Change:
    return lambda data: struct.pack_into(form, data, at, value)


def last_offset(data: bytearray, form: str, ahead: int, value: int) -> None:
    """Writes so many bytes before the offset of the tensor `token_embd.weight`, the last of the header."""
    name = b"token_embd.weight"
    at = data.rindex(name) + len(name) + 4 + 16 + 4
    struct.pack_into(form, data, at - ahead, value)


def cut(size: int) -> Change:
    return lambda data: data.__delitem__(slice(size, None))


HEADERS: dict[str, tuple[Change, str]] = {
    "empty": (cut(0), "a.gguf: not a GGUF file"),
    "other file": (patched(0, "<I", 7), "a.gguf: not a GGUF file"),
    "pointer": (
        lambda data: data.__setitem__(slice(None), b"version https://git-lfs.github.com/spec/v1\noid 0\n"),
        "Git-LFS pointer; run `git lfs pull`",
    ),
    "version 1": (patched(4, "<I", 1), r"GGUF version 1 is not supported; supported are \(2, 3\)"),
    "big-endian": (patched(4, ">I", 3), "big-endian machines; only little-endian"),
    "only a start": (cut(20), "the header takes 8 bytes, the file has 4 left"),
    "many tensors": (patched(8, "<Q", 2**60), r"a header of \d+ tensors takes \d+ bytes, the file has"),
    "many values": (patched(16, "<Q", 2**40), r"a header of \d+ values takes \d+ bytes, the file has"),
    "one value less": (patched(16, "<Q", 20), "a.gguf"),
    "long key": (patched(24, "<Q", 2**62), "key 0 has a string of 4611686018427387904 bytes, more than"),
    "key past the end": (patched(24, "<Q", 2**23), "key 0 takes 8388608 bytes, the file has"),
    "unknown type": (patched(24 + 8 + 20, "<I", 99), "'general.architecture' has the unknown type 99"),
    "key of no text": (patched(32, "<I", 0xFFFFFFFF), "cannot read .*a.gguf: 'utf-8' codec"),
    "cut off in the header": (cut(900), "cut off"),
    "cut off in the data": (cut(-100), r"ends at byte \d+, the file has \d+: cut off"),
    "shifted tensor": (lambda data: last_offset(data, "<Q", 0, 64), "lies at 64, expected"),
    "unaligned tensor": (
        lambda data: last_offset(data, "<Q", 0, 2**63),
        "lies at 9223372036854775808, expected",
    ),
    "unknown tensor type": (lambda data: last_offset(data, "<I", 4, 77), "has the unknown type 77"),
    "huge tensor": (lambda data: last_offset(data, "<Q", 12, 2**61), r"ends at byte \d+, the file has"),
    "empty tensor": (lambda data: last_offset(data, "<Q", 12, 0), r"axes \[48, 0\]; they must be > 0"),
    "axes": (
        lambda data: last_offset(data, "<I", 24, 5),
        "'token_embd.weight' has 5 axes, it must have 1 to 4",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_headers_are_refused(name, tmp_path):
    change, message = HEADERS[name]
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    refuse(path, message)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def raw(values: list[bytes], tensors: list[bytes] | None = None) -> bytes:
    """A file with these values and tensors, one block of data behind."""
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors or []), len(values))
    header = start + b"".join(values) + b"".join(tensors or [])
    return header + bytes(-len(header) % 32 + 32)


NUMBER = struct.pack("<II", 4, 7)
TENSOR = text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
RAW: dict[str, tuple[bytes, str]] = {
    "a key twice": (raw([text("k") + NUMBER] * 2), "duplicate key 'k'"),
    "a tensor twice": (raw([], [TENSOR, TENSOR]), "duplicate tensor 't'"),
    "arrays of arrays": (raw([text("k") + struct.pack("<IIQ", 9, 9, 1)]), "'k' is an array of arrays"),
    "a long array": (raw([text("k") + struct.pack("<IIQ", 9, 4, 2**40)]), "'k' has 1099511627776 elements"),
    "an array past the end": (raw([text("k") + struct.pack("<IIQ", 9, 4, 2**20)]), "k takes 4194304 bytes"),
    "texts past the end": (raw([text("k") + struct.pack("<IIQ", 9, 8, 2**20)]), "k takes 8388608 bytes"),
    "alignment": (raw([text("general.alignment") + NUMBER]), "general.alignment=7 must be a power of two"),
    "nothing inside": (raw([]), "general.architecture=None is not supported; supported are"),
    "no model": (
        raw([text("general.architecture") + struct.pack("<I", 8) + text("llama")], [TENSOR]),
        "no token_embd.weight: not the weights of a language model",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_headers_that_say_what_cannot_be_are_refused(name, tmp_path):
    data, message = RAW[name]
    (tmp_path / "a.gguf").write_bytes(data)
    refuse(tmp_path / "a.gguf", message)


def write_with(path: Path, name: str = "llama-gqa", kind: str = "llama", **changes: Any) -> Path:
    """A variant with metadata of its architecture changed, `__` for a dot; None removes."""
    config = in_gguf(name).config
    values = gguf_values(config) | {key.replace("__", "."): value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(path, kind, values, gguf_tensors(config, weights(VARIANTS[name])))


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"kind": "mamba"}, "architecture='mamba' is not supported; .*'gemma3', 'granite'"),
    "missing": ({"block_count": None}, "llama.block_count=None must be a whole number > 0"),
    "text": ({"embedding_length": "48"}, "llama.embedding_length='48' must be a whole number"),
    "zero": ({"attention__head_count": 0}, "llama.attention.head_count=0 must be a whole number > 0"),
    "heads by layer": (
        {"attention__head_count_kv": [2, 2]},
        r"head_count_kv=\[2, 2\] must be a whole number",
    ),
    "epsilon": ({"attention__layer_norm_rms_epsilon": float("nan")}, "rms_epsilon=nan must be a number > 0"),
    "values of another width": (
        {"attention__value_length": 6},
        "value_length=6 is not supported; only .* 12",
    ),
    "layers": ({"block_count": 2**31}, "num_layers=2147483648 must be an integer from 1 to"),
    "partial rope": ({"rope__dimension_count": 6}, "partial_rotary_factor=0.5 is not supported"),
    "rope type": ({"rope__scaling__type": "spiral"}, "rope type 'spiral' is not supported"),
    "experts": ({"expert_count": 8}, "llama.expert_count=8: not supported for the architecture 'llama'"),
    "window": ({"attention__sliding_window": 8}, "llama.attention.sliding_window=8: not supported"),
    "a layer more": ({"block_count": 3}, r"missing keys \(9\): model.layers.2"),
    "a layer less": ({"block_count": 1}, r"unknown keys \(9\): blk.1.attn_k.weight"),
    "width": ({"feed_forward_length": 65}, r"mlp.gate_proj.weight' has shape \(64, 48\), .* \(65, 48\)"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_not_supported_are_refused(name, tmp_path):
    changes, message = VALUES[name]
    refuse(write_with(tmp_path / "a.gguf", **changes), message)


def test_values_that_say_nothing_are_passed_over(tmp_path):
    path = write_with(
        tmp_path / "a.gguf", expert_count=0, attention__key_length=None, rope__dimension_count=None
    )
    assert converted(path).config.head_dim == 12


def test_logits_that_gemma_bends_are_refused(tmp_path):
    path = write_with(tmp_path / "a.gguf", "gemma3", "gemma3", final_logit_softcapping=30.0)
    refuse(path, "final_logit_softcapping=30.0 is not supported")


def test_only_the_largest_gemma_scales_by_another_width(tmp_path):
    changes = {"block_count": 62, "attention__sliding_window_pattern": 6}
    settings = hf_settings(read_gguf(write_with(tmp_path / "a.gguf", "gemma3", "gemma3", **changes)))
    assert settings["query_pre_attn_scalar"] == 48 // 4
    assert settings["layer_types"][4:7] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_types_that_cannot_be_dequantised_are_named(tmp_path):
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    blocks = {"output.weight": (Kind.Q8_K, random_blocks(Kind.Q8_K, (VOCAB, 256)))}
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, blocks=blocks)
    refuse(path, r"'output.weight' has type Q8_K; supported are \['F32', 'F16', 'Q4_0'")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_K], ids=lambda kind: kind.name)
def test_not_finite_weights_are_named_and_leave_nothing(kind, tmp_path):
    tensors = gguf_tensors(WIDE.config, weights(WIDE))
    shape = tensors["blk.0.ffn_up.weight"].shape
    if kind is Kind.Q4_K:
        bad = np.full((*shape[:-1], 144), 0xFF, np.uint8)
    else:
        bad = np.full(shape, np.nan, np.float32 if kind is Kind.F32 else np.float16)
    blocks = {"blk.0.ffn_up.weight": (kind, bad)}
    path = write_gguf(tmp_path / "a.gguf", "llama", gguf_values(WIDE.config), tensors, blocks=blocks)
    refuse(path, r"a.gguf: 'model.layers.0.mlp.up_proj.weight' holds NaN or Inf")


def test_a_file_that_shrinks_is_refused(tmp_path):
    path = write_variant_gguf("llama-gqa", tmp_path / "a.gguf")
    tensor = read_gguf(path).tensors["output.weight"]
    path.write_bytes(path.read_bytes()[: tensor.start + 100])
    with pytest.raises(ConversionError, match="became shorter while it was read"):
        read_tensor(tensor)


def renamed(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


SPLITS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absent": (
        lambda p: (p.with_name("a-00002-of-00003.gguf").unlink(), p)[1],
        r"lacks parts \(1\): a-00002-of-00003.gguf",
    ),
    "another name": (
        lambda p: renamed(p, "b.gguf"),
        "b.gguf: a part of a model of split.count=3 must be named",
    ),
    "a part twice": (
        lambda p: (p.with_name("a-00002-of-00003.gguf").write_bytes(p.read_bytes()), p)[1],
        r"a-00002.*: split.no and split.count are \(0, 3\), expected \(1, 3\)",
    ),
    "a part of another": (
        lambda p: (write_variant_gguf("llama-gqa", p.with_name("a-00003-of-00003.gguf")), p)[1],
        r"a-00003.*: split.no and split.count are \(None, None\), expected \(2, 3\)",
    ),
    "damaged part": (
        lambda p: (p.with_name("a-00003-of-00003.gguf").write_bytes(b"GGUF"), p)[1],
        "a-00003-of-00003.gguf: the version takes 4 bytes",
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_files_lack_nothing(name, tmp_path):
    change, message = SPLITS[name]
    refuse(change(write_variant_gguf("llama-gqa", tmp_path / "a.gguf", parts=3)), message)


# --- Rotary factors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "theta", "head_dim"), [(8.0, 5e5, 128), (32.0, 5e5, 64)])
def test_factors_of_the_real_llama_3_give_its_settings(factor, theta, head_dim):
    """By the formula of transformers, whose products are float32."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)
    scaled = (1 - smooth) * frequencies / factor + smooth * frequencies
    factors = (frequencies / scaled).astype(np.float32)
    assert llama3_rope([float(x) for x in factors], theta) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_are_refused():
    with pytest.raises(ConversionError, match="not the factors of Llama 3's rotary embedding"):
        llama3_rope([1.0, 2.0, 1.0, 8.0], 1e4)
    assert llama3_rope([1.0, 1.0], 1e4) == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.ones(5, np.float32), r"'rope_freqs.weight' is F32 \(5,\), expected F32 \(6,\)"),
        (np.ones(6, np.float16), "'rope_freqs.weight' is F16"),
        (np.array([1, 1, 1, 1, 1, np.inf], np.float32), "'rope_freqs.weight' must hold finite numbers > 0"),
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
        r"llama.rope.scaling.type='linear' with factor 2.0 is not supported beside \['rope_freqs.weight'\]",
    )


def test_one_of_two_sets_of_factors_is_refused(tmp_path):
    config = in_gguf("phi3-long").config
    tensors = gguf_tensors(config, weights(VARIANTS["phi3-long"]))
    del tensors["rope_factors_short.weight"]
    refuse(
        write_gguf(tmp_path / "a.gguf", "phi3", gguf_values(config), tensors), "has no 'rope_factors_short.w"
    )
