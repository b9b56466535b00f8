"""Outputs of `zdc demo`: the table, the chart, `report.json`, and the commands to type next."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from convert.cli.demo_questions import ANSWER_TOKENS, Answers, Question
from zdc_jax.files import whole_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EXCERPT = 70
"""Characters of text that are shown around a fact."""


@dataclass(frozen=True)
class CacheResult:
    """Measurements of one cache.

    bytes_per_token and share: of a cache that stores numbers in 16 bits where it does not quantize them.
    increase and interval: relative change of perplexity, and its 95 % interval.
    """

    name: str
    bytes_per_token: float
    share: float
    perplexity: float
    increase: float
    interval: tuple[float, float] | None
    answers: Answers

    @property
    def retrieval(self) -> str:
        """Number of right answers, such as `12/12`."""
        return f"{sum(self.answers.right)}/{len(self.answers.right)}"


def print_example(console: Console, questions: Sequence[Question], results: Sequence[CacheResult]) -> None:
    """Print the first question and every cache's answer in words."""
    question = questions[0]
    place = question.text.index(question.fact.statement)
    before, _, after = question.text.partition(question.fact.statement)
    lines = [before[-EXCERPT:], question.fact.statement, f"{after[:EXCERPT]}…"]
    console.print("[bold]text[/bold]", f"{len(question.text):,} characters, the fact at {place:,}")
    console.print(" ".join(" ".join(lines).split()), markup=False, highlight=False, style="dim")
    console.print("[bold]question[/bold]", question.fact.question, highlight=False)
    for result in results:
        console.print(f"[bold]{result.name}[/bold]", end=" ", highlight=False)
        console.print(result.answers.lines[0], markup=False, highlight=False)


def print_table(console: Console, results: Sequence[CacheResult], title: str) -> None:
    """Print one row for each cache."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    table.add_column("cache", no_wrap=True)
    for column in ("bytes/token", "share", "perplexity", "retrieval", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            f"{result.bytes_per_token:,.0f}",
            f"{result.share:.1%}",
            f"{result.perplexity:.2f} ({result.increase:+.1%})",
            result.retrieval,
            f"{result.answers.tokens_per_second:.0f}",
        )
    console.print(table)


def draw_chart(results: Sequence[CacheResult], path: Path, title: str) -> None:
    """Draw bytes and retrieval of every cache as bars (PNG)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    names = [result.name for result in results]
    colors = ["0.6", "tab:green", "tab:orange"]
    bars = left.bar(names, [result.bytes_per_token for result in results], color=colors)
    left.bar_label(bars, [f"{result.bytes_per_token:,.0f}" for result in results])
    left.set(ylabel="bytes of KV cache per token")
    bars = right.bar(names, [sum(result.answers.right) for result in results], color=colors)
    right.bar_label(bars, [result.retrieval for result in results])
    right.set(ylabel="questions answered", ylim=(0, 1.15 * len(results[0].answers.right)))
    figure.suptitle(title)
    with whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)


def write_report(
    path: Path, head: dict[str, Any], questions: Sequence[Question], results: Sequence[CacheResult]
) -> None:
    """Write all measurements, questions and answers as JSON."""
    asked = [{"fact": question.fact.statement, "question": question.fact.question} for question in questions]
    value = {**head, "caches": [asdict(result) for result in results], "questions": asked}
    with whole_file(path) as file:
        file.write_text(json.dumps(value, indent=2) + "\n")


def print_commands(console: Console, output: Path, question: Question, *, chat: bool, context: int) -> None:
    """Print the commands that use the plan: ask the question again, serve the model, and send a request."""
    model = [str(output / "model"), "--plan", str(output / "plan.json")]
    asking = ["generate", *model, *(["--chat"] if chat else []), "--max-new-tokens", str(ANSWER_TOKENS), "-"]
    serving = ["serve", *model, "--max-model-len", str(context)]
    lines = [
        (
            "ask again",
            f"{shlex.join([*name_program(), *asking])} < {shlex.quote(str(output / 'prompt.txt'))}",
        ),
        ("serve it", shlex.join([*name_program(), *serving])),
        ("send a request", shlex.join(["curl", *make_request(question, chat=chat)])),
    ]
    if chat:
        lines.insert(1, ("chat", shlex.join([*name_program(), "chat", *model])))
    for title, line in lines:
        console.out(f"{title}: {line}", highlight=False)


def name_program() -> list[str]:
    """Return the words that run `zdc` again from this folder."""
    return [sys.argv[0]] if Path(sys.argv[0]).name == "zdc" else [sys.executable, "-m", "convert.cli.main"]


def make_request(question: Question, *, chat: bool) -> list[str]:
    """Return curl's arguments for a short request: a message to a chat model, or a text to continue."""
    prompt = question.fact.statement + question.ending
    kind, asked = "completions", dict[str, Any](prompt=prompt)
    if chat:
        kind, asked = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": "model", **asked, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    url = f"http://127.0.0.1:8000/v1/{kind}"
    return [url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
