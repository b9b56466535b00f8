"""Division of prompts into chunks, each of which is read by one prefill call."""

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int

from zdc_jax.cache.kv_cache import free_device_bytes
from zdc_jax.config import ModelConfig
from zdc_jax.loading import LanguageModel
from zdc_jax.model.params import num_params
from zdc_jax.ops.shift import BLOCK

PREFILL_CHUNK = 2048
"""Prompt tokens of one call where the device says little, and fewest of an engine's default on GPUs."""
MOST_OF_STEP = 8192
"""Most prompt tokens of an engine's step by default."""
CPU_STEP = 512
"""Prompt tokens of an engine's step by default where there is no GPU. Each width takes seconds to compile."""
STEP_FLOPS = 1.4e14
"""Floating-point operations of an engine's step by default, about 0.2 s of an H100 (decision 0021).

Running requests get one token in this time.
"""
TOKENS_AT_ONCE = 32_768
"""Tokens of all sequences in one call of `generate` if memory allows.

On an H100, eight prompts of 8,000 tokens took 4 % longer with 16,384 tokens at once than with 65,536.
"""
MEMORY_SHARE = 0.25
"""Share of the free memory that one call may need."""
SMALLEST_ON_GPU = 128
"""Smallest padded chunk of an engine on a GPU. Shorter chunks take as long, since weights are read anyway."""
BETWEEN_POWERS = (768, 1280, 1536)
"""Padded widths of an engine's chunks on a GPU in addition to powers of two. Each costs compile time."""
SMALLEST_BUCKET = 32
"""Smallest padded chunk; chunks are padded to powers of two, so that new lengths rarely recompile."""
MOST_PADDING = 0.12
"""Largest padding as a share of a prompt, in prompts that are longer than `SMALLEST_SPLIT`."""
SMALLEST_SPLIT = 256
"""Largest chunk that is never split to save padding, because each call reads all weights."""


def bucket(length: int, smallest: int = SMALLEST_BUCKET) -> int:
    """Round `length` up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (length - 1).bit_length())


def find_block(model: LanguageModel) -> int:
    """Return the tokens that a plan's methods store together; chunks begin at multiples of it."""
    return math.lcm(*(spec.alignment for spec in model.plan.layer_caches("bfloat16")))


def divide_prompt(tokens: int, most: int, block: int = 1) -> Iterator[int]:
    """Yield the padded widths of the chunks of a prompt: powers of two, at most `most`, a power of two.

    Together they have room for all tokens, and at most `MOST_PADDING` more or less than half of
    `SMALLEST_SPLIT` tokens more. Each begins at a multiple of `block`, a power of two.
    """
    smallest = max(SMALLEST_SPLIT, block)
    left = tokens
    while left > 0:
        width = min(bucket(left), most)
        if width > smallest and width - left > MOST_PADDING * tokens:
            width //= 2
        yield width
        left -= width


def choose_chunk(model: LanguageModel, *, sequences: int, capacity: int) -> int:
    """Return the most tokens that one prefill call should read of each sequence, a power of two.

    Long chunks dequantize earlier tokens less often, but need more memory at a time.

    Args:
      model: model that reads the prompts.
      sequences: number of prompts.
      capacity: tokens that the cache holds for each sequence.
    """
    free = free_device_bytes()
    if free is None:
        return PREFILL_CHUNK
    each = _bytes_per_token(model, capacity)
    at_once = min(TOKENS_AT_ONCE, int(MEMORY_SHARE * free / each))
    return max(SMALLEST_SPLIT, find_block(model), 1 << (max(1, at_once // sequences).bit_length() - 1))


def choose_chunk_tokens(left: int, most: int) -> int:
    """Return the tokens of a text's next chunk in an engine, at most `most`, when `left` tokens are left.

    Long chunks have little padding. Short ones are not split for less padding, since each program is slow to
    start.
    """
    if (tokens := min(left, most)) <= PREFILL_CHUNK:
        return tokens
    return min(left, next(divide_prompt(left, 1 << (most.bit_length() - 1))))


def list_widths(most: int) -> list[int]:
    """Return the padded widths of an engine's chunks, in ascending order.

    Args:
      most: most tokens of a chunk, a power of two >= 32; the last width.
    """
    widths = {bucket(1 << i) for i in range(most.bit_length())}
    if jax.default_backend() == "gpu":
        widths = {max(width, min(most, SMALLEST_ON_GPU)) for width in widths}
        widths |= {width for width in BETWEEN_POWERS if width < most}
    return sorted(widths)


def choose_step_tokens(config: ModelConfig) -> int:
    """Return the most prompt tokens that an engine should prefill in a step, a power of two."""
    if jax.default_backend() != "gpu":
        return CPU_STEP
    tokens = int(STEP_FLOPS / (2 * num_params(config)))
    return min(MOST_OF_STEP, max(PREFILL_CHUNK, 1 << (max(1, tokens).bit_length() - 1)))


def _bytes_per_token(model: LanguageModel, capacity: int) -> int:
    """Estimate the bytes of a layer's temporary arrays for each token of a chunk."""
    config = model.config
    widths = 8 * config.embed_dim + 3 * config.ffn_dim + 8 * config.num_heads * config.head_dim
    gains = (
        3 * config.num_heads * -(-capacity // BLOCK) if any(ranks.shift for ranks in model.plan.layers) else 0
    )
    return 2 * widths + 4 * gains


def padded(rows: Sequence[np.ndarray], width: int) -> Int[np.ndarray, "B {width}"]:
    """Pad token sequences of at most `width` tokens with zeros on the right."""
    tokens = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens
