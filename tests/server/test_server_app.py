import asyncio
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from chat_templates import CHATML, THINKING
from fake_engine import ANSWER, CACHED, FAILS, FakeEngine, chat_model
from starlette.testclient import TestClient
from tiny_tokenizers import ascii_tokenizer, chat_tokenizer

from zdc_jax.conversation.prompt import chat_prompt
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.request import EngineRequest, EngineStats, Event
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.server.answers import Answers
from zdc_jax.server.app import make_app
from zdc_jax.server.body import read_body
from zdc_jax.server.errors import RequestError
from zdc_jax.server.metrics import Metrics
from zdc_jax.server.protocol import ChatRequest, CompletionRequest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LENGTH = len(chat_tokenizer().encode(ANSWER).ids)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close(drain=False, timeout=0)


@pytest.fixture
def client(engine) -> TestClient:
    return TestClient(make_app(engine, name="tiny"))


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
    *_, usage = events(client.post(COMPLETIONS, json=asked | {"stream_options": {"include_usage": True}}))
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
    response = client.post(COMPLETIONS, json=asked | {"stream_options": {"include_usage": True}})
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


REFUSED = [
    {"best_of": 2},
    {"presence_penalty": 2.5},
    {"frequency_penalty": "1"},
    {"repetition_penalty": 0},
    {"min_p": 1.5},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"five": 1}},
    {"logit_bias": {"97": 1}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [97]},
    {"bad_words": [" "]},
    {"bad_words": ["?"], "allowed_token_ids": chat_tokenizer().encode("?").ids},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "obj"}}}},
    {"structured_outputs": {"regex": "(a"}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"structural_tag": "a"}},
    {"guided_json": "{"},
    {"guided_regex": ""},
    {"guided_choice": []},
    {"guided_grammar": "start: x"},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"suffix": "end"},
    {"n": 17},
    {"n": 0},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"logprobs": 21},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [5] * 17},
    {"top_k": -2},
    {"min_tokens": 17, "max_tokens": 16},
    {"stream_options": {"include_usage": 1}},
    {"model": "other"},
]
OF_COMPLETIONS = [{"prompt": []}, {"prompt": [5.5]}, {"prompt": {}}]
OF_CHATS = [
    {"top_logprobs": 21, "logprobs": True},
    {"top_logprobs": 2},
    {"messages": None},
    {"messages": [{"role": "critic", "content": "a"}]},
    {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
    {"reasoning_effort": "low"},
]


@pytest.mark.parametrize(
    ("path", "field"),
    [(COMPLETIONS, field) for field in REFUSED + OF_COMPLETIONS]
    + [(CHATS, field) for field in REFUSED + OF_CHATS],
    ids=str,
)
def test_fields_are_refused_by_name(client, engine, path, field):
    usual = {"prompt": "on"} if path == COMPLETIONS else {"messages": HELLO}
    described = error(client.post(path, json=usual | field), 404 if "model" in field else 400)
    assert described["type"] == "invalid_request_error"
    assert described["param"].split("[")[0].split(".")[0] in field
    assert described["param"] in described["message"]
    assert not engine.submitted


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest])
def test_fields_that_are_not_implemented(body):
    needed = {"prompt": "on"} if body is CompletionRequest else {"messages": HELLO}
    assert not body.model_fields.keys() & (body.refused.keys() | body.ignored)
    for name, neutral in body.refused.items():
        for value in (None, *neutral):
            assert read_body(body, json.dumps(needed | {name: value}).encode()) == body(**needed)
        for value in (0.5, "on", {"a": 1}, [7]):
            with pytest.raises(RequestError) as refused:
                read_body(body, json.dumps(needed | {name: value}).encode())
            assert refused.value.param == name
            assert str(refused.value).startswith(f"{name}={json.dumps(value)} is not supported; leave it out")
    anything = {name: [{"a": 1}] for name in body.ignored}
    assert read_body(body, json.dumps(needed | anything).encode()) == body(**needed)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages is required"),
        ({"messages": []}, "messages", "messages=[] must have at least 1 item, not 0"),
        ({"messages": ["a"]}, "messages[0]", 'messages[0]="a" must be a JSON object'),
        (
            {"messages": [*HELLO, {"role": "user", "content": 5}]},
            "messages[1].content",
            "messages[1].content=5 must be a valid string or a valid array",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
            "messages[0].content[0].text=5 must be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "mood": 1}]},
            "messages[0].mood",
            "messages[0].mood=1 is not a field of this API; leave it out",
        ),
        (
            {"temprature": 1},
            "temprature",
            "temprature=1 is not a field of this API; leave it out, or send temperature",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages[0].content[0].type",
            'messages[0].content[0].type="image_url" is not supported: this model reads text only; '
            'send parts of type "text"',
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "messages[0].content=null must be a valid string or a valid array",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "7"}]},
            "messages[0].tool_call_id",
            'messages[0].tool_call_id="7" is for messages of role "tool" only',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
            "messages[0].tool_calls[0].function.name is required",
        ),
        ({"stop": 5}, "stop", "stop=5 must be a valid string or a valid array"),
        ({"stop": ["a", ""]}, "stop[1]", 'stop[1]="" must have at least 1 character'),
        (
            {"stop": ["several words"] * 17},
            "stop",
            'stop=["several words", "several words", "several words", … must have at most 16 items, not 17',
        ),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "stream_options.continuous_usage_stats=true is not supported; leave it out or send false",
        ),
        ({"prompt": [5, "a"]}, "prompt[1]", 'prompt[1]="a" must be a valid integer'),
        ({"prompt": ["a", [5, 0.5]]}, "prompt[1][1]", "prompt[1][1]=0.5 must be a valid integer"),
        ({"prompt": ["a", 5]}, "prompt[1]", "prompt[1]=5 must be a valid string or a valid array"),
    ],
    ids=str,
)
def test_errors_name_the_field_and_the_cause(client, body, param, message):
    path = COMPLETIONS if "prompt" in body else CHATS
    usual = {"messages": HELLO} if path == CHATS and body else {}
    described = error(client.post(path, json=usual | body), 400)
    assert (described["param"], described["message"]) == (param, message)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": [97]}, "vocabulary"),
        ({"prompt": [2**70]}, "integers"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 1e39}, "temperature=1e+39"),
        ({"top_p": 0}, "top_p=0 must be greater than 0"),
        ({"stop_token_ids": [5, 97]}, "stop_token_ids: token id 97 lies outside the vocabulary 0…96"),
        (
            {"stop_token_ids": [*range(5, 21)]},
            "stop_token_ids has 17 ids including the model's own; at most",
        ),
    ],
    ids=str,
)
def test_what_an_engine_cannot_do(client, engine, field, says):
    described = error(client.post(COMPLETIONS, json={"prompt": "on"} | field), 400)
    assert says in described["message"]
    assert described["param"] in field
    assert not engine.submitted


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_fit_are_the_tokens_that_fit(client, engine, field):
    assert client.post(CHATS, json={"messages": HELLO, field: 32_000}).status_code == 200
    asked = {"prompt": [[5] * 50, [5] * 199, [5]], "max_tokens": 10**30}
    assert client.post(COMPLETIONS, json=asked).status_code == 200
    chat, *completions = engine.submitted
    assert chat.max_tokens == 200 - len(chat.prompt)
    assert [request.max_tokens for request in completions] == [150, 1, 199]
    described = error(client.post(CHATS, json={"messages": HELLO, field: 3, "min_tokens": 4}), 400)
    assert described["message"].endswith(f"must be at most {field}=3")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETIONS, {"prompt": [[1], [1] * 200]}, "201 tokens (200 in the prompt, 1 in the completion)"),
        (
            COMPLETIONS,
            {"prompt": [1] * 9, "min_tokens": 195, "max_tokens": 300},
            "204 tokens (9 in the prompt",
        ),
        (CHATS, {"messages": [{"role": "user", "content": "a" * 200}]}, " in the messages, 1 in the"),
    ],
)
def test_prompts_without_room_are_refused_as_openai_does(client, engine, path, body, says):
    described = error(client.post(path, json=body), 400)
    assert described["message"].startswith(
        "This model's maximum context length is 200 tokens. However, you requested "
    )
    assert says in described["message"]
    assert described["code"] == "context_length_exceeded"
    assert described["param"] in body
    assert not engine.submitted


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10**5, b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}'])
def test_bodies_that_are_not_json(client, body):
    assert "the body is not valid JSON: " in error(client.post(COMPLETIONS, content=body), 400)["message"]
    assert error(client.post(COMPLETIONS, content=b"[1]"), 400)["message"] == "the body must be a JSON object"


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


def test_long_bodies(engine):
    client = TestClient(make_app(engine, name="tiny", max_body_bytes=100))
    body = json.dumps({"prompt": "on" * 100}).encode()
    for content in (body, iter([body])):
        described = error(client.post(COMPLETIONS, content=content), 413)
        assert described["message"] == "the body has more than 100 bytes; send less"
    assert client.post(COMPLETIONS, json={"prompt": "on"}).status_code == 200


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
        Answers.submit(late, [EngineRequest((1,), 1)], Metrics(late, "tiny"))

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


def test_paths_and_methods_that_are_none(client):
    for path in ("/v1/nothing", "/nothing"):
        described = error(client.get(path), 404)
        assert described["message"].startswith(f"GET {path}: unknown path; this server has ")
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


def test_an_engine_that_cannot_go_on_is_not_healthy(engine, client):
    assert client.get("/health").status_code == 200
    engine.close(drain=False, timeout=0)
    assert client.get("/health").status_code == 503
