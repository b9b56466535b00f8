"""`generate` and `stream`: text or token ids in, text and measurements out."""

from collections.abc import Iterator, Sequence

from zdc_jax.generation.request import Prompt, Request
from zdc_jax.generation.results import Completion as Completion
from zdc_jax.generation.results import Delta as Delta
from zdc_jax.generation.results import Generation as Generation
from zdc_jax.generation.results import Timings as Timings
from zdc_jax.generation.run import Run
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import PREFILL_CHUNK
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation

STREAM_STEPS = 8
"""Tokens decoded between two looks of the host, when streaming or watching for stop strings. The next ones
may be under way at a look, so up to twice as many are decoded for nothing."""


def generate(
    model: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    On a mesh (`load(mesh=…)`) prompts come whole, without `prefill_chunk`, with their tokens over `sequence`,
    and decoding divides heads over the same devices.

    Args:
      prompts: one prompt or a list, each a text or a sequence of token ids; lengths may differ.
      sampling: one for all prompts, or one for each; default greedy. What is drawn for a prompt depends on
        it and its sampling, not on the other prompts or their order; equal ones in one call differ.
      stop_tokens: id or ids that end a row (checked on the device); default the model's end-of-sequence ids.
      stop: string or strings that end a row (checked every few steps; what was decoded past one is dropped).
      prefill_chunk: longest prompt piece of one prefill call, a power of two >= 32.
      implementation: of attention: `pallas`, `xla`, or None for the first that can (`zdc_jax.ops.attention`).

    Raises:
      PromptError: empty prompt, too many tokens for the model, id outside the vocabulary, bad option.
      MeshError: the batch cannot be divided over the model's mesh.
      CacheMemoryError: the KV cache does not fit; says what would.
      NotImplementedError: the chosen implementation cannot do this call, with the reason.
    """
    request = Request.checked(model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk)
    run = Run(model, request, implementation)
    for _ in run.deltas(STREAM_STEPS if request.stop else request.max_new_tokens):
        pass
    return run.result()


def stream(
    model: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    prefill_chunk: int = PREFILL_CHUNK,
    implementation: Implementation | None = None,
) -> Iterator[Delta]:
    """As `generate`, giving the pieces of each row as they come; joined, they equal `generate`'s result."""
    request = Request.checked(model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk)
    return Run(model, request, implementation).deltas(STREAM_STEPS)
