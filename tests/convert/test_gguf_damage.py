"""GGUF files that are damaged or unsupported: each is refused by name and leaves no files."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    WIDE,
    converted,
    gguf_tensors,
    gguf_values,
    in_gguf,
    random_blocks,
    write_gguf,
    write_variant_gguf,
)
from hf_variants import VARIANTS, VOCAB, weights
from test_conversion import names

from convert.conversion import convert
from convert.gguf.reader import read_gguf
from convert.gguf.settings import derive_settings
from convert.gguf.tensors import read_tensor
from zdc_jax.errors import ConversionError


def refuse(path: Path, message: str) -> None:
    """Assert that conversion fails with this message and leaves no files."""
    before = names(path.parent)
    with pytest.raises(ConversionError, match=message):
        convert(path, path.parent / "ours", progress=False)
    assert names(path.parent) == before


Change = Callable[[bytearray], object]


def patched(at: int, form: str, value: int) -> Change:
    return lambda data: struct.pack_into(form, data, at, value)


def last_offset(data: bytearray, form: str, ahead: int, value: int) -> None:
    """Write a value `ahead` bytes before the offset of the header's last tensor, `token_embd.weight`."""
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
    """Return a file with these values and tensors, followed by one block of data."""
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
        "no tensor token_embd.weight, so it is not a language model",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_headers_that_say_what_cannot_be_are_refused(name, tmp_path):
    data, message = RAW[name]
    (tmp_path / "a.gguf").write_bytes(data)
    refuse(tmp_path / "a.gguf", message)


def write_with(path: Path, name: str = "llama-gqa", kind: str = "llama", **changes: Any) -> Path:
    """Write a variant with changed metadata of its architecture, `__` for a dot; None removes a key."""
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
    settings = derive_settings(read_gguf(write_with(tmp_path / "a.gguf", "gemma3", "gemma3", **changes)))
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
    refuse(path, r"a.gguf: 'model.layers.0.mlp.up_proj.weight' has NaN or Inf")


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
        "b.gguf: a part of a model with split.count=3 must be named",
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
