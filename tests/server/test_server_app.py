import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from chat_templates import CHATML, THINKING
from fake_engine import ANSWER, CACHED, FAILS, FakeEngine, chat_model
from server_answers import CHATS, COMPLETIONS, HELLO, LENGTH, error, events
from starlette.testclient import TestClient
from tiny_tokenizers import ascii_tokenizer, chat_tokenizer

from zdc_jax.conversation.prompt import chat_prompt
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.request import EngineRequest, EngineStats, Event
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.server import app
from zdc_jax.server.answers import Answers
from zdc_jax.server.app import make_app
from zdc_jax.server.body import read_body
from zdc_jax.server.metrics import Metrics
from zdc_jax.server.protocol import ChatRequest


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close(drain=False, timeout=0)


@pytest.fixture
def client(engine) -> TestClient:
    return TestClient(make_app(engine, name="tiny"))


def test_a_completion(client, engine):
    body = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "on the", "max_tokens": LENGTH}).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "length"}]
    prompt = chat_tokenizer().encode("on the").ids
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": LENGTH,
        "total_tokens": len(prompt) + LENGTH,
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }
    (asked,) = engine.submitted
    assert asked.prompt == tuple(prompt)
    assert asked.sampling.temperature == 1


def test_a_streamed_completion(client):
    asked = {"prompt": "on", "max_tokens": LENGTH, "stream": True}
    whole = events(client.post(COMPLETIONS, json=asked))
    assert "".join(chunk["choices"][0]["text"] for chunk in whole) == ANSWER
    assert len(whole) > 2
    assert {chunk["object"] for chunk in whole} == {"text_completion"}
    assert len({chunk["id"] for chunk in whole}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in whole]
    assert reasons == [None] * (len(whole) - 1) + ["length"]
    *others, usage = events(
        client.post(COMPLETIONS, json=asked | {"stream_options": {"include_usage": True}})
    )
    assert {chunk["usage"] for chunk in others} == {None}
    assert not any("usage" in chunk for chunk in whole)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == LENGTH


def test_a_chat(client, engine):
    body = client.post(CHATS, json={"model": "tiny", "messages": HELLO}).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == LENGTH + 1  # It includes the end token.
    (asked,) = engine.submitted
    assert list(asked.prompt) == chat_prompt(engine.model, HELLO)
    assert len(asked.prompt) + asked.max_tokens == engine.max_model_len
    assert set(asked.stop_tokens) == {1, 2}


def test_a_streamed_chat(client):
    asked = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(client.post(CHATS, json=asked))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == ANSWER
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED}


def test_messages_in_parts_and_from_developers(client, engine):
    parts = [{"type": "text", "text": "is it"}, {"type": "text", "text": "there"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts, "name": "me"}]
    assert client.post(CHATS, json={"messages": messages}).status_code == 200
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "is it\nthere"}]
    assert list(engine.submitted[0].prompt) == chat_prompt(engine.model, plain)


@pytest.mark.parametrize("prompt", ["on", [5, 6], ["on", "the"], [[5, 6], [7]]])
def test_prompts_of_all_kinds(client, engine, prompt):
    body = client.post(
        COMPLETIONS, json={"prompt": prompt, "n": 2, "seed": 2**32 - 1, "max_tokens": 2}
    ).json()
    several = prompt if isinstance(prompt[0], list) or prompt == ["on", "the"] else [prompt]
    ids = [chat_tokenizer().encode(one).ids if isinstance(one, str) else one for one in several]
    assert [list(asked.prompt) for asked in engine.submitted] == [one for one in ids for _ in range(2)]
    assert [asked.sampling.seed for asked in engine.submitted] == [2**32 - 1, 0] * len(ids)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 4 * len(ids)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED * len(ids)}


def test_seeds_differ_where_none_is_given(client, engine):
    for _ in range(4):
        client.post(COMPLETIONS, json={"prompt": "on", "seed": None, "n": None})
    assert len({asked.sampling.seed for asked in engine.submitted}) == 4


def test_streamed_answers_to_several_prompts(client):
    asked = {"prompt": ["on", "the"], "max_tokens": LENGTH, "n": 2, "stream": True, "echo": True}
    texts = dict.fromkeys(range(4), "")
    for chunk in events(client.post(COMPLETIONS, json=asked)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["on" + ANSWER] * 2 + ["the" + ANSWER] * 2


@pytest.mark.parametrize("prompt", ["on the", chat_tokenizer().encode("on the").ids])
def test_echo(client, prompt):
    body = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "echo": True}).json()
    assert body["choices"][0]["text"] == "on the" + "in"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_an_answer(client, stream):
    asked = {"prompt": [[5, 6, 9]], "max_tokens": 0, "logprobs": 1, "echo": True, "stream": stream}
    response = client.post(COMPLETIONS, json=asked | {"stream_options": {"include_usage": stream}})
    bodies = events(response) if stream else [response.json()]
    (choice,) = bodies[0]["choices"]
    assert choice["text"] == chat_tokenizer().decode([5, 6, 9])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert bodies[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stop", [" it", ["never", " it"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stop, stream):
    response = client.post(COMPLETIONS, json={"prompt": "on", "stop": stop, "stream": stream})
    chunks = events(response) if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "in the end"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_that_is_a_special_token(client):
    asked = {"prompt": "on", "stop": ["<|im_end|>"], "ignore_eos": True, "max_tokens": 50}
    (choice,) = client.post(COMPLETIONS, json=asked).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")


def test_what_else_can_be_asked_for(client, engine):
    asked = {"top_k": -1, "top_p": 0.5, "temperature": 0, "min_tokens": 1, "priority": -3, "user": "me"}
    asked |= {"ignore_eos": True, "stop_token_ids": [7, 7], "stop": [], "cache_salt": "me"}
    assert (
        client.post(
            CHATS, json=asked | {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 9}
        ).status_code
        == 200
    )
    (request,) = engine.submitted
    assert (request.sampling.top_k, request.sampling.top_p, request.sampling.temperature) == (None, 0.5, 0)
    assert (request.min_tokens, request.priority, request.max_tokens) == (1, -3, 9)
    assert request.ignore_eos
    assert request.stop_tokens == (7,)
    assert (request.stop, request.salt) == ((), "me")


def test_changes_of_logits(client, engine):
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5, "min_p": 0.25}
    asked |= {"logit_bias": {"7": 1, "5": -100}, "allowed_token_ids": [5, 6], "bad_words": ["the"]}
    assert client.post(COMPLETIONS, json=asked | {"prompt": "on", "seed": 1}).status_code == 200
    expected = asked | {"logit_bias": {7: 1, 5: -100}, "temperature": 1.0, "top_p": 1.0, "seed": 1}
    assert engine.submitted[0].sampling == Sampling(**expected)


ASCII = ascii_tokenizer()
SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Grammar.json(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"guided_json": SCHEMA}, Grammar.json(SCHEMA)),
        ({"guided_regex": "[ab]+"}, Grammar.regex("[ab]+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.text('root ::= "a"')),
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
    ],
    ids=str,
)
def test_grammars_of_answers(field, grammar):
    engine = FakeEngine(chat_model(tokenizer=ASCII))
    response = TestClient(make_app(engine, name="tiny")).post(COMPLETIONS, json=field | {"prompt": "on"})
    assert response.status_code == 200, response.text
    assert engine.submitted[0].sampling.grammar == grammar


def test_logprobs_of_completions(client):
    asked = {"prompt": "on", "max_tokens": 2, "logprobs": 5, "top_k": 7}
    found = client.post(COMPLETIONS, json=asked).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["in", " "]
    assert found["token_logprobs"] == [-0.5, -0.5]
    assert found["text_offset"] == [0, 2]
    decoded = [chat_tokenizer().decode([token]) for token in (9, 10, 11, 12)]
    likeliest = dict(zip(decoded, [-1.0, -1.5, -2.0, -9999.0], strict=True))
    assert found["top_logprobs"] == [{"in": -0.5} | likeliest, {" ": -0.5} | likeliest]
    first, second, *_ = events(client.post(COMPLETIONS, json=asked | {"stream": True, "logprobs": 0}))
    assert first["choices"][0]["logprobs"]["top_logprobs"] == [{"in": -0.5}]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echo_begin_with_the_prompt(client, stream):
    asked = {"prompt": [[5, 6, 9]], "max_tokens": 1, "logprobs": 1, "echo": True, "stream": stream}
    response = client.post(COMPLETIONS, json=asked)
    (body,) = events(response) if stream else [response.json()]
    (choice,) = body["choices"]
    found, texts = choice["logprobs"], [chat_tokenizer().decode([token]) for token in (5, 6, 9)]
    assert found["tokens"] == [*texts, "in"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert found["top_logprobs"] == [None, {texts[1]: -0.5}, {texts[2]: -0.5}, {"in": -0.5}]
    assert choice["text"] == chat_tokenizer().decode([5, 6, 9]) + "in"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(client, stream):
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = client.post(CHATS, json=asked)
    chunks = events(response) if stream else [response.json()]
    found = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["content"]]
    chosen, other = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        for text, logprob in [("in", -0.5), (chat_tokenizer().decode([9]), -1.0)]
    ]
    assert found[0] == chosen | {"top_logprobs": [chosen, other]}
    assert found[-1]["token"] == "<|im_end|>"
    assert len(found) == LENGTH + 1


def test_variables_of_templates():
    engine = FakeEngine(chat_model(chat_template=ChatTemplate(THINKING)))
    client = TestClient(make_app(engine, name="tiny"))
    for options in ({"enable_thinking": False}, {"enable_thinking": False, "thinking": True}):
        asked = {"messages": HELLO, "chat_template_kwargs": options}
        assert client.post(CHATS, json=asked).status_code == 200
        assert list(engine.submitted[-1].prompt) == chat_prompt(
            engine.model, HELLO, {"enable_thinking": False}
        )
    for name in ("enable_thnking", "tools"):
        asked = {"messages": HELLO, "chat_template_kwargs": {name: 1}}
        described = error(client.post(CHATS, json=asked), 400)
        assert described["param"] == f"chat_template_kwargs.{name}"
        assert "does not read it; leave it out, or send one of enable_thinking" in described["message"]


def test_a_template_without_variables_suggests_none(client):
    described = error(client.post(CHATS, json={"messages": HELLO, "reasoning_effort": "low"}), 400)
    assert described["message"].endswith("the chat template of this model does not read it; leave it out")


def test_a_reply_is_continued(client, engine):
    messages = [*HELLO, {"role": "assistant", "content": "it is"}]
    for field in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        assert client.post(CHATS, json={"messages": messages} | field).status_code == 200
    continued, ended = [chat_tokenizer().decode(asked.prompt, False) for asked in engine.submitted]
    assert continued.endswith("<|im_start|>assistant\nit is")
    assert ended == continued + "<|im_end|>\n"


def test_the_history_of_tools_reaches_the_template():
    def call(arguments: object) -> dict[str, Any]:
        return {"id": "7", "type": "function", "function": {"name": "add", "arguments": arguments}}

    assistant = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "so"}
    sent = [
        assistant | {"tool_calls": [call('{"a": [1]}'), call("{broken"), call({"b": 2}) | {"index": 2}]},
        {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    body = read_body(ChatRequest, json.dumps({"messages": [*HELLO, *sent]}).encode())
    calls = [call({"a": [1]}), call("{broken"), call({"b": 2})]
    assert [message.to_template() for message in body.messages] == [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "7", "content": "3"},
        {"role": "assistant", "content": ""},
    ]


def test_a_model_without_a_template():
    client = TestClient(make_app(FakeEngine(chat_model(chat_template=None)), name="base"))
    assert "chat template" in error(client.post(CHATS, json={"messages": HELLO}), 400)["message"]
    assert client.post(COMPLETIONS, json={"prompt": "on"}).status_code == 200


def test_a_model_without_a_tokenizer():
    client = TestClient(make_app(FakeEngine(chat_model(tokenizer=None)), name="bare"))
    asked = {"prompt": [5], "max_tokens": 3, "logprobs": 0}
    (choice,) = client.post(COMPLETIONS, json=asked).json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:1"]
    for field in ({"prompt": "on"}, {"stop": "on"}):
        described = error(client.post(COMPLETIONS, json={"prompt": [5]} | field), 400)
        assert "tokenizer" in described["message"]
        assert described["param"] in field
    assert "tokenizer" in error(client.post("/tokenize", json={"prompt": "on"}), 400)["message"]


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", "Basic sécret", "sécret"])
def test_keys(engine, key):
    client = TestClient(make_app(engine, name="tiny", api_keys=["other", "sécret"]))
    headers = {} if key is None else {"Authorization": key.encode()}
    described = error(client.post(COMPLETIONS, json={"prompt": "on"}, headers=headers), 401)
    assert described["code"] == "invalid_api_key"
    error(client.get("/v1/models", headers=headers), 401)
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200
    for each in ("sécret", "other"):
        headers = {"Authorization": f"Bearer {each}".encode()}
        assert client.post(COMPLETIONS, json={"prompt": "on"}, headers=headers).status_code == 200


def test_an_empty_key_is_refused(engine):
    with pytest.raises(ValueError, match="api_keys has an empty key"):
        make_app(engine, name="tiny", api_keys=["key", ""])


def test_long_bodies(client, monkeypatch):
    monkeypatch.setattr("zdc_jax.server.app.MAX_BODY_BYTES", 100)
    body = json.dumps({"prompt": "on" * 100}).encode()
    for content in (body, iter([body])):
        described = error(client.post(COMPLETIONS, content=content), 413)
        assert described["message"] == "the body has more than 100 bytes; send less"
    assert client.post(COMPLETIONS, json={"prompt": "on"}).status_code == 200


@pytest.mark.parametrize(("length", "in_a_thread"), [(5, False), (2**16, True)])
def test_large_bodies_are_read_in_a_thread(client, monkeypatch, length, in_a_thread):
    def read(kind, data):
        with suppress(RuntimeError):  # Other threads have no loop.
            asyncio.get_running_loop()
            loops.append(True)
        return read_body(kind, data)

    loops: list[bool] = []
    monkeypatch.setattr(app, "read_body", read)
    client.post(COMPLETIONS, json={"prompt": "a" * length})
    assert loops == ([] if in_a_thread else [True])


def test_a_full_queue_gives_back_what_it_took():
    engine = FakeEngine(room=0)
    client = TestClient(make_app(engine, name="tiny"))
    response = client.post(COMPLETIONS, json={"prompt": "on"})
    assert error(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) > 0
    engine = FakeEngine(room=2)
    client = TestClient(make_app(engine, name="tiny"))
    error(client.post(COMPLETIONS, json={"prompt": "on?", "n": 3}), 429)
    assert [ticket.cancelled.is_set() for ticket in engine.tickets] == [True, True]


def test_a_server_that_closes(client, engine):
    engine.close(drain=False, timeout=0)
    client.app.state.closing = True
    response = client.post(COMPLETIONS, json={"prompt": "on"})
    assert error(response, 503)["code"] == "closing"
    assert "retry-after" in response.headers
    assert client.get("/health").status_code == 503


def test_one_failure_harms_nobody_else(client, engine):
    described = error(client.post(COMPLETIONS, json={"prompt": "on" + FAILS}), 500)
    assert described["message"] == "the device is lost"
    first, last = events(client.post(COMPLETIONS, json={"prompt": "on" + FAILS, "stream": True}))
    assert first["choices"][0]["text"] == "in"
    assert last["error"]["type"] == "server_error"
    assert client.post(COMPLETIONS, json={"prompt": "on"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_ends_the_other_answers_of_its_request(client, engine, stream):
    client.post(COMPLETIONS, json={"prompt": ["on?", "on!"], "stream": stream})
    assert all(ticket.cancelled.is_set() for ticket in engine.tickets)


def test_an_engine_does_not_suffer_from_a_server_that_has_gone():
    class Late:
        def submit(self, request, notify):
            self.notify = notify

    async def ask() -> None:
        Answers(late, [EngineRequest((1,), 1)], Metrics(late, "tiny"))

    late = Late()
    late.stats, late.max_model_len = EngineStats, 9
    asyncio.run(ask())
    late.notify(Event(finish_reason="cancelled"))


def test_a_bug_tells_clients_nothing(engine):
    engine.submit = lambda request, notify: 1 / 0
    client = TestClient(make_app(engine, name="tiny"), raise_server_exceptions=False)
    assert error(client.post(COMPLETIONS, json={"prompt": "on"}), 500)["message"] == "internal error"


def test_models_and_their_names(engine):
    client = TestClient(make_app(engine, name="tiny", aliases=["org/tiny", "gpt-4"]))
    names = ["tiny", "org/tiny", "gpt-4"]
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == names
    for name, listed in zip(names, models, strict=True):
        model = client.get(f"/v1/models/{name}").json()
        assert (model["id"], model["object"], model["root"]) == (name, "model", "tiny")
        assert model["max_model_len"] == listed["max_model_len"] == 200
        answer = client.post(COMPLETIONS, json={"prompt": "on", "model": name}).json()
        assert answer["model"] == name
    described = error(client.get("/v1/models/other"), 404)
    assert described["code"] == "model_not_found"
    assert described["message"].endswith('the only model is "tiny" or "org/tiny" or "gpt-4"')


def test_sources_that_are_not_installed_have_a_version_too(client, monkeypatch):
    def fail(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(app, "version", fail)
    assert client.get("/version").json() == {"version": "source"}


def test_facts_about_the_server(client, engine):
    assert client.get("/version").json() == {"version": version("zdc-jax")}
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    facts = {"eos_token": "<|im_end|>", "chat_template": CHATML, "model_max_length": 200}
    assert client.get("/tokenizer_info").json() == facts
    described = error(client.post("/v1/embeddings", json={"input": "on"}), 400)
    assert "/v1/embeddings: this server generates text only" in described["message"]


def test_tokens_and_text(client):
    ids = chat_tokenizer().encode("on the<|im_end|>").ids
    found = client.post("/tokenize", json={"prompt": "on the<|im_end|>"}).json()
    assert found == {"count": len(ids), "max_model_len": 200, "tokens": ids}
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "on the<|im_end|>"}
    assert error(client.post("/detokenize", json={"tokens": [-1]}), 400)["param"] == "tokens[0]"
    refused = error(client.post("/detokenize", json={"tokens": [1, 10**6]}), 400)
    assert refused["message"].startswith("tokens: token id 1000000 lies outside the vocabulary")


def test_paths_and_methods_that_are_none(client):
    for path in ("/v1/nothing", "/nothing"):
        described = error(client.get(path), 404)
        assert described["message"].startswith(f"GET {path}: unknown path; this server has ")
        assert "{model}" in described["message"]
        assert ":path" not in described["message"]
        assert COMPLETIONS in described["message"]
        assert described["code"] == "unknown_url"
    for path, asked in (("/health", client.post), (COMPLETIONS, client.get)):
        described = error(asked(path), 405)
        assert f"{path}: this path accepts " in described["message"]
        assert described["code"] == "method_not_supported"


def test_too_many_answers_of_one_body_are_refused_by_name(client):
    response = client.post(COMPLETIONS, json={"prompt": ["on"] * 20, "n": 8})
    assert error(response, 400) == error(response, 400) | {"param": "prompt"}
    assert "20 prompts with n=8; at most 128 answers" in error(response, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "on", "n": 4}, "n"),
        (CHATS, {"messages": HELLO, "n": 4}, "n"),
        (COMPLETIONS, {"prompt": ["on"] * 4}, "prompt"),
        (COMPLETIONS, {"prompt": ["on"] * 2, "n": 2}, "prompt"),
    ],
)
def test_more_answers_than_a_server_can_queue_are_refused_by_name(client, engine, path, body, param):
    engine.max_requests = 3
    described = error(client.post(path, json=body), 400)
    assert described["param"] == param
    assert described["message"].startswith(param)
    assert described["message"].endswith("at most 3 answers are allowed at a time")
    assert not engine.submitted
    engine.max_requests = 4
    assert client.post(path, json=body).status_code == 200


def test_an_engine_that_cannot_go_on_is_not_healthy(engine, client):
    assert client.get("/health").status_code == 200
    engine.close(drain=False, timeout=0)
    assert client.get("/health").status_code == 503
