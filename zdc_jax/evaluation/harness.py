r"""Model `zdc_jax` for EleutherAI's lm-evaluation-harness (lm-eval >= 0.4.13, extra `eval`).

The command of lm-eval only finds models in its own package. Run this module instead, which registers the
model `zdc_jax` and then runs that command:

    python -m zdc_jax.evaluation.harness run --model zdc_jax \
        --model_args pretrained=model/,plan=plan.json --tasks …

From Python, pass `HarnessModel("model/", "plan.json")` to `lm_eval.simple_evaluate`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from tqdm import tqdm

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    needed = f"zdc_jax.evaluation.harness needs {error.name}; run: pip install 'zdc-jax[eval]'"
    if __name__ == "__main__":
        raise SystemExit(f"error: {needed}") from None
    raise ModuleNotFoundError(needed, name=error.name) from error

from zdc_jax.conversation.prompt import chat_stop_tokens, get_template_and_tokenizer
from zdc_jax.errors import PromptError
from zdc_jax.evaluation.batches import pad_batch
from zdc_jax.evaluation.likelihood import score_continuations
from zdc_jax.generation.api import generate
from zdc_jax.generation.request import tokenized
from zdc_jax.generation.sampling import SEEDS, Sampling
from zdc_jax.loading import load

ARGUMENTS = ("pretrained", "plan", "dtype", "max_positions", "batch_size")
GENERATION_OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed")
DEFAULT_MAX_GEN_TOKS = 256
"""Default number of generated tokens, the same as in lm-eval's own models."""


@dataclass(frozen=True)
class GenerationRequest:
    """Parsed request of lm-eval for generated text.

    Attributes:
      index: index of the request.
      context: token ids of the context.
      until: stop strings.
      max_gen_toks: largest number of generated tokens.
      sampling: sampling parameters.
    """

    index: int
    context: list[int]
    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling


@register_model("zdc_jax")
class HarnessModel(TemplateLM):
    """Model interface of lm-eval for a converted folder and a plan.

    All requests read the compressed cache. Contexts that are too long are truncated at their beginning, as in
    lm-eval's own models.
    """

    def __init__(
        self,
        pretrained: str | Path,
        plan: str | Path | None = None,
        dtype: str | None = None,
        max_positions: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        **others: Any,
    ):
        """Load the model.

        Args:
          pretrained: converted folder.
          plan: as in `zdc_jax.load`.
          dtype: as in `zdc_jax.load`.
          max_positions: as in `zdc_jax.load`.
          batch_size: sequences per batch.
          device: ignored. The command of lm-eval passes it to every model; JAX chooses its own device.
          others: not allowed.

        Raises:
          ValueError: unknown arguments, or a `batch_size` that is not a whole number >= 1 (such as `auto`).
          PromptError: the folder has no tokenizer.
          ZDCError: `zdc_jax.load` raises it.
        """
        super().__init__()
        if others:
            raise ValueError(
                f"unknown model_args {', '.join(sorted(others))}; allowed are {', '.join(ARGUMENTS)}"
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"{batch_size=} must be a whole number >= 1")
        self.batch_size = int(batch_size)
        self._model = load(pretrained, plan, dtype=dtype, max_positions=max_positions)
        if self._model.tokenizer is None:
            raise PromptError(f"{pretrained} has no tokenizer, which is needed for the texts of lm-eval")
        self._tokenizer = self._model.tokenizer
        self._name = str(pretrained)

    @property
    def max_length(self) -> int:
        """Longest context, in tokens."""
        return self._model.config.max_positions

    @property
    def eot_token_id(self) -> int:
        """First end-of-sequence id. Raises `PromptError` if the model has none."""
        if not self._model.config.eos_ids:
            raise PromptError(
                f"{self._name} has no end-of-sequence id, which is needed before a text without a context"
            )
        return self._model.config.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: the one that begins every text, or else `eot_token_id`."""
        special_tokens, bos_id = tokenized(self._tokenizer, ""), self._model.config.bos_id
        if special_tokens:
            return special_tokens[0]
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the folder without slashes, for use in file names."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template for lm-eval's record, or None if it is not requested."""
        return get_template_and_tokenizer(self._model)[0].source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat.

        Without `add_generation_prompt`, the text ends with the last message, so that the model continues it.

        Raises:
          ChatError: the model has no template, or the template rejects the messages.
        """
        template, _ = get_template_and_tokenizer(self._model)
        return template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text.

        By default, the special tokens of the tokenizer are added unless the text already begins with them.
        """
        if add_special_tokens is None:
            first = self._tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(first)
        return tokenized(self._tokenizer, string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability (nats) of each continuation, and whether greedy decoding produces it."""
        pairs = [self._truncate_context(context, continuation) for _, context, continuation in requests]
        scored = score_continuations(self._model, pairs, batch=self.batch_size)
        answers: dict[int, tuple[float, bool]] = {}
        for index, scores in tqdm(scored, "loglikelihood", len(pairs), disable=disable_tqdm):
            answers[index] = float(scores.log_probs.sum(dtype=float)), bool(scores.is_greedy.all())
            if (request := requests[index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", request, answers[index])
        return [answers[index] for index in range(len(pairs))]

    def _truncate_context(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cut the beginning of the context so that both fit into the positions of the model."""
        room = self.max_length + 1 - len(continuation)  # The last token needs no position.
        if room < 1:
            raise PromptError(
                f"a continuation of {len(continuation)} tokens exceeds the model's "
                f"{self.max_length} positions"
            )
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability (nats) of each text, cut into windows of at most `max_length` tokens."""
        totals, windows = [0.0] * len(requests), []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((index, *make_disjoint_window(window)))
        scored = self._loglikelihood_tokens([(None, *window[1:]) for window in windows], disable_tqdm)
        for (index, *_), (log_prob, _) in zip(windows, scored, strict=True):
            totals[index] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate text after each context up to its stop strings; greedy unless the request samples.

        Equal requests that sample have different seeds.

        Raises:
          ValueError: a generation option is not in `GENERATION_OPTIONS`.
          PromptError: an option has an invalid value, or `max_gen_toks` is not less than `max_length`.
        """
        texts: dict[int, str] = {}
        parsed = list(self._parse_requests(requests))
        stop_tokens = None if self._model.chat_template is None else chat_stop_tokens(self._model)
        with tqdm(desc="generate_until", total=len(parsed), disable=disable_tqdm) as progress:
            for batch in self._make_batches(parsed):
                padded = pad_batch(batch, min(self.batch_size, len(parsed)))
                result = generate(
                    self._model,
                    [request.context for request in padded],
                    batch[0].max_gen_toks,
                    sampling=[request.sampling for request in padded],
                    stop_tokens=stop_tokens,
                    stop=batch[0].until,
                )
                for request, completion in zip(batch, result.completions, strict=False):
                    text = texts[request.index] = completion.text or ""
                    self.cache_hook.add_partial("generate_until", requests[request.index].args, text)
                progress.update(len(batch))
        return [texts[index] for index in range(len(requests))]

    def _parse_requests(self, requests: Iterable[Instance]) -> Iterator[GenerationRequest]:
        seen: Counter[str] = Counter()
        for index, request in enumerate(requests):
            text, arguments = request.args
            options = normalize_gen_kwargs(arguments, DEFAULT_MAX_GEN_TOKS)
            if unknown := sorted(options.keys() - set(GENERATION_OPTIONS)):
                allowed = ", ".join(GENERATION_OPTIONS)
                raise ValueError(f"unknown generation options {', '.join(unknown)}; allowed are {allowed}")
            limit = options["max_gen_toks"]
            if limit >= self.max_length:
                raise PromptError(
                    f"max_gen_toks={limit} must be less than the model's {self.max_length} positions"
                )
            context, limit = maybe_truncate(self.tok_encode(text), limit, self.max_length)
            samples = options["do_sample"]
            sampling = Sampling(
                float(options.get("temperature", 1.0)) if samples else 0.0,
                options.get("top_k") if samples else None,
                options.get("top_p") if samples else None,
                (options.get("seed", 0) + seen[repr(request.args)]) % SEEDS,
            )
            seen[repr(request.args)] += 1
            yield GenerationRequest(
                index=index,
                context=context,
                until=tuple(string for string in options["until"] if string),
                max_gen_toks=limit,
                sampling=sampling,
            )

    def _make_batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """Yield batches with equal stop conditions and similar length.

        The longest requests come first, so that a lack of memory shows at once.
        """
        groups: dict[Any, list[GenerationRequest]] = defaultdict(list)
        for request in sorted(requests, key=lambda request: -len(request.context)):
            groups[request.until, request.max_gen_toks].append(request)
        for group in groups.values():
            yield from map(list, batched(group, self.batch_size))


if __name__ == "__main__":
    cli_evaluate()
