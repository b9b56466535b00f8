"""Random damage to request bodies: each gets an answer, or an error that names a field."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from chat_templates import HERMES
from starlette.testclient import TestClient
from tool_engine import ADD, HERMES_REPLY, tool_engine

from zdc_jax.server.app import make_app
from zdc_jax.server.fields import IGNORED, REFUSED

CASES = 150
TEXT = [{"type": "text", "text": "a"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES = {
    "/v1/completions": {
        "model": "tiny",
        "prompt": ["a", [5, 6]],
        "max_tokens": 3,
        "echo": True,
        "logprobs": 1,
        "stop": "x",
        "min_tokens": 1,
        "stop_token_ids": [5],
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "abcdefghi", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "abcdefghi", "output": "3"},
        ],
        "tools": [{"type": "function", **ADD["function"]}],
        "max_output_tokens": 3,
        "instructions": "b",
        "reasoning": {"summary": "auto"},
    },
}
VALUES = [None, True, 0, 1, -1, 2**70, 1e39, 0.5, float("nan"), "", "a", "{{", "<|im_end|>", "none"]
VALUES += [[], {}, [[]], [None], {"a": 1}, [1, "a"], TEXT, {"type": "function", "function": {"name": "add"}}]
NAMES = [*REFUSED, *IGNORED, "something", "content", "role", "type"]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or object inside a value, with each of its indexes or names."""
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places(value[key])


def mutate(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy with one to three values replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        parent, key = rng.choice(list(places(body)))
        value, kind = copy.deepcopy(rng.choice(VALUES)), rng.random()
        if kind < 0.5:
            parent[key] = value
        elif kind < 0.7 and len(body) > 1:
            del parent[key]
        elif isinstance(parent, dict):
            parent[rng.choice(NAMES)] = value
        else:
            parent.append(value)
    return body


@pytest.mark.parametrize("path", BODIES)
def test_every_body_gets_an_answer_or_a_named_error(path):
    client = TestClient(
        make_app(tool_engine(HERMES_REPLY[:30], HERMES), name="tiny"), raise_server_exceptions=False
    )
    rng, statuses = random.Random(0), set()
    assert client.post(path, json=BODIES[path]).status_code == 200
    for _ in range(CASES):
        body = json.dumps(mutate(BODIES[path], rng))
        response = client.post(path, content=body)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), body
        if response.status_code != 200:
            described = response.json()["error"]
            assert described["param"], body
            assert described["param"].partition("[")[0] in described["message"] or described["code"], body
    assert statuses >= {200, 400}
