"""Grammars of tool calls: random walks through them are calls with arguments of the schemas."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import LLAMA
from tiny_tokenizers import ascii_tokenizer

from zdc_jax import Sampling
from zdc_jax.conversation.tools.formats import HERMES, LLAMA3, MISTRAL
from zdc_jax.errors import PromptError
from zdc_jax.generation.guide import Guide
from zdc_jax.server.tool_grammar import tool_call_grammar

MODEL = SimpleNamespace(tokenizer=ascii_tokenizer(), config=LLAMA)
STOP = 57
DIRECTION = {"enum": ["north", "south"]}
MOVE = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/direction"}, "steps": {"type": "integer", "maximum": 9}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"direction": DIRECTION},
}
LOOK = MOVE | {"properties": {"at": {"$ref": "#/$defs/direction"}}, "required": ["at"]}
LOOK |= {"$defs": {"direction": {"enum": ["sky"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait"}},
]


def walk(grammar, seed: int) -> str:
    """Generate a text from random choices; half of the time it stops where it may."""
    guide, rng, tokens = Guide.of(MODEL, Sampling(grammar=grammar), (STOP,)), np.random.default_rng(seed), []
    while not guide.is_complete:
        allowed = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))
        stops = STOP in allowed and rng.random() < 0.5
        tokens.append(STOP if stops else int(rng.choice(allowed)))
        guide.accept(tokens[-1:])
        if tokens[-1] == STOP:
            return MODEL.tokenizer.decode(tokens[:-1])
    return MODEL.tokenizer.decode(tokens)


def calls(text: str) -> list[dict]:
    """Return the calls of an answer, after checking the text around them."""
    first, *parts = text.split("<tool_call>\n")
    assert first == ""
    ends = ["\n</tool_call>\n"] * (len(parts) - 1) + ["\n</tool_call>"]
    assert all(part.endswith(end) for part, end in zip(parts, ends, strict=True))
    return [json.loads(part.partition("\n</tool_call>")[0]) for part in parts]


def fits(call: dict) -> bool:
    """Return whether a call has the arguments of its tool."""
    arguments = call["arguments"]
    if call["name"] == "move":
        return arguments["to"] in ("north", "south") and arguments.get("steps", 0) <= 9
    return arguments == ({"at": "sky"} if call["name"] == "look" else {})


def test_random_answers_are_calls_of_the_tools():
    grammar = tool_call_grammar(TOOLS, HERMES, MODEL.tokenizer)
    found = [calls(walk(grammar, seed)) for seed in range(30)]
    assert all(fits(call) for answer in found for call in answer)
    assert {call["name"] for answer in found for call in answer} == {"move", "look", "wait"}
    assert {len(answer) > 1 for answer in found} == {False, True}


def test_a_named_tool_and_another_format():
    call = {"name": "look", "arguments": {"at": "sky"}}
    grammar = tool_call_grammar(TOOLS[1:2], MISTRAL, MODEL.tokenizer, parallel=False)
    texts = [walk(grammar, seed).removeprefix("[TOOL_CALLS]") for seed in range(10)]
    assert all(json.loads(text) == [call] for text in texts)
    grammar = tool_call_grammar(TOOLS[1:2], LLAMA3, MODEL.tokenizer, parallel=False)
    assert json.loads(walk(grammar, 0)) == {"name": "look", "parameters": {"at": "sky"}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], r"tools=\[\] must have at least one tool"),
        ([{"type": "function"}], "tools.0.function=None must be an object with a name"),
        ([*TOOLS, {"function": {"name": 5}}], "tools.3.function=.* must be an object with a name"),
        ([{"function": {"name": "a", "parameters": 5}}], "tools.0.function.parameters=5 must be a JSON"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools, message):
    with pytest.raises(PromptError, match=message):
        tool_call_grammar(tools, HERMES, MODEL.tokenizer)
