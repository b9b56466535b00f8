"""The API of responses with OpenAI's client: text and tools, whole and streamed."""

from typing import Any

import openai
import pytest
from chat_templates import CHATML, HERMES, THINKING
from fake_engine import FakeTicket
from starlette.testclient import TestClient
from tool_engine import ADD, CALLS, HERMES_REPLY, json_tokenizer, sdk, tool_engine

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.engine.request import Event
from zdc_jax.server.app import make_app

TOOLS = [{"type": "function", **ADD["function"]}, {"type": "function", "name": "now"}]


def ask(engine: Any, **fields: Any) -> Any:
    return sdk(engine).responses.create(**{"model": "tiny", "input": "1 + 2?"} | fields)


def prompts(engine: Any) -> list[str]:
    return [
        json_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in engine.submitted
    ]


def test_a_text():
    engine = tool_engine("It is 3.", CHATML)
    response = ask(engine, instructions="Be brief.", temperature=0, store=False, user="me")
    assert response.output_text == "It is 3."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.input_tokens == len(engine.submitted[0].prompt)
    assert usage.output_tokens == len("It is 3.") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
    assert prompts(engine) == [ChatTemplate(CHATML).render(messages)]
    assert engine.submitted[0].sampling.temperature == 0


def test_a_seed():
    engine = tool_engine("It is 3.", CHATML)
    ask(engine, extra_body={"seed": 7})
    assert engine.submitted[0].sampling.seed == 7


def test_a_text_that_the_limit_cuts():
    response = ask(tool_engine("It is 3.", CHATML), max_output_tokens=5)
    assert (response.status, response.output_text) == ("incomplete", "It is")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    *_, last = ask(tool_engine("It is 3.", CHATML), max_output_tokens=5, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "It is")


def test_calls_and_their_results():
    engine = tool_engine(HERMES_REPLY, HERMES)
    first = ask(engine, tools=TOOLS)
    message, *calls = first.output
    assert message.content[0].text == "Let me add."
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", *call) for call in CALLS
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    ask(engine, tools=TOOLS, input=[{"role": "user", "content": "1 + 2?"}, *first.output, *results])
    function = {"name": "add", "arguments": {"a": [1, 2]}}
    asked = [
        {"id": "1", "type": "function", "function": function},
        {"function": {"name": "now", "arguments": {}}},
    ]
    history = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "Let me add.", "tool_calls": asked},
        *[{"role": "tool", "content": "3"}] * 2,
    ]
    tools = [
        ADD,
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert prompts(engine)[1] == ChatTemplate(HERMES).render(history, {"tools": tools})


def test_a_stream_of_text_and_calls():
    with sdk(tool_engine(HERMES_REPLY, HERMES)).responses.stream(
        model="tiny", input="1 + 2?", tools=TOOLS
    ) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert response.output_text == "Let me add."
    calls = response.output[1:]
    assert [(call.name, call.arguments) for call in calls] == CALLS
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 5
    for call in calls:
        assert "".join(event.delta for event in deltas if event.item_id == call.id) == call.arguments


def test_a_failure_in_a_stream():
    def fail(request, notify):
        notify(Event(finish_reason="error", error="the device is lost"))
        return FakeTicket()

    engine = tool_engine("It is 3.", CHATML)
    engine.submit = fail
    *_, last = ask(engine, stream=True)
    assert (last.type, last.message) == ("error", "the device is lost")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "input=[] must have at least 1 item"),
        ({"input": [{"role": "user"}]}, "input[0].content", 'is required of items of type "message"'),
        (
            {"input": [{"role": "user", "content": "a", "output": "b"}]},
            "input[0].output",
            'input[0].output="b" is not a field of items of type "message"',
        ),
        (
            {"input": [{"type": "item_reference", "id": "rs_1"}]},
            "input[0].type",
            "input[0].type=\"item_reference\" must be 'message', 'function_call', 'function_call_output' or "
            "'reasoning'",
        ),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}]},
            "input[0].content[0].type",
            'input[0].content[0].type="reasoning_text" is not supported',
        ),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]},
            "input[0].content",
            'is not a field of items of type "reasoning"',
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0].type",
            'input[0].content[0].type="input_image" is not supported: this model reads text only',
        ),
        ({"input": "a" * 2000}, "input", "maximum context length is 2000 tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not supported; leave it out"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be 'text', 'json_object' or"),
        (
            {"reasoning": {"effort": "low"}},
            "reasoning.effort",
            'reasoning.effort="low": the chat template of this model does not read it',
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}},
            "text.format",
            'text.format: json=\'{"type": "foo"}\' cannot be used',
        ),
        ({"input": "a" * 2000}, "input", "reduce the length of the input."),
        ({"tool_choice": "required"}, "tool_choice", "the names in tools: none"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "tools[0].type=\"web_search\" must be 'function'",
        ),
    ],
)
def test_what_is_refused(fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tool_engine("No.", THINKING), **fields)
    assert refused.value.param == param
    assert message in refused.value.message


def test_a_schema_that_cannot_be_used_is_named():
    tool = {"type": "function", "name": "f", "parameters": {"type": "x"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.parameters: json=") as refused:
        ask(tool_engine("No.", HERMES), tools=[tool], tool_choice="required")
    assert refused.value.param == "tools[0].parameters"


def test_reasoning_of_other_models_is_left_out():
    engine = tool_engine("No.", HERMES)
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "So"}]}
    items = [
        {"role": "user", "content": "1 + 2?"},
        thoughts | {"content": [], "encrypted_content": "a", "status": "completed"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        thoughts,
        {"role": "assistant", "content": "3."},
        {"role": "user", "content": "Sure?"},
    ]
    ask(engine, input=items, include=["reasoning.encrypted_content"])
    ask(engine, input=[item for item in items if item.get("type") != "reasoning"])
    with_thoughts, without = prompts(engine)
    assert with_thoughts == without


def test_system_messages_become_one():
    engine = tool_engine("No.", CHATML)
    client = TestClient(make_app(engine, name="tiny"))
    parts = [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "kind."}]
    items = [{"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}]
    assert client.post("/v1/responses", json={"input": items, "instructions": "Be brief."}).status_code == 200
    messages = [{"role": "system", "content": "Be brief.\n\nBe\nkind."}, {"role": "user", "content": "Hi"}]
    assert prompts(engine) == [ChatTemplate(CHATML).render(messages)]
