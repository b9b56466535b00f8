"""Study of how often an answer in 16 bits differs from that of `generate`, because rounding decides a tie.

    python -m benchmarks.serving.first_differences --model model/ --texts texts/

Prompts are excerpts of texts. Greedy answers come from an engine, all requests at once, and from `generate`,
one by one. Up to the first difference both have the same text; `a_token` is the rate of a difference per
token. `gap` is how much likelier, in natural logarithms, the engine found its own token there: the median and
the largest. `generate_together` is the same comparison for `generate` with all prompts in one batch, and
`after_hits` for a second round of the engine, whose prompts begin in its prefix cache.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from zdc_jax import generate, load
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest, Event, TokenLogprobs
from zdc_jax.loading import LanguageModel


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
      texts: a folder of `.txt` files.
      requests: number of prompts.
      tokens: tokens of each answer.
      shortest: least tokens of a prompt.
      longest: most tokens of a prompt.
      reproducible: compute every token with the same arithmetic (`zdc_jax.load`).
    """

    model: Path
    texts: Path
    plan: Path | None = None
    dtype: str = "bfloat16"
    requests: int = 32
    tokens: int = 48
    shortest: int = 32
    longest: int = 400
    rows: int = 8
    reproducible: bool = False
    seed: int = 0
    name: str = "serving-first-differences"
    results: Path = RESULTS


class Answer:
    """Tokens of one request, with the engine's log-probabilities."""

    def __init__(self) -> None:
        self.tokens: list[TokenLogprobs] = []
        self.ended = threading.Event()

    def take(self, event: Event) -> None:
        """Append an event; runs on the engine's thread."""
        self.tokens += event.logprobs
        if event.finish_reason:
            self.ended.set()

    def gap(self, place: int, other: int) -> float:
        """Return how much likelier the token at a place was than another one, within the listed tokens."""
        one, likeliest = self.tokens[place], dict(self.tokens[place].top)
        return one.logprob - likeliest.get(other, min(likeliest.values()))


def prompts_of(model: LanguageModel, options: Options) -> list[tuple[int, ...]]:
    """Return excerpts of random lengths from random places of the texts.

    Raises:
      SystemExit: there is no text, or none long enough.
    """
    assert model.tokenizer is not None
    texts = [path.read_text() for path in sorted(options.texts.glob("**/*.txt"))]
    ids = [model.tokenizer.encode(text[:200_000]).ids for text in texts]
    ids = [each for each in ids if len(each) > options.longest]
    if not ids:
        raise SystemExit(f"texts={options.texts} has no .txt of more than {options.longest} tokens")
    rng, prompts = np.random.default_rng(options.seed), []
    for _ in range(options.requests):
        text, length = ids[rng.integers(len(ids))], int(rng.integers(options.shortest, options.longest))
        begin = int(rng.integers(len(text) - length))
        prompts.append(tuple(text[begin : begin + length]))
    return prompts


def ask_engine(
    model: LanguageModel, prompts: list[tuple[int, ...]], options: Options
) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of an engine to all prompts at once, twice."""
    config = EngineConfig(options.rows, options.longest + options.tokens, chunk=256)
    rounds = [Answer() for _ in prompts], [Answer() for _ in prompts]
    with Engine(model, config) as engine:
        for answers in rounds:
            for prompt, answer in zip(prompts, answers, strict=True):
                ask = partial(EngineRequest, ignore_eos=True, logprobs=MAX_LOGPROBS)
                engine.submit(ask(prompt, options.tokens), answer.take)
            for answer in answers:
                answer.ended.wait()
    return rounds


def first_differences(
    ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> tuple[list[int | None], dict[str, Any]]:
    """Return where each pair of answers differs first (None if nowhere), and the rate of differences."""
    places = []
    for one, other in zip(ones, others, strict=True):
        pairs = enumerate(zip(one, other, strict=True))
        places.append(next((place for place, (a, b) in pairs if a != b), None))
    differ = sum(place is not None for place in places)
    alike = sum(len(one) if place is None else place for one, place in zip(ones, places, strict=True))
    return places, {"differ": differ, "a_token": differ / (alike + differ)}


def measured(model: LanguageModel, options: Options) -> dict[str, Any]:
    """Return the comparison of all answers."""
    prompts = prompts_of(model, options)
    answers, again = ask_engine(model, prompts, options)
    lists = [list(prompt) for prompt in prompts]

    def ask(prompts):
        return generate(model, prompts, options.tokens, stop_tokens=()).completions

    alone = [ask([prompt])[0].tokens for prompt in lists]
    places, rates = first_differences([[each.token for each in one.tokens] for one in answers], alone)
    pairs = zip(answers, places, alone, strict=True)
    gaps = [answer.gap(place, tokens[place]) for answer, place, tokens in pairs if place is not None]
    _, together = first_differences([each.tokens for each in ask(lists)], alone)
    _, after_hits = first_differences([[each.token for each in one.tokens] for one in again], alone)
    return rates | {
        "answers": len(prompts),
        "gap": {"median": float(np.median(gaps)), "largest": max(gaps)} if gaps else None,
        "generate_together": together,
        "after_hits": after_hits,
        "commit": commit(),
    }


def main(options: Options) -> None:
    """Write one JSON file."""
    model = load(options.model, options.plan, dtype=options.dtype, reproducible=options.reproducible)
    results = measured(model, options)
    print(results)
    settings = {"model": options.model.name, "plan": options.plan and options.plan.stem}
    settings |= {"dtype": options.dtype, "tokens": options.tokens, "rows": options.rows}
    settings |= {"reproducible": options.reproducible}
    print(write_result(options.name, settings, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
