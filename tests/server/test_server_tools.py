"""Tools over HTTP: prompts, calls in whole and streamed replies, and what is refused."""

import json
import re
from typing import Any

import openai
import pytest
from chat_templates import CHATML, HERMES, MISTRAL
from fake_engine import FakeEngine
from tool_engine import ADD, CALLS, HERMES_REPLY, MISTRAL_REPLY, NOW, json_tokenizer, sdk, tool_engine

from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.generation.grammar import Grammar

QUESTION = [{"role": "user", "content": "1 + 2?"}]
REPLIES = {"hermes": (HERMES, HERMES_REPLY), "mistral": (MISTRAL, MISTRAL_REPLY)}


def ask(engine: FakeEngine, **fields: Any) -> Any:
    asked = {"model": "tiny", "messages": QUESTION, "tools": [ADD, NOW]}
    return sdk(engine).chat.completions.create(**asked | fields)


@pytest.mark.parametrize("name", REPLIES)
def test_calls_of_a_whole_reply(name):
    template, reply = REPLIES[name]
    engine = tool_engine(reply, template)
    (choice,) = ask(engine).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    calls = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert {call.type for call in calls} == {"function"}
    assert len({call.id for call in calls}) == 2
    history = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
    assert ask(engine, messages=history).choices[0].message.tool_calls
    prompt = json_tokenizer().decode(engine.submitted[1].prompt, skip_special_tokens=False)
    assert '"name": "add", "arguments": {"a": [1, 2]}' in prompt


@pytest.mark.parametrize("name", REPLIES)
def test_calls_of_a_streamed_reply(name):
    template, reply = REPLIES[name]
    content, calls = "", []
    *chunks, last = ask(tool_engine(reply, template), stream=True)
    for chunk in chunks:
        delta = chunk.choices[0].delta
        assert delta.content or delta.tool_calls
        content += delta.content or ""
        for part in delta.tool_calls or []:
            if part.function.name is not None:
                assert part.index == len(calls)
                assert part.id
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 20
    assert (content, [tuple(call) for call in calls]) == ("Let me add.", CALLS)
    assert last.choices[0].finish_reason == "tool_calls"


def test_the_prompt_names_the_tools():
    engine = tool_engine("No.", CHATML, HERMES)
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []}):
        (choice,) = ask(engine, **fields).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            "No.",
            None,
            "stop",
        )
    *offered, hidden, absent = [
        json_tokenizer().decode(request.prompt, skip_special_tokens=False) for request in engine.submitted
    ]
    empty = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    assert all(f"\n{json.dumps(ADD)}\n{json.dumps(empty)}<|im_end|>" in prompt for prompt in offered)
    assert hidden == absent == ChatTemplate(CHATML).render(QUESTION)


def test_one_call_at_a_time():
    (choice,) = ask(tool_engine(HERMES_REPLY, HERMES), parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]


def test_a_call_that_the_limit_cuts():
    cut = HERMES_REPLY.index(", 2]")
    (choice,) = ask(tool_engine(HERMES_REPLY, HERMES), max_tokens=cut).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"a": [1'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "tool_choice asks for a call, but no such tool is offered; the names in tools: add",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "the names in tools: none"),
        ({"tool_choice": "any"}, "tool_choice", 'tool_choice="any" must be'),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            'response_format and tool_choice="required": both bind the reply; leave one out',
        ),
        (
            {
                "tools": [ADD, {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
            """tools[1].function.parameters: json='{"type": "x"}' cannot be used: Invalid type: x""",
        ),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "tools[0].type=\"web\" must be 'function'"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "tools[0].function.name is required",
        ),
    ],
)
def test_what_is_refused(fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tool_engine("No.", HERMES), **fields)
    assert refused.value.param == param
    assert message in refused.value.message


@pytest.mark.parametrize(
    "template", [CHATML, HERMES.replace("if tools", "if weapons").replace("in tools", "in []")]
)
def test_a_template_without_tools(template):
    with pytest.raises(openai.BadRequestError, match="teaches no supported format of calls") as refused:
        ask(tool_engine("No.", template))
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", set()),
        ("required", {"add", "now"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_a_grammar_binds_a_reply_that_must_be_a_call(choice, names):
    engine = tool_engine(HERMES_REPLY, HERMES)
    assert ask(engine, tool_choice=choice).choices[0].message.tool_calls
    grammar = engine.submitted[0].sampling.grammar
    source = "" if grammar is None else grammar.source
    assert set(re.findall(r'"const": "(\w+)"', source)) == names
    assert (r"</tool_call>" in source) == bool(names)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_reply_in_json_may_be_a_call_unless_none_is_allowed(choice):
    engine = tool_engine(HERMES_REPLY, HERMES)
    ask(engine, tool_choice=choice, response_format={"type": "json_object"})
    source = engine.submitted[0].sampling.grammar.source
    assert ("<tool_call>" in source) == (choice == "auto")
    assert '"type": "object"' in source


def test_a_tool_without_parameters_gets_no_arguments():
    engine = tool_engine(HERMES_REPLY, HERMES)
    ask(engine, tools=[NOW], tool_choice="required")
    assert '"0": {"type": "object", "properties": {}, "additionalProperties": false}' in (
        engine.submitted[0].sampling.grammar.source
    )


def test_what_clients_add_to_a_message_may_be_sent_back():
    call = {"id": "a", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a": 3}', "parsed_arguments": {"a": 3}}
    reply = {"role": "assistant", "content": "{}", "parsed": {}, "tool_calls": [call]}
    assert ask(tool_engine("No.", HERMES), messages=[*QUESTION, reply, *QUESTION]).choices


def test_a_schema_binds_chats_and_responses():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine = tool_engine('{"a": 1}', HERMES)
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    asked: Any = {"messages": QUESTION, "model": "tiny"}
    (choice,) = sdk(engine).chat.completions.create(**asked, response_format=form).choices
    assert json.loads(choice.message.content) == {"a": 1}
    flat: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = sdk(engine).responses.create(model="tiny", input="1?", text=flat)
    assert json.loads(response.output_text) == {"a": 1}
    assert response.text.format.schema_ == schema
    assert [request.sampling.grammar for request in engine.submitted] == [Grammar.json(schema)] * 2
