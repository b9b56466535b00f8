"""Answers of servers on real weights: greedy continuations of text, and tool calls after a long text.

    python -m benchmarks.serving.compare_answers --model CONVERTED --hf FOLDER --texts heldout/

`FOLDER` has the same weights in Hugging Face's form, for vLLM. Prompts of the continuations are token ids, so
that all servers read the same. Rows of continuations compare each system with the first one that answered
(`reference`): the number of equal answers, and the share of tokens before the first difference in each.
Answers are compared as text, divided by the tokenizer of the converted folder.

A tool call has a long text, a fact at a random place in it, and a function that the model must call with that
fact. The function is named in the request, so that every answer is JSON of its schema. It is right if all
arguments are. Only our servers are asked.
"""

import json
import signal
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import tyro

from benchmarks.common import RESULTS, ask_environment, commit, write_result
from benchmarks.serving.client import HOST, MODEL
from benchmarks.serving.systems import (
    NAMES,
    Limits,
    Name,
    ServerFailed,
    System,
    make_ours,
    make_vllm,
    run_server,
)
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.evaluation.text import read_documents, token_windows

ROOM = 1024
"""Tokens of a context limit beyond the text: the answer, the chat template, the tool and the fact."""
CITIES = ("Lima", "Oslo", "Quito", "Cairo", "Hanoi", "Turin", "Accra", "Perth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
TOOL = {
    "type": "function",
    "function": {
        "name": "book_room",
        "description": "Book a meeting room.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "day": {"type": "string"},
                "seats": {"type": "integer"},
            },
            "required": ["city", "day", "seats"],
            "additionalProperties": False,
        },
    },
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      model: converted folder.
      texts: files and folders of text.
      hf: Hugging Face folder of the same weights, for vLLM.
      systems: systems to ask, in this order.
      plan: plan of `ours-plan`, a preset or a file.
      continuations: number of continuations.
      prompt: tokens of each of their prompts.
      answer: tokens of each continuation.
      calls: number of tool calls.
      context: tokens of the text of a tool call.
      memory: share of the GPU's memory that a system may use.
    """

    model: Path
    texts: tuple[Path, ...]
    hf: Path | None = None
    systems: tuple[Name, ...] = NAMES
    plan: str = "3bit"
    continuations: int = 20
    prompt: int = 4096
    answer: int = 128
    calls: int = 20
    context: int = 16000
    memory: float = 0.9
    dtype: str = "bfloat16"
    vllm: str = "vllm"
    seed: int = 11
    start_seconds: float = 600.0
    name: str = "compare-answers"
    results: Path = RESULTS


@dataclass(frozen=True)
class Call:
    """A tool call to ask for: the text with the fact in it, and the right arguments."""

    text: str
    arguments: dict[str, Any]


def make_calls(windows: np.ndarray, tokenizer: Any, seed: int) -> list[Call]:
    """Return a call for each window of tokens [W, length], with its fact between two lines of the text."""
    rng, calls = np.random.default_rng(seed), []
    for window in windows:
        lines = tokenizer.decode(window.tolist()).split("\n")
        arguments = {
            "city": CITIES[rng.integers(len(CITIES))],
            "day": DAYS[rng.integers(len(DAYS))],
            "seats": int(rng.integers(11, 99)),
        }
        fact = "NOTE: the next workshop is in {city} on {day}, for {seats} people.".format(**arguments)
        lines.insert(int(rng.integers(len(lines) + 1)), fact)
        calls.append(Call("\n".join(lines), arguments))
    return calls


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Send a JSON request and return the JSON answer.

    Raises:
      ServerFailed: the server refused the request.
    """
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except HTTPError as refusal:
        raise ServerFailed(f"{path}: {refusal.read().decode(errors='replace')}", []) from refusal


def continue_greedily(port: int, prompt: list[int], tokens: int) -> str:
    """Return the text that a server adds to a prompt."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return post(port, "/v1/completions", body)["choices"][0]["text"]


def ask_call(port: int, call: Call) -> dict[str, Any] | None:
    """Return the arguments of the call that a server answers with, or None if they are no JSON."""
    question = "\n\nThe text above has a note about the next workshop. Book a room for it."
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 96,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "book_room"}},
        "messages": [{"role": "user", "content": call.text + question}],
    }
    (answer,) = post(port, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    try:
        return json.loads(answer["function"]["arguments"])
    except ValueError:
        return None


def compare_texts(found: list[str], wanted: list[str], tokenizer: Any) -> Row:
    """Return how many texts are equal, and for each the share of tokens before the first difference."""
    shares = []
    for pair in zip(found, wanted, strict=True):
        ours, theirs = (tokenizer.encode(text, add_special_tokens=False).ids for text in pair)
        longest = max(len(ours), len(theirs), 1)
        padded = np.full((2, longest), -1)
        padded[0, : len(ours)], padded[1, : len(theirs)] = ours, theirs
        different = np.flatnonzero(padded[0] != padded[1])
        shares.append(float(different[0] / longest) if different.size else 1.0)
    return {"equal": sum(share == 1 for share in shares), "of": len(shares), "shares": shares}


def make_system(name: Name, options: Options, limits: Limits) -> System:
    """Return one of the systems.

    Raises:
      SystemExit: vLLM has no folder.
    """
    if name.startswith("ours"):
        return make_ours(name, options.model, "none" if name == "ours-16" else options.plan, limits)
    if options.hf is None:
        raise SystemExit(f"--systems {name}: needs weights in Hugging Face's form; pass --hf FOLDER")
    return make_vllm(name, options.hf, "auto" if name == "vllm-16" else "fp8", limits, options.vllm)


def main(options: Options) -> None:
    """Ask all systems, and write the rows after each."""
    checkpoint = Checkpoint.open(options.model)
    tokenizer, documents = checkpoint.tokenizer(), list(read_documents(options.texts))
    if tokenizer is None:
        raise SystemExit(f"--model {options.model}: has no tokenizer; convert the model with its tokenizer")
    longest = max(options.prompt, options.context) + options.answer + ROOM
    limits = Limits(longest, 8, options.memory, options.calls + options.continuations, options.dtype)
    systems = [make_system(name, options, limits) for name in options.systems]

    def cut(length: int, count: int) -> np.ndarray:
        return token_windows(documents, tokenizer, length=length, num_windows=count, seed=options.seed)[0]

    prompts = cut(options.prompt, options.continuations)
    calls = make_calls(cut(options.context, options.calls), tokenizer, options.seed) if options.calls else []
    settings = {key: str(value) for key, value in asdict(options).items() if key not in ("results", "name")}
    settings["model"] = options.model.resolve().name
    rows, reference, where = [], None, ask_environment()
    for system in systems:
        row: Row = {"system": system.name, "command": system.command, "commit": commit()}
        try:
            with run_server(system, options.start_seconds) as server:
                texts = [continue_greedily(server.port, each.tolist(), options.answer) for each in prompts]
                reference = reference or (system.name, texts)
                row["reference"] = reference[0]
                row["continuations"] = compare_texts(texts, reference[1], tokenizer)
                if calls and system.name.startswith("ours"):
                    right = [ask_call(server.port, call) == call.arguments for call in calls]
                    row["calls"] = {"right": sum(right), "of": len(right), "each": right}
        except ServerFailed as failure:
            row |= {"failed": f"{failure}", "log": failure.log}
        rows.append(row)
        print({key: value for key, value in row.items() if key != "command"}, flush=True)
        write_result(options.name, settings, rows, options.results, measured_in=where)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # This process must still end its server.
    main(tyro.cli(Options))
