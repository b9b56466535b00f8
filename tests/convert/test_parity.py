"""Logits against transformers: golden arrays everywhere, live where torch imports (marker gpu)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_variants import VARIANTS, VOCAB, token_ids, write_variant

from convert.conversion import convert, verify_against_transformers
from convert.hf.config import DTYPES
from zdc_jax import load

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCES = ("ref-llama-23m", "ref-opt-26m")
REFERENCE_POSITIONS = [0, 63, 1000, 2047, 4095]
TOLERANCE = 1e-4
"""Of the largest |logit|, float32 with exact products."""


def check(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_golden_logits(name, tmp_path):
    convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    network = load(tmp_path / "ours").network
    logits = np.asarray(network(jnp.asarray(token_ids(VOCAB, (2, 24)))))
    check(logits, np.load(GOLDEN / "variants.npz")[name])


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.usefixtures("optimised")
def test_reference_models_equal_golden_logits(name, data, tmp_path):
    convert(data / "models" / name, tmp_path / "ours", progress=False)
    network = load(tmp_path / "ours", dtype="float32").network
    hidden = network.hidden(jnp.asarray(token_ids(8192, (1, 4096))))
    logits = network.embeddings.unembed(hidden[0, jnp.asarray(REFERENCE_POSITIONS)])
    check(np.asarray(logits), np.load(GOLDEN / "reference.npz")[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*VARIANTS, *REFERENCES])
def test_logits_equal_transformers_live(name, tmp_path, request):
    if name in VARIANTS:
        source, vocab = write_variant(name, tmp_path / "hf"), VOCAB
    else:
        source, vocab = request.getfixturevalue("data") / "models" / name, 8192
        if not source.exists():
            pytest.skip(f"{source} is absent")
    convert(source, tmp_path / "ours", progress=False)
    network = load(tmp_path / "ours", dtype="float32").network
    error = verify_against_transformers(
        source, lambda tokens: np.asarray(network(jnp.asarray(tokens))), vocab_size=vocab
    )
    print(f"{name}: {error:.1e}")
    assert error <= TOLERANCE


def test_every_dtype_is_stored_and_loaded(tmp_path):
    write_variant("llama-gqa", tmp_path / "hf")
    for dtype in DTYPES:
        convert(tmp_path / "hf", tmp_path / dtype, dtype=dtype, progress=False)
        model = load(tmp_path / dtype)
        assert model.network.dtype == dtype
        assert model.config.dtype == dtype
