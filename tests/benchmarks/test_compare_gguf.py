"""Comparison of a tiny GGUF file with its Hugging Face folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_files import in_gguf, write_variant_gguf
from hf_variants import write_variant

from benchmarks.quality import compare_gguf


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
@pytest.mark.matrix
def test_a_file_has_the_logits_of_the_folder_that_transformers_saves(name, tmp_path):
    # transformers ignores settings of tiny files that differ from its defaults: Gemma 3's rotary embedding,
    # scale and windows, and the head dimension of Qwen3.
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    row = compare_gguf.compare(write_variant_gguf(name, tmp_path / "a.gguf"), tmp_path, tokens=24)
    assert row["same_fingerprint"]
    assert row["gguf_and_folder"] == 0
    assert row["gguf_and_transformers"] < 1e-5 * row["largest_logit"]


@pytest.mark.full
def test_differences_are_found(tmp_path, monkeypatch):
    def export(model: Path, folder: Path, ids: np.ndarray) -> np.ndarray:
        write_variant("llama-gqa", folder)
        (folder / "config.json").write_text(json.dumps(in_gguf("llama-gqa").config | {"rope_theta": 3e4}))
        return np.ones((*ids.shape, 1), np.float32)

    monkeypatch.setattr(compare_gguf, "export", export)
    row = compare_gguf.compare(write_variant_gguf("llama-gqa", tmp_path / "a.gguf"), tmp_path, tokens=24)
    assert row["gguf_and_folder"] > 0.01
    assert row["other_ids"] == list(compare_gguf.SAMPLES)
