"""Speed of answers in JSON of a real model, and how often the grammar refuses what the model chooses.

    python -m benchmarks.serving.grammars --model CONVERTED --plan none 3bit

Chat prompts ask for a long list in JSON. All requests start at once in an engine of this process. In the
way `none` no request has a grammar. In `free` the first `--masked` have one. In `masks` these get masks for
every token, since an engine that shares no pages lets no answer go back (`Job`). Random weights say nothing
here: a model that was not trained chooses what no grammar allows. `refused` counts tokens that the grammar
refused, of all `tokens` of requests with a grammar.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.common import RESULTS, commit, write_result
from zdc_jax.conversation.prompt import chat_prompt, chat_stop_tokens
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import EngineRequest, Event
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel, load
from zdc_jax.presets import resolve_plan

TOPICS = ("animals", "rivers", "tools", "dishes", "sports", "cities", "plants", "inventions")
"""Topics of the lists."""
PROMPT = """List thirty {topic} that begin with the letter {letter}, as a JSON array. Each is an object with \
the keys "name" (text), "known_since" (year), "is_common" (true or false) and "remark" (one sentence)."""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "known_since": {"type": "integer"},
        "is_common": {"type": "boolean"},
        "remark": {"type": "string"},
    },
    "required": ["name", "known_since", "is_common", "remark"],
    "additionalProperties": False,
}
"""Schema of an entry."""
GRAMMAR = Grammar.json({"type": "array", "items": ITEM, "minItems": 30})
"""Grammar of an answer, which no answer completes within `tokens`."""
Side = Literal["none", "free", "masks"]
"""Way to run."""
SIDES: dict[Side, tuple[int, bool]] = {"none": (0, True), "free": (1, True), "masks": (1, False)}
"""Share of `--masked` that has a grammar, and whether the engine shares pages, by way to run."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: converted folder of a model with a chat template.
      plan: plans, one after another: presets or files.
      sides: ways to run, one after another.
      requests: number of requests.
      masked: number of requests with a grammar.
      tokens: tokens of an answer.
      temperature: temperature of all requests; 0 is greedy.
      rounds: number of rounds that count, after one that warms up.
    """

    model: Path
    plan: tuple[str, ...] = ("none",)
    sides: tuple[Side, ...] = tuple(SIDES)
    requests: int = 32
    masked: int = 8
    tokens: int = 256
    temperature: float = 0.0
    rounds: int = 5
    dtype: str = "bfloat16"
    name: str = "serving-grammars"
    results: Path = RESULTS


class Answers:
    """Listener to all requests of a round.

    Attributes:
      tokens: tokens of each answer so far.
      error: message of a request that failed; None so far.
    """

    def __init__(self, count: int):
        self.tokens, self.error, self._left = [0] * count, None, count
        self._ended = threading.Event()

    def add(self, index: int, event: Event) -> None:
        """Count an event of one request."""
        self.tokens[index] += len(event.tokens)
        self.error = self.error or event.error
        self._left -= event.finish_reason is not None
        if not self._left:
            self._ended.set()

    def wait(self) -> None:
        """Wait for the last event of all requests; raise `SystemExit` if one failed."""
        self._ended.wait()
        if self.error:
            raise SystemExit(f"a request failed: {self.error}")


def draw_requests(model: LanguageModel, options: Options, *, masked: int, number: int) -> list[EngineRequest]:
    """Return the requests of round `number`, the first `masked` with a grammar."""
    found = []
    for index in range(options.requests):
        topic, letter = TOPICS[index % len(TOPICS)], chr(ord("A") + index // len(TOPICS) + number)
        text = PROMPT.format(topic=topic, letter=letter)
        sampling = Sampling(options.temperature, grammar=GRAMMAR if index < masked else None, seed=number)
        found.append(
            EngineRequest(
                prompt=tuple(chat_prompt(model, [{"role": "user", "content": text}])),
                max_tokens=options.tokens,
                sampling=sampling,
                stop_tokens=chat_stop_tokens(model) if sampling.grammar else (),
                ignore_eos=True,
                new_text=True,
                salt=str(number),
            )
        )
    return found


def measure(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[float, list[int]]:
    """Send requests at once; return output tokens per second, and the tokens of each answer."""
    answers = Answers(len(requests))
    began = time.perf_counter()
    for index, request in enumerate(requests):
        engine.submit(request, lambda event, index=index: answers.add(index, event))  # type: ignore[misc]
    answers.wait()
    return sum(answers.tokens) / (time.perf_counter() - began), answers.tokens


def run_side(model: LanguageModel, options: Options, side: Side) -> dict[str, Any]:
    """Return the row of one way to run."""
    share, reuse = SIDES[side]
    masked, speeds, tokens, refused = share * options.masked, [], 0, 0
    longest = max(len(each.prompt) for each in draw_requests(model, options, masked=0, number=0))
    config = EngineConfig(options.requests, longest + options.tokens + 8, reuse=reuse)
    with Engine(model, config) as engine:
        for number in range(1 + options.rounds):
            before = engine.stats().rewinds
            speed, counts = measure(engine, draw_requests(model, options, masked=masked, number=number))
            if number == 0:
                continue
            speeds.append(speed)
            tokens += sum(counts[:masked])
            refused += engine.stats().rewinds - before
            print(f"{side}: {speed:.0f} tokens per second, {refused} refused so far", flush=True)
    return {"side": side, "throughput": speeds, "tokens": tokens, "refused": refused}


def main(options: Options) -> None:
    """Measure each plan, and write the rows after each."""
    if not 0 < options.masked <= options.requests:
        raise SystemExit(f"--masked {options.masked}: must be 1 to {options.requests}, as many as --requests")
    settings = {key: str(value) for key, value in asdict(options).items() if key not in ("results", "name")}
    rows: list[dict[str, Any]] = []
    for plan in options.plan:
        model = load(options.model, resolve_plan(plan, options.model), dtype=options.dtype)
        own = {"plan": plan, "commit": commit()}
        rows += [own | run_side(model, options, side) for side in options.sides]
        write_result(options.name, settings, rows, options.results)


if __name__ == "__main__":
    main(tyro.cli(Options))
