"""How often is an answer in 16 bits another than `generate` gives? Rounding may decide between two tokens.

    python -m benchmarks.serving.first_differences --model model/ --texts texts/

Prompts are pieces of texts. Greedy answers come from an engine, all requests at once, and from `generate`,
one after another. Up to the first token that differs both had the same text before them; `a_token` is how
often such a token differs. `gap` is how much likelier, in natural logarithms, the engine held its own token
there than `generate`'s, of all such places the median and the largest. `generate_together` says the same of
`generate` itself, for all prompts in one batch.
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
    """texts: a folder of `.txt`. requests, tokens: how many, and of each answer; prompts of `shortest` to
    `longest` tokens."""

    model: Path
    texts: Path
    plan: Path | None = None
    dtype: str = "bfloat16"
    requests: int = 32
    tokens: int = 48
    shortest: int = 32
    longest: int = 400
    rows: int = 8
    seed: int = 0
    name: str = "serving-first-differences"
    results: Path = RESULTS


class Answer:
    """Tokens of one request, with what the engine thought of them."""

    def __init__(self) -> None:
        self.tokens: list[TokenLogprobs] = []
        self.ended = threading.Event()

    def take(self, event: Event) -> None:
        """On the engine's thread."""
        self.tokens += event.logprobs
        if event.finish_reason:
            self.ended.set()

    def gap(self, place: int, other: int) -> float:
        """How much likelier the token in a place was than another; than the last of the best, at most."""
        one, likeliest = self.tokens[place], dict(self.tokens[place].top)
        return one.logprob - likeliest.get(other, min(likeliest.values()))


def prompts_of(model: LanguageModel, options: Options) -> list[tuple[int, ...]]:
    """Pieces of random lengths of the texts, from random places.

    Raises:
      SystemExit: there is no text, or none long enough.
    """
    assert model.tokenizer is not None
    texts = [path.read_text() for path in sorted(options.texts.glob("**/*.txt"))]
    ids = [model.tokenizer.encode(text[:200_000]).ids for text in texts]
    ids = [each for each in ids if len(each) > options.longest]
    if not ids:
        raise SystemExit(f"texts={options.texts} has no .txt of more than {options.longest} tokens")
    rng, found = np.random.default_rng(options.seed), []
    for _ in range(options.requests):
        text, length = ids[rng.integers(len(ids))], int(rng.integers(options.shortest, options.longest))
        begin = int(rng.integers(len(text) - length))
        found.append(tuple(text[begin : begin + length]))
    return found


def of_engine(model: LanguageModel, prompts: list[tuple[int, ...]], options: Options) -> list[Answer]:
    """All at once."""
    config = EngineConfig(options.rows, options.longest + options.tokens, chunk=256, reuse=False)
    answers = [Answer() for _ in prompts]
    with Engine(model, config) as engine:
        for prompt, answer in zip(prompts, answers, strict=True):
            ask = partial(EngineRequest, ignore_eos=True, logprobs=MAX_LOGPROBS)
            engine.submit(ask(prompt, options.tokens), answer.take)
        for answer in answers:
            answer.ended.wait()
    return answers


def first_differences(
    ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> tuple[list[int | None], dict[str, Any]]:
    """Where each answer is first another than the other, None where it is not; and how often that is."""
    found = []
    for one, other in zip(ones, others, strict=True):
        pairs = enumerate(zip(one, other, strict=True))
        found.append(next((place for place, (a, b) in pairs if a != b), None))
    differ = sum(place is not None for place in found)
    alike = sum(len(one) if place is None else place for one, place in zip(ones, found, strict=True))
    return found, {"differ": differ, "a_token": differ / (alike + differ)}


def measured(model: LanguageModel, options: Options) -> dict[str, Any]:
    """What is told of all answers."""
    prompts = prompts_of(model, options)
    answers = of_engine(model, prompts, options)
    given = [list(prompt) for prompt in prompts]

    def ask(prompts):
        return generate(model, prompts, options.tokens, stop_tokens=()).completions

    alone = [ask([prompt])[0].tokens for prompt in given]
    places, found = first_differences([[each.token for each in one.tokens] for one in answers], alone)
    pairs = zip(answers, places, alone, strict=True)
    gaps = [answer.gap(place, tokens[place]) for answer, place, tokens in pairs if place is not None]
    _, together = first_differences([each.tokens for each in ask(given)], alone)
    return found | {
        "answers": len(prompts),
        "gap": {"median": float(np.median(gaps)), "largest": max(gaps)} if gaps else None,
        "generate_together": together,
        "commit": commit(),
    }


def main(options: Options) -> None:
    """Writes one JSON."""
    model = load(options.model, options.plan, dtype=options.dtype)
    found = measured(model, options)
    print(found)
    settings = {"model": options.model.name, "plan": options.plan and options.plan.stem}
    settings |= {"dtype": options.dtype, "tokens": options.tokens, "rows": options.rows}
    print(write_result(options.name, settings, found, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))
