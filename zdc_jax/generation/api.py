"""Entry points of text generation: `generate` and `stream`."""

from collections.abc import Iterator, Sequence

from zdc_jax.generation.request import Prompt, Request
from zdc_jax.generation.results import Delta, Generation
from zdc_jax.generation.run import Run
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.ops.attention import Implementation

STREAM_STEPS = 8
"""Tokens decoded between two checks by the host, when streaming or watching for stop strings.

The next call may already run during a check, so up to twice as many tokens are decoded and discarded.
"""


def generate(
    model: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    stop: Sequence[str] | str = (),
    new_text: bool = False,
    prefill_chunk: int | None = None,
    implementation: Implementation | None = None,
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens.

    On a mesh (`load(mesh=…)`) each prompt is prefilled whole, with its tokens split over `sequence`;
    `prefill_chunk` has no effect. Decoding splits heads over the same devices.

    Args:
      model: model with its weights and tokenizer, from `load`.
      prompts: one prompt or a list of prompts, each a text or a sequence of token ids. Lengths may differ.
      max_new_tokens: most tokens to generate for each prompt, at least 1.
      sampling: one `Sampling` for all prompts, or one for each; default greedy. The tokens drawn for a
        prompt depend only on the prompt and its sampling, not on the other prompts or their order. Equal
        requests in one call draw different tokens.
      stop_tokens: id or ids that end a completion, checked on the device; default the model's
        end-of-sequence ids.
      stop: string or strings that end a completion. They are checked every few steps, and text after a stop
        string is dropped.
      new_text: whether completions are texts of their own, as replies in a chat. By default their text
        continues the prompt; with SentencePiece it may begin with a space.
      prefill_chunk: most prompt tokens of one prefill call, a power of two >= 32; default as many as free
        memory allows (`zdc_jax.generation.chunks`).
      implementation: attention implementation, `pallas`, `cudnn` or `xla`; default the first that supports
        the call (`zdc_jax.ops.attention`).

    Returns:
      One completion for each prompt, with cache size and timings.

    Raises:
      PromptError: a prompt is empty, too long or has ids outside the vocabulary, or an option is invalid.
      MeshError: the batch cannot be divided over the model's mesh.
      CacheMemoryError: the KV cache does not fit; the message says what would.
      NonFiniteError: logits are NaN or Inf; the message names the prompt and dtypes to choose.
      NotImplementedError: the chosen implementation does not support the call; the message says why.
    """
    request = Request.from_arguments(
        model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk, new_text=new_text
    )
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
    new_text: bool = False,
    prefill_chunk: int | None = None,
    implementation: Implementation | None = None,
) -> Iterator[Delta]:
    """Yield the new tokens and text of each completion as they are generated.

    Arguments and errors are those of `generate`. The deltas of a prompt, joined, equal its completion.
    """
    request = Request.from_arguments(
        model, prompts, max_new_tokens, sampling, stop_tokens, stop, prefill_chunk, new_text=new_text
    )
    return Run(model, request, implementation).deltas(STREAM_STEPS)
