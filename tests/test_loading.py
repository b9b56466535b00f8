"""Dtypes that families run in."""

import logging
from dataclasses import replace

import pytest
from conftest import LLAMA

from zdc_jax.errors import CheckpointError
from zdc_jax.loading import choose_dtype


def test_gemma_does_not_run_in_float16(caplog):
    gemma = replace(LLAMA, family="gemma3_text", dtype="float16")
    with pytest.raises(CheckpointError, match=r"dtype='float16': .* choose one of \['float32', 'bfloat16'\]"):
        choose_dtype(gemma, "float16")
    with caplog.at_level(logging.WARNING, "zdc_jax"):
        assert choose_dtype(gemma, None) == "bfloat16"
    assert "running in bfloat16" in caplog.text
    assert choose_dtype(gemma, "float32") == "float32"
    assert choose_dtype(replace(LLAMA, dtype="float16"), None) == "float16"
    assert choose_dtype(LLAMA, "float16") == "float16"
