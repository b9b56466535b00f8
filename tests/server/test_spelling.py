"""Tokens as clients see them: the space of a first word, parts of characters, and places in the text."""

import json
from dataclasses import replace
from itertools import chain

import pytest
from chat_templates import CHATML
from conftest import LLAMA
from fake_engine import FakeEngine, chat_model
from starlette.testclient import TestClient
from tiny_tokenizers import sentencepiece
from tokenizers import processors

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.server.app import make_app

PROMPT, ANSWER = "the man", " is the €: old é\ufffd"
SPELLED = ["▁is", "▁the", "▁", *(f"<0x{byte:02X}>" for byte in "€:".encode()), "▁old", "▁", "é", "<0xC3>"]
PLACES = [0, 3, 7, 8, 8, 8, 9, 10, 14, 15, 16]


def llama_tokenizer():
    """Return a tokenizer like Llama 2's, which adds BOS."""
    tokenizer = sentencepiece()
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return tokenizer


@pytest.fixture
def client(monkeypatch):
    tokenizer = llama_tokenizer()
    answer = [tokenizer.token_to_id(name) for name in SPELLED]
    config = replace(LLAMA, vocab_size=tokenizer.get_vocab_size(), eos_ids=())
    engine = FakeEngine(chat_model(tokenizer=tokenizer, config=config))
    monkeypatch.setattr(engine, "spell_answer", lambda: answer)
    client = TestClient(make_app(engine, name="tiny"))
    client.engine = engine
    yield client
    engine.close(drain=False, timeout=0)


def join(lists):
    return list(chain.from_iterable(lists))


def ask(client, path="/v1/completions", **body):
    """Return the choices of an answer, whole or as a list of streamed parts."""
    response = client.post(path, json={"max_tokens": len(SPELLED)} | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()["choices"]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-2]]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_text_and_places_of_a_completion(client, stream, echo, as_ids):
    prompt = llama_tokenizer().encode(PROMPT).ids if as_ids else PROMPT
    parts = ask(client, prompt=prompt, stream=stream, echo=echo, logprobs=0)
    text = "".join(part["text"] for part in parts)
    assert text == PROMPT * echo + ANSWER
    found = [list(part["logprobs"].values()) for part in parts if part["logprobs"]]
    tokens, _, top, offsets = map(join, zip(*found, strict=True))
    begin = ["<s>", "the", " man"] if echo else []
    spelled = [" is", " the", " ", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", ":", " old", " ", "é"]
    assert tokens == [*begin, *spelled, r"bytes:\xc3"]
    shift = len(PROMPT) * echo
    assert offsets == [0, 0, 3][: 3 * echo] + [shift + place for place in PLACES]
    assert [list(each) for each in top[len(begin) :]] == [[token] for token in tokens[len(begin) :]]
    whole = [token for token in range(len(begin), len(tokens)) if not tokens[token].startswith("bytes:")]
    assert all(text[offsets[token] :].startswith(tokens[token]) for token in whole)


def test_special_tokens_that_a_prompt_spells_have_places(client):
    (choice,) = ask(client, prompt="the</s>man", echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == "the</s>man is"
    found = choice["logprobs"]
    assert found["tokens"] == ["<s>", "the", "</s>", "m", "a", "n", " is"]
    assert found["text_offset"] == [0, 0, 3, 7, 8, 9, 10]


@pytest.mark.parametrize("stop", ["€: old", "é"])
def test_text_that_waits_for_a_stop_string_moves_no_token(client, stop):
    parts = ask(client, prompt=PROMPT, stop=stop, logprobs=0, stream=True)
    assert "".join(part["text"] for part in parts) == ANSWER[: ANSWER.index(stop)]
    offsets = join(part["logprobs"]["text_offset"] for part in parts if part["logprobs"])
    assert offsets == PLACES[: len(offsets)]
    assert len(offsets) == (8 if "€" in stop else 10)


def test_a_prompt_that_ends_within_a_character(client):
    cut = llama_tokenizer().token_to_id("<0xE6>")
    prompt = [*llama_tokenizer().encode(PROMPT).ids, cut]
    (choice,) = ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == PROMPT + "\ufffd is"
    assert choice["logprobs"]["text_offset"][-2:] == [len(PROMPT), len(PROMPT) + 1]


def test_a_reply_is_a_text_of_its_own(client):
    messages = [{"role": "user", "content": "the man"}]
    (choice,) = ask(
        client, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=1, max_tokens=6
    )
    assert choice["message"]["content"] == ANSWER.strip()[: len("is the €")]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == ["is", " the", " ", r"\xe2", r"\x82", r"\xac"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "is the €"
    assert content[3]["top_logprobs"] == [{key: content[3][key] for key in ("token", "logprob", "bytes")}]


def test_tokens_become_the_text_that_was_encoded(client):
    tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<s>" + PROMPT}


RENDERED = "<s> the man"
"""A prompt as a client gets it from a chat template."""


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"prompt": PROMPT}, ["<s>", "▁the", "▁man"]),
        ({"prompt": RENDERED}, ["<s>", "▁the", "▁man"]),
        ({"prompt": RENDERED + "<s>"}, ["<s>", "▁the", "▁man", "<s>"]),
        ({"prompt": "<s>" + RENDERED}, ["<s>", "<s>", "▁the", "▁man"]),
        ({"prompt": "</s>"}, ["<s>", "</s>"]),
        ({"prompt": PROMPT, "add_special_tokens": False}, ["▁the", "▁man"]),
        ({"prompt": RENDERED, "add_special_tokens": False}, ["<s>", "▁the", "▁man"]),
    ],
)
def test_bos_comes_once(client, field, expected):
    tokenizer = llama_tokenizer()
    tokens = client.post("/tokenize", json=field).json()["tokens"]
    assert [tokenizer.id_to_token(token) for token in tokens] == expected
    (choice,) = ask(client, **field, echo=True, logprobs=0, max_tokens=1)
    assert len(choice["logprobs"]["tokens"]) == len(expected) + 1


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
@pytest.mark.parametrize("special", [False, True])
def test_bos_of_a_chat(client, template, special):
    chat_template = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    client.engine.model.chat_template = chat_template
    messages = [{"role": "user", "content": "the man"}]
    body = {"messages": messages, "max_tokens": 1, "add_special_tokens": special}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    begin = llama_tokenizer().token_to_id("<s>")
    (asked,) = client.engine.submitted
    assert asked.prompt.count(begin) == (special or "bos_token" in template)
