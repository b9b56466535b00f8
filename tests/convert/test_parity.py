"""Logits compared with transformers: golden arrays everywhere, live models with torch (marker gpu)."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hf_variants import VARIANTS, VOCAB, token_ids, write_variant
from mutations import random_basis

from convert.conversion import convert, verify_against_transformers
from zdc_jax import CompressionPlan, load
from zdc_jax.config import DTYPES
from zdc_jax.errors import CalibrationError, CheckpointError, PlanError

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCES = ("ref-llama-23m", "ref-opt-26m")
REFERENCE_POSITIONS = [0, 63, 1000, 2047, 4095]
TOLERANCE = 1e-4
"""Tolerance relative to the largest |logit|, in float32 with exact products."""


def golden(file: str, name: str) -> np.ndarray:
    """Return the logits of transformers."""
    with np.load(GOLDEN / f"{file}.npz") as arrays:
        return arrays[name]


def check(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_golden_logits(name, tmp_path):
    convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    network = load(tmp_path / "ours", max_positions=VARIANTS[name].max_positions).network
    logits = np.asarray(network(jnp.asarray(token_ids(VOCAB, (2, 24)))))
    check(logits, golden("variants", name))


FAMILIES = (
    *("mistral", "qwen2-sliding", "qwen3", "gemma3", "granite", "phi3", "phi3-long"),
    *("llama-yarn", "llama-dynamic"),
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.full
def test_cached_pieces_under_a_full_rank_plan_equal_golden_logits(name, tmp_path):
    # The weights are folded into a random basis, and each sliding layer has its ring.
    checkpoint = convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    plan, basis = CompressionPlan.full(checkpoint.config), random_basis(checkpoint)
    positions = VARIANTS[name].max_positions
    network = load(tmp_path / "ours", plan, basis=basis, max_positions=positions).network
    cache, tokens, pieces = network.new_cache(batch=2, capacity=24), token_ids(VOCAB, (2, 24)), []
    for start, end in ((0, 11), (11, 23), (23, 24)):
        hidden, cache = network.extend(cache, jnp.asarray(tokens[:, start:end]), jnp.full(2, end))
        pieces.append(network.embeddings.unembed(hidden))
    check(np.concatenate(pieces, axis=1), golden("variants", name))
    slides = all(layer.window for layer in checkpoint.config.layers)
    assert (network.new_cache(batch=2, capacity=128).bytes() == cache.bytes()) is slides


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.matrix
def test_rotary_pairs_are_refused_past_norms(name, tmp_path):
    checkpoint = convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    basis = replace(random_basis(checkpoint), qk_kind="pairs")
    with pytest.raises(CalibrationError, match="qk_kind='pairs' does not support models with norms"):
        load(tmp_path / "ours", CompressionPlan.full(checkpoint.config), basis=basis)


@pytest.mark.parametrize(
    ("name", "most"), [("llama-dynamic", 64), ("llama-yarn", 128), ("phi3-long", 128), ("opt", 128)]
)
@pytest.mark.matrix
def test_contexts_go_as_far_as_the_rotary_scaling(name, most, tmp_path):
    convert(write_variant(name, tmp_path / "hf"), tmp_path / "ours", progress=False)
    assert load(tmp_path / "ours", max_positions=most).config.max_positions == most
    for wrong in (most + 1, 0, 1.5):
        with pytest.raises(CheckpointError, match=f"max_positions={wrong} .* from 1 to the model's {most}"):
            load(tmp_path / "ours", max_positions=wrong)


def test_frequencies_other_than_those_of_calibration_are_said(tmp_path, caplog):
    checkpoint = convert(write_variant("phi3-short", tmp_path / "hf"), tmp_path / "ours", progress=False)
    plan, basis = CompressionPlan.full(checkpoint.config), random_basis(checkpoint)
    load(tmp_path / "ours", plan, basis=basis, max_positions=64)
    assert not caplog.text
    load(tmp_path / "ours", plan, basis=basis, max_positions=32)
    assert "max_positions=32 changes the rotary frequencies" in caplog.text


def test_a_basis_that_no_plan_folds_is_refused(tmp_path):
    checkpoint = convert(write_variant("phi3-short", tmp_path / "hf"), tmp_path / "ours", progress=False)
    plain = replace(CompressionPlan.full(checkpoint.config), rotated=False)
    for plan, reason in ((None, "pass plan= as well"), (plain, "this plan has rotated=False")):
        with pytest.raises(PlanError, match=f"basis= needs a plan .*{reason}"):
            load(tmp_path / "ours", plan, basis=random_basis(checkpoint))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.usefixtures("optimised")
@pytest.mark.full
def test_reference_models_equal_golden_logits(name, data, tmp_path):
    convert(data / "models" / name, tmp_path / "ours", progress=False)
    network = load(tmp_path / "ours", dtype="float32").network
    hidden = network.hidden(jnp.asarray(token_ids(8192, (1, 4096))))
    logits = network.embeddings.unembed(hidden[0, jnp.asarray(REFERENCE_POSITIONS)])
    check(np.asarray(logits), golden("reference", name))


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
    positions = VARIANTS[name].max_positions if name in VARIANTS else None
    network = load(tmp_path / "ours", dtype="float32", max_positions=positions).network
    error = verify_against_transformers(
        source, lambda tokens: np.asarray(network(jnp.asarray(tokens))), vocab_size=vocab, shape=(2, 24)
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
