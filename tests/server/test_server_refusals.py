import json
from collections.abc import Iterator

import pytest
from chat_templates import CHATML
from fake_engine import FakeEngine
from pydantic import ValidationError
from server_answers import CHATS, COMPLETIONS, HELLO, RESPONSES, error
from starlette.testclient import TestClient
from tiny_tokenizers import chat_tokenizer

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.server.app import make_app
from zdc_jax.server.body import read_body
from zdc_jax.server.errors import RequestError
from zdc_jax.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from zdc_jax.server.responses import ResponseRequest


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close(drain=False, timeout=0)


@pytest.fixture
def client(engine) -> TestClient:
    return TestClient(make_app(engine, name="tiny"))


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
    {"bad_words": ["a"] * 1025},
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
            'messages[0].content=null is required in messages of role "user"',
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
        (
            {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.regex",
            "structured_outputs.json and structured_outputs.regex: only one grammar is allowed; leave one "
            "out",
        ),
        ({"prompt": [5, "a"]}, "prompt[1]", 'prompt[1]="a" must be a valid integer'),
        ({"prompt": ["a", [5, 0.5]]}, "prompt[1][1]", "prompt[1][1]=0.5 must be a valid integer"),
        ({"prompt": [[1]] * 129}, "prompt", "prompt: 129 prompts; at most 128 answers are allowed"),
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
    ("path", "limits", "answer"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": 5}, 5),
        (COMPLETIONS, {"max_tokens": 300}, 300),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, 1),
        (CHATS, {}, 1),
        (CHATS, {"min_tokens": 7}, 7),
        (CHATS, {"max_tokens": 5}, 5),
        (CHATS, {"max_tokens": 300, "min_tokens": 7}, 300),
        (CHATS, {"max_tokens": 5, "max_completion_tokens": 6}, 6),
        (RESPONSES, {}, 1),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (RESPONSES, {"max_output_tokens": 300}, 300),
    ],
    ids=str,
)
def test_prompts_without_room_are_refused_as_openai_does(client, engine, path, limits, answer):
    text = "a" * 300
    field, content = {
        COMPLETIONS: ("prompt", ["a", [1] * 250]),
        CHATS: ("messages", [{"role": "user", "content": text}]),
        RESPONSES: ("input", text),
    }[path]
    length = 250
    if path != COMPLETIONS:
        rendered = ChatTemplate(CHATML).render([{"role": "user", "content": text}])
        length = len(chat_tokenizer().encode(rendered).ids)
    described = error(client.post(path, json={field: content} | limits), 400)
    assert described["message"] == (
        f"This model's maximum context length is 200 tokens. However, you requested {length + answer} tokens "
        f"({length} in the {field}, {answer} in the completion). Please reduce the length of the {field}."
    )
    assert (described["code"], described["param"]) == ("context_length_exceeded", field)
    assert not engine.submitted


def test_fewest_tokens_that_no_prompt_leaves_are_refused_by_name(client):
    described = error(client.post(CHATS, json={"messages": HELLO, "min_tokens": 200}), 400)
    assert described["message"] == "min_tokens=200 must be less than the context of 200 tokens"
    assert described["param"] == "min_tokens"


MANY = 1000


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (DetokenizeRequest, {"tokens": [-1] * MANY}, "tokens[0]"),
        (CompletionRequest, {"prompt": [5, *["a"] * MANY]}, "prompt[1]"),
        (CompletionRequest, {"prompt": "a", "bad_words": [""] * MANY}, "bad_words[0]"),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": [1, *["a"] * MANY]}, "allowed_token_ids[1]"),
        (CompletionRequest, {"prompt": "a", "guided_choice": [5] * MANY}, "guided_choice[0]"),
        (
            CompletionRequest,
            {"prompt": "a", "structured_outputs": {"choice": [5] * MANY}},
            "structured_outputs.choice[0]",
        ),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(MANY)}}, "logit_bias"),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(MANY)}},
            "logit_bias.a0",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(2**31 + i): 1 for i in range(MANY)}},
            "logit_bias",
        ),
        (CompletionRequest, {"prompt": "a"} | {f"field{i}": 1 for i in range(MANY)}, "field0"),
        (ChatRequest, {"messages": [{"role": "user", "content": [5] * MANY}]}, "messages[0].content[0]"),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
            "messages[0].tool_calls[0].function",
        ),
        (ChatRequest, {"messages": HELLO, "tools": [{}] * MANY}, "tools[0].type"),
        (ResponseRequest, {"input": [5] * MANY}, "input[0]"),
        (ResponseRequest, {"input": "a", "tools": [5] * MANY}, "tools[0]"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_of_many_faults_only_the_first_is_described(kind, body, param):
    # To describe all faults of 16 MiB would block the event loop for minutes.
    data = json.dumps(body).encode()
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(data)
    assert found.value.error_count() < 5
    with pytest.raises(RequestError) as refused:
        read_body(kind, data)
    assert refused.value.param == param


def test_long_names_are_cut_in_errors(client):
    described = error(client.post(CHATS, json={"messages": HELLO, "m" * 10**6: 1}), 400)
    assert described["param"] == "m" * 60
    assert len(described["message"]) < 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES])
def test_options_of_a_stream_need_a_stream(client, path):
    body = {COMPLETIONS: {"prompt": "on"}, CHATS: {"messages": HELLO}, RESPONSES: {"input": "on"}}[path]
    described = error(client.post(path, json=body | {"stream_options": {"include_usage": True}}), 400)
    assert described["param"] == "stream_options"
    assert described["message"] == 'stream_options={"include_usage": true} needs stream=true'
    for harmless in (None, {}, {"include_usage": False}):
        assert client.post(path, json=body | {"stream_options": harmless}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10**5, b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}'])
def test_bodies_that_are_not_json(client, body):
    assert "the body is not valid JSON: " in error(client.post(COMPLETIONS, content=body), 400)["message"]
    assert error(client.post(COMPLETIONS, content=b"[1]"), 400)["message"] == "the body must be a JSON object"


def test_numbers_in_schemas_must_be_finite(client):
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"maximum": 1e999}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{tool}]}}'
    described = error(client.post(CHATS, content=body), 400)
    assert described["param"] == "tools[0].function.parameters"
    assert described["message"].endswith("must have finite numbers only")


def test_compressed_bodies_are_refused(client):
    described = error(client.post(CHATS, content=b"abc", headers={"Content-Encoding": "gzip"}), 415)
    assert described["message"] == "Content-Encoding: gzip is not supported; send plain JSON"
