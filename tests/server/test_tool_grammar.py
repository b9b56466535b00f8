"""Grammars of tool calls: random walks through them are calls with arguments of the schemas."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from conftest import LLAMA
from tiny_tokenizers import ascii_tokenizer

from zdc_jax import Sampling
from zdc_jax.conversation.tools.formats import HERMES, LLAMA3, MISTRAL
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.guide import Guide
from zdc_jax.server.tool_grammar import tool_call_grammar
from zdc_jax.server.tools import NO_PARAMETERS

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
    {"type": "function", "function": {"name": "wait", "parameters": NO_PARAMETERS}},
]


def walk(grammar, seed: int, model=MODEL) -> str:
    """Generate a text from random choices; half of the time it stops where it may."""
    guide, rng, tokens = Guide.of(model, Sampling(grammar=grammar), (STOP,)), np.random.default_rng(seed), []
    while not guide.is_complete:
        allowed = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))
        stops = STOP in allowed and rng.random() < 0.5
        tokens.append(STOP if stops else int(rng.choice(allowed)))
        guide.accept(tokens[-1:])
        if tokens[-1] == STOP:
            return model.tokenizer.decode(tokens[:-1])
    return model.tokenizer.decode(tokens)


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


def test_an_answer_may_be_json_or_calls():
    answer = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    grammar = tool_call_grammar(TOOLS, HERMES, MODEL.tokenizer, answer=answer)
    found = [walk(grammar, seed) for seed in range(30)]
    marked = [text for text in found if text.startswith("<tool_call>")]
    assert all(fits(call) for text in marked for call in calls(text))
    others = [json.loads(text) for text in found if text not in marked]
    assert {answer["a"] for answer in others} == {1, 2}
    assert marked


def test_marks_may_be_tokens_of_text():
    tokenizer = ascii_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    model = SimpleNamespace(tokenizer=tokenizer, config=replace(LLAMA, vocab_size=tokenizer.get_vocab_size()))
    (call,) = calls(walk(tool_call_grammar(TOOLS[1:2], HERMES, tokenizer, parallel=False), 0, model))
    assert fits(call)
    texts = {walk(Grammar.choice(["<tool_call>", "no"]), seed, model) for seed in range(8)}
    assert texts == {"<tool_call>", "no"}
