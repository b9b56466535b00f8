"""Division of prompts into chunks: little padding at any length, and no more tokens than memory allows."""

import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from benchmarks.model.models import LLAMA_2_13B, LLAMA_3_8B, QWEN_1_5B
from zdc_jax.generation import chunks
from zdc_jax.generation.chunks import (
    MOST_PADDING,
    PREFILL_CHUNK,
    SMALLEST_SPLIT,
    choose_chunk,
    choose_chunk_tokens,
    choose_step_tokens,
    divide_prompt,
    list_widths,
)
from zdc_jax.loading import LanguageModel


@pytest.mark.parametrize("most", [32, 2048, 16384])
def test_chunks_have_little_padding_at_any_length(most):
    for tokens in (*range(1, 3000, 7), 5000, 8000, 9000, 32_000, 131_000):
        widths = list(divide_prompt(tokens, most))
        assert all(width & (width - 1) == 0 and 32 <= width <= most for width in widths)
        padding = sum(widths) - tokens
        assert 0 <= padding <= max(MOST_PADDING * tokens, SMALLEST_SPLIT // 2 - 1)
        assert sum(widths[:-1]) < tokens  # The last chunk is not empty.
        assert len(widths) <= tokens // most + 4


def test_chunks_of_full_width_come_first():
    assert list(divide_prompt(8000, 8192)) == [8192]
    assert list(divide_prompt(9000, 2048)) == [2048] * 4 + [1024]
    assert list(divide_prompt(1100, 2048)) == [1024, 128]
    assert list(divide_prompt(70, 2048)) == [128]


@pytest.mark.parametrize("block", [64, 512])
def test_chunks_begin_at_blocks(block):
    for tokens in range(1, 3000, 13):
        begins = np.cumsum([0, *divide_prompt(tokens, 1024, block)])[:-1]
        assert not (begins % block).any()


def test_long_chunks_of_an_engine_have_little_padding():
    assert choose_chunk_tokens(1300, 8192) == 1300
    assert choose_chunk_tokens(5000, 748) == 748
    assert choose_chunk_tokens(8000, 8192) == 8000
    assert choose_chunk_tokens(5000, 8192) == 4096
    assert choose_chunk_tokens(5000, 6000) == 4096
    assert choose_chunk_tokens(20_000, 8192) == 8192


def test_a_step_of_a_small_model_on_a_gpu_reads_more_tokens(monkeypatch):
    assert choose_step_tokens(QWEN_1_5B) == 512
    monkeypatch.setattr(chunks.jax, "default_backend", lambda: "gpu")
    assert choose_step_tokens(QWEN_1_5B) == 8192
    assert choose_step_tokens(LLAMA_3_8B) == 8192
    assert choose_step_tokens(LLAMA_2_13B) == 4096
    assert choose_step_tokens(LLAMA) == 8192


def test_widths_on_a_gpu_have_little_padding(monkeypatch):
    assert list_widths(512) == [32, 64, 128, 256, 512]
    monkeypatch.setattr(chunks.jax, "default_backend", lambda: "gpu")
    assert list_widths(2048) == [128, 256, 512, 768, 1024, 1280, 1536, 2048]
    assert list_widths(768 * 4 // 3) == [128, 256, 512, 768, 1024]
    assert list_widths(64) == [64]


def test_a_chunk_is_as_long_as_free_memory_allows(monkeypatch):
    model = LanguageModel(TinyModel(LLAMA).dense)
    assert choose_chunk(model, sequences=8, capacity=1024) == PREFILL_CHUNK  # A CPU does not tell.
    found = []
    for free in (10**6, 10**8, 10**12):
        monkeypatch.setattr(chunks, "free_device_bytes", lambda free=free: free)
        found.append([choose_chunk(model, sequences=count, capacity=1024) for count in (1, 8)])
    assert found[0] == [SMALLEST_SPLIT, SMALLEST_SPLIT]
    assert found[2] == [chunks.TOKENS_AT_ONCE, chunks.TOKENS_AT_ONCE // 8]
    assert found[0][0] <= found[1][0] <= found[2][0]
