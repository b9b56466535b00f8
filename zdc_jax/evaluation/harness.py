"""The model `zdc_jax` of EleutherAI's lm-evaluation-harness (lm-eval >= 0.4.13, the extra `eval`).

lm-eval knows the models of its own package alone. Run its command by this module, which adds ours:

    python -m zdc_jax.evaluation.harness run --model zdc_jax \\
        --model_args pretrained=model/,plan=plan.json --tasks …

or hand `HarnessModel("model/", "plan.json")` to `lm_eval.simple_evaluate`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from zdc_jax.conversation.prompt import chat_stop_tokens, get_template_and_tokenizer
from zdc_jax.errors import PromptError
from zdc_jax.evaluation.likelihood import score_continuations
from zdc_jax.generation.api import generate
from zdc_jax.generation.request import tokenized
from zdc_jax.generation.sampling import SEEDS, Sampling
from zdc_jax.loading import load

ARGUMENTS = ("pretrained", "plan", "dtype", "max_positions", "batch_size")
GENERATION_OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed")
DEFAULT_MAX_GEN_TOKS = 256
"""As lm-eval's own models have it."""


@dataclass(frozen=True)
class Wanted:
    """One request for text: token ids of its context, where it ends, how it is drawn."""

    index: int
    context: list[int]
    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling


@register_model("zdc_jax")
class HarnessModel(TemplateLM):
    """A converted folder under a plan, as lm-eval asks models. Everything goes through the compressed cache.

    Contexts that are too long lose their beginning, as in lm-eval's own models.
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
        """pretrained: converted folder; batch_size: rows at once; plan, dtype, max_positions: as for `load`.

        device: what lm-eval's command gives every model, for torch; JAX takes its own.

        Raises:
          ValueError: unknown arguments, or a batch_size that is no whole number >= 1 (such as `auto`).
          PromptError: the folder has no tokenizer.
          Whatever `load` raises.
        """
        super().__init__()
        if others:
            raise ValueError(
                f"unknown model_args {', '.join(sorted(others))}; known are {', '.join(ARGUMENTS)}"
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"{batch_size=} must be a whole number >= 1")
        self.batch_size = int(batch_size)
        self._model = load(pretrained, plan, dtype=dtype, max_positions=max_positions)
        if self._model.tokenizer is None:
            raise PromptError(f"{pretrained} has no tokenizer, and lm-eval gives texts")
        self._tokenizer = self._model.tokenizer
        self._name = str(pretrained)

    @property
    def max_length(self) -> int:
        """Tokens of the longest context."""
        return self._model.config.max_positions

    @property
    def eot_token_id(self) -> int:
        """The first end-of-sequence id; raises `PromptError` where the model has none."""
        if not self._model.config.eos_ids:
            raise PromptError(
                f"{self._name} names no end-of-sequence id, which stands before a text without one"
            )
        return self._model.config.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the token that texts begin with, else `eot_token_id`."""
        added, bos_id = tokenized(self._tokenizer, ""), self._model.config.bos_id
        return added[0] if added else self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """The folder's name, as part of a file name."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Source of the model's template, for the record; None where it is not asked for."""
        return get_template_and_tokenizer(self._model)[0].source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a chat; without `add_generation_prompt` it ends within the last message, which goes on.

        Raises:
          ChatError: no template, or it refuses the messages.
        """
        template, _ = get_template_and_tokenizer(self._model)
        text = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        behind = last.lstrip()  # Some templates strip messages.
        whole = text.rfind(behind)
        return (
            text[: whole + len(behind)]
            if whole >= 0
            else text[: text.rindex(last.strip()) + len(last.strip())]
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; by default with the tokenizer's special tokens, unless the text begins with them."""
        if add_special_tokens is None:
            first = self._tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(first)
        return tokenized(self._tokenizer, string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities (nats) of each continuation, and whether greedy decoding gives it."""
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        found = score_continuations(self._model, pairs, batch=self.batch_size)
        answers: dict[int, tuple[float, bool]] = {}
        for index, scores in tqdm(found, "loglikelihood", len(pairs), disable=disable_tqdm):
            answers[index] = float(scores.log_probs.sum(dtype=float)), bool(scores.is_greedy.all())
            if (asked := requests[index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", asked, answers[index])
        return [answers[index] for index in range(len(pairs))]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """With the end of the context that leaves room for the continuation, whose last token needs none."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise PromptError(
                f"a continuation of {len(continuation)} tokens exceeds {self.max_length} positions"
            )
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability (nats) of each text, cut into pieces as long as the model's positions allow."""
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
        """Text behind each context up to its stop strings; greedy unless a temperature is asked for.

        Equal requests that are drawn differ from each other.

        Raises:
          ValueError: a generation option that is not among `GENERATION_OPTIONS`.
          PromptError: an option with an impossible value, or as many new tokens as the model has positions.
        """
        texts: dict[int, str] = {}
        wanted = list(self._wanted(requests))
        stop_tokens = None if self._model.chat_template is None else chat_stop_tokens(self._model)
        with tqdm(desc="generate_until", total=len(wanted), disable=disable_tqdm) as progress:
            for together in self._batches(wanted):
                filled = together + together[-1:] * (min(self.batch_size, len(wanted)) - len(together))
                done = generate(
                    self._model,
                    [one.context for one in filled],
                    together[0].max_gen_toks,
                    sampling=[one.sampling for one in filled],
                    stop_tokens=stop_tokens,
                    stop=together[0].until,
                )
                for one, completion in zip(together, done.completions, strict=False):
                    texts[one.index] = completion.text or ""
                    self.cache_hook.add_partial("generate_until", requests[one.index].args, texts[one.index])
                progress.update(len(together))
        return [texts[index] for index in range(len(requests))]

    def _wanted(self, requests: list[Instance]) -> Iterator[Wanted]:
        seen: Counter[str] = Counter()
        for index, request in enumerate(requests):
            text, asked = request.args
            options = normalize_gen_kwargs(asked, DEFAULT_MAX_GEN_TOKS)
            if unknown := sorted(options.keys() - set(GENERATION_OPTIONS)):
                known = ", ".join(GENERATION_OPTIONS)
                raise ValueError(f"generation options {', '.join(unknown)} are unknown; known are {known}")
            limit = options["max_gen_toks"]
            if limit >= self.max_length:
                raise PromptError(
                    f"max_gen_toks={limit} leave no room in the model's {self.max_length} positions"
                )
            context, limit = maybe_truncate(self.tok_encode(text), limit, self.max_length)
            until = tuple(string for string in options["until"] if string)
            drawn = options["do_sample"]
            sampling = Sampling(
                float(options.get("temperature", 1.0)) if drawn else 0.0,
                options.get("top_k") if drawn else None,
                options.get("top_p") if drawn else None,
                (options.get("seed", 0) + seen[repr(request.args)]) % SEEDS,
            )
            seen[repr(request.args)] += 1
            yield Wanted(index, context, until, limit, sampling)

    def _batches(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """Requests that end alike, of like length; the longest first, for what does not fit shows at once."""
        alike: dict[Any, list[Wanted]] = defaultdict(list)
        for one in sorted(wanted, key=lambda one: -len(one.context)):
            alike[one.until, one.max_gen_toks].append(one)
        for group in alike.values():
            yield from map(list, batched(group, self.batch_size))


if __name__ == "__main__":
    cli_evaluate()
