"""Outputs of `zdc demo`: the table, the chart, `report.json`, and the commands to type next."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import matplotlib
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from convert.cli.demo_questions import ANSWER_TOKENS, Answers, Question
from zdc_jax.files import whole_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt


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


def print_example(
    console: Console, question: Question, results: Sequence[CacheResult], *, distance: int
) -> None:
    """Print a question and every cache's answer in words."""
    console.print(f"[bold]{distance:,} tokens after the answer:[/bold] {question.fact.question}")
    width = max(len(result.name) for result in results)
    for result in results:
        console.out(f" {result.name:{width}}  {result.answers.lines[0]}", highlight=False)


def print_table(console: Console, results: Sequence[CacheResult]) -> None:
    """Print one row for each cache."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for column in ("bytes/token", "share", "perplexity", "retrieval", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            f"{result.bytes_per_token:,.0f}",
            f"{result.share:.1%}",
            f"{result.perplexity:.2f} ({result.increase:+.1%})",
            result.answers.score,
            f"{result.answers.tokens_per_second:.0f}",
        )
    console.print(table)
    if jax.default_backend() == "cpu":
        console.print("fast decoding of a quantized cache needs an H100 or H200")


def draw_chart(results: Sequence[CacheResult], path: Path, title: str) -> None:
    """Draw the cache size and the right answers of every cache as bars (PNG)."""
    names = [result.name for result in results]
    sizes = [result.bytes_per_token for result in results]
    size_labels = [f"{result.bytes_per_token:,.0f} ({result.share:.0%})" for result in results]
    right = [sum(result.answers.right) for result in results]
    scores = [result.answers.score.replace("/", " of ") for result in results]
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
    for axes, values, labels, heading in (
        (panels[0], sizes, size_labels, "KV cache, bytes per token"),
        (panels[1], right, scores, "right answers about a fact far back"),
    ):
        bars = axes.barh(names, values, color=("0.65", "tab:blue", "tab:orange"), height=0.65)
        axes.bar_label(bars, labels, padding=4)
        axes.set_title(heading, loc="left", fontsize="medium")
        axes.set(xlim=(0, 1.3 * max(*values, 1)), xticks=())
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    panels[0].invert_yaxis()
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
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


def write_request(path: Path, question: Question, *, chat: bool) -> None:
    """Write a question as the body of an HTTP request: a message to a chat model, or a text to continue."""
    prompt = {"messages": [{"role": "user", "content": question.text}]} if chat else {"prompt": question.text}
    path.write_text(json.dumps({"model": "model", **prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}))


def print_commands(console: Console, output: Path, *, chat: bool) -> None:
    """Print the commands that use the plan: ask the question again, chat, serve, and send a request."""
    zdc, model = name_program(), [str(output / "model"), "--plan", str(output / "plan.json")]
    asking = [*(["--chat"] if chat else []), "--max-new-tokens", str(ANSWER_TOKENS), "-"]
    url = f"http://127.0.0.1:8000/v1/{'chat/' if chat else ''}completions"
    lines = [
        shlex.join([*zdc, "generate", *model, *asking]) + f" < {shlex.quote(str(output / 'prompt.txt'))}",
        *([shlex.join([*zdc, "chat", *model])] if chat else []),
        shlex.join([*zdc, "serve", *model]),
        shlex.join(["curl", url, "-d", f"@{output / 'request.json'}"]),
    ]
    console.print("next: ask the same question again, or start a server and send it as a request")
    for line in lines:
        console.out(f"  {line}", highlight=False)


def name_program() -> list[str]:
    """Return the words that run `zdc` again from this folder."""
    return [sys.argv[0]] if Path(sys.argv[0]).name == "zdc" else [sys.executable, "-m", "convert.cli.main"]
