"""Requests of tests of the server, and readers of its answers."""

import json
from typing import Any

from fake_engine import ANSWER
from tiny_tokenizers import chat_tokenizer

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
LENGTH = len(chat_tokenizer().encode(ANSWER).ids)


def events(response: Any) -> list[Any]:
    """Return the data of server-sent events, and check that the last marks the end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]
