"""A fake engine for a model that calls tools, with a token per byte, and OpenAI's client for its server."""

import json
from dataclasses import replace
from types import SimpleNamespace

import openai
from conftest import LLAMA
from fake_engine import FakeEngine, chat_model
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.server.app import make_app

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
CALLS = [("add", '{"a": [1, 2]}'), ("now", "{}")]
HERMES_REPLY = "\n".join(
    [
        "Let me add.",
        *(f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>' for name, text in CALLS),
    ]
)
MISTRAL_REPLY = "Let me add.[TOOL_CALLS]" + json.dumps(
    [{"name": name, "arguments": json.loads(text)} for name, text in CALLS]
)


def json_tokenizer() -> Tokenizer:
    """Return a tokenizer with one byte per token and a special token of Mistral."""
    special = ["<|im_start|>", "<|im_end|>", "</s>", "[TOOL_CALLS]"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def tool_model(template: str, tool_template: str | None = None) -> SimpleNamespace:
    special = {"bos_token": "", "eos_token": "<|im_end|>"}
    return chat_model(
        tokenizer=json_tokenizer(),
        chat_template=ChatTemplate(template, special, tool_template),
        config=replace(LLAMA, vocab_size=260),
    )


def tool_engine(reply: str, *templates: str) -> FakeEngine:
    return FakeEngine(tool_model(*templates), answer=reply, max_model_len=2000)


def sdk(engine: FakeEngine) -> openai.OpenAI:
    """Return OpenAI's client for a server on this engine, without a network."""
    http = TestClient(make_app(engine, name="tiny"), base_url="http://testserver/v1")
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)
