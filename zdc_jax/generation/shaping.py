"""Changes of logits before a token is chosen: penalties, biases, and masks of allowed tokens.

Programs have a variant with a `Shaping` and one without. Requests without such options use the latter, unless
they share a step with a request that has some. Then their logits stay exactly the same.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer

from zdc_jax.axes import Array
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.masks import unpack_mask
from zdc_jax.generation.packed_parameters import PackedParameters
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import TextModel


class Shaping(NamedTuple):
    """Arrays from which logits of B sequences are changed.

    Attributes:
      counts: twice the times that each token was generated, plus 1 if it is in the prompt, [B, V] int32.
      bias: numbers to add to logits, -inf for forbidden tokens, [B, V] float32.
      mask: a bit for each token, 1 for allowed ones, the lowest bits first, [B, ceil(V / 32)] int32. None
        allows all.
    """

    counts: Int[Array, "B V"]
    bias: Float[Array, "B V"]
    mask: Int[Array, "B W"] | None = None

    @classmethod
    def of(
        cls, model: TextModel, samplings: Sequence[Sampling], prompts: Sequence[np.ndarray]
    ) -> "Shaping | None":
        """Return the arrays for sequences without an answer yet; None if no sequence needs them."""
        if not any(sampling.is_shaped for sampling in samplings):
            return None
        counts = [count_tokens(model.config.vocab_size, prompt, ()) for prompt in prompts]
        biases = [token_biases(model, sampling) for sampling in samplings]
        return cls(jnp.asarray(np.stack(counts)), jnp.asarray(np.stack(biases)))

    def apply(self, logits: Float[Array, "B V"], rows: PackedParameters) -> Float[Array, "B V"]:
        """Return changed logits. Those of sequences without options stay exactly the same."""
        generated = self.counts >> 1
        x = logits + jnp.where(rows.is_shaped[:, None], self.bias, 0)
        repetition = jnp.where(self.counts > 0, rows.repetition[:, None], 1)
        x = jnp.where(x > 0, x / repetition, x * repetition)
        x = x - rows.frequency[:, None] * generated - rows.presence[:, None] * (generated > 0)
        return x if self.mask is None else jnp.where(unpack_mask(self.mask, x.shape[-1]), x, -jnp.inf)

    def counted(self, tokens: Int[Array, " B"], active: Bool[Array, " B"]) -> Int[Array, "B V"]:
        """Return the counts after a new token of each active sequence."""
        return self.counts.at[jnp.arange(len(tokens)), tokens].add(2 * active.astype(jnp.int32))


class SequenceShaping(NamedTuple):
    """Arrays on the host for one sequence, as those of `Shaping` without the batch axis.

    Attributes:
      counts: counts of tokens, [V] int32.
      bias: numbers to add to logits, [V] float32.
      mask: bits of allowed tokens, [W] int32.
    """

    counts: np.ndarray
    bias: np.ndarray
    mask: np.ndarray


def count_tokens(
    vocab: int, prompt: Sequence[int] | np.ndarray, answer: Sequence[int]
) -> Int[np.ndarray, " V"]:
    """Return the numbers of `Shaping.counts` for one sequence, [V] int32."""
    generated = np.bincount(np.asarray(answer, np.int64), minlength=vocab)
    in_prompt = np.bincount(np.asarray(prompt, np.int64), minlength=vocab) > 0
    return (2 * generated + in_prompt).astype(np.int32)


def token_biases(model: TextModel, sampling: Sampling) -> np.ndarray:
    """Return the numbers of `Shaping.bias` for one sequence, [V] float32.

    Bad words of several tokens are left to the host, which must compare their first tokens with the answer.

    Raises:
      PromptError: an option names tokens outside the vocabulary, leaves no token, or needs a tokenizer.
    """
    vocab = model.config.vocab_size
    biases, bias = dict(sampling.logit_bias), np.zeros(vocab, np.float32)
    check_in_vocabulary("logit_bias", biases, model)
    check_in_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), model)
    bias[list(biases)] = list(biases.values())
    if sampling.allowed_token_ids is not None:
        forbidden = np.ones(vocab, bool)
        forbidden[list(sampling.allowed_token_ids)] = False
        bias[forbidden] = -np.inf
    if single := [word[0] for word in bad_word_ids(model, sampling) if len(word) == 1]:
        bias[single] = -np.inf
        if not np.isfinite(bias).any():
            raise PromptError(
                f"bad_words={list(sampling.bad_words)!r:.80} leave no token of allowed_token_ids; remove some"
            )
    return bias


def check_in_vocabulary(what: str, tokens: Iterable[int], model: TextModel) -> None:
    """Raise a `PromptError` that starts with `what` if a token id lies outside a model's vocabulary."""
    vocab = model.config.vocab_size
    if (bad := next((token for token in tokens if not 0 <= token < vocab), None)) is not None:
        raise PromptError(f"{what}: token id {bad} lies outside the vocabulary 0…{vocab - 1}")


def bad_word_ids(model: TextModel, sampling: Sampling) -> list[tuple[int, ...]]:
    """Return the token ids of all bad words, at the beginning of a text and, if they differ, after a space.

    Raises:
      PromptError: the model has no tokenizer, or it cannot encode a word.
    """
    if not sampling.bad_words:
        return []
    if model.tokenizer is None:
        raise PromptError("bad_words needs a model with a tokenizer; use logit_bias or allowed_token_ids")
    vocab, words = model.config.vocab_size, []
    for word in sampling.bad_words:
        first = _encode(model.tokenizer, word.lstrip())
        spaced = _encode(model.tokenizer, " " + word.lstrip())
        # As in vLLM: a separate token for the space would forbid nothing more.
        differ = len(spaced) == len(first) and spaced[:1] != first[:1]
        words += [first, spaced] if differ else [first]
    if any(not word or max(word) >= vocab for word in words):
        raise PromptError(
            f"bad_words={list(sampling.bad_words)!r:.80}: a word has no tokens in the vocabulary"
        )
    return words


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    with foreign_errors_as(PromptError, f"bad_words: the tokenizer cannot encode {text!r:.80}"):
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
