"""Tool calls in replies: every format, whole, in single characters and divided anywhere."""

import json
import random

import pytest
from chat_templates import TEMPLATES

from zdc_jax.conversation.tools.formats import GRANITE, HERMES, LLAMA3, MISTRAL, find_format
from zdc_jax.conversation.tools.parser import ToolFormat, ToolParser

ARGUMENTS = '{"a": 1, "b": [2, {"c": "}\\"] é"}]}'
CALL = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
ADD = ("add", ARGUMENTS)
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"

REPLIES = [
    # Without calls
    (HERMES, "", "", []),
    (HERMES, "  hi there \n", "  hi there \n", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (HERMES, "<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x", []),
    (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (HERMES, 'a <tool_call>{"na', 'a <tool_call>{"na', []),
    (LLAMA3, '{"name": "Bob"}; {"name": "add"}', '{"name": "Bob"}; {"name": "add"}', []),
    (LLAMA3, "[1, 2]", "[1, 2]", []),
    (MISTRAL, "[TOOL_CALLS]nothing here {}", "[TOOL_CALLS]nothing here {}", []),
    (MISTRAL, "[TOOL", "[TOOL", []),
    # Calls and content
    (HERMES, MARKED, "", [ADD]),
    (HERMES, f"Let me see.\n\n{MARKED}\n{MARKED}\n", "Let me see.", [ADD, ADD]),
    (HERMES, f"{MARKED} done", " done", [ADD]),
    (HERMES, CALL, "", [ADD]),
    (GRANITE, f'<|tool_call|>[{CALL}, {{"name": "f", "arguments": {{}}}}]', "", [ADD, ("f", "{}")]),
    (GRANITE, f"<tool_call>[{CALL}]", "", [ADD]),
    (GRANITE, f" [{CALL}]", "", [ADD]),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{CALL}, {{"name": "f", "arguments": {{}}, "id": "1"}}]',
        "",
        [ADD, ("f", "{}")],
    ),
    (
        MISTRAL,
        f"Sure. [TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]x[ARGS]{{}}",
        "Sure.",
        [ADD, ("f", "{}")],
    ),
    (LLAMA3, f'{{"name": "add", "parameters": {ARGUMENTS}}}', "", [ADD]),
    (LLAMA3, f'\n{{"type": "function", "function": "add", "parameters": {ARGUMENTS}}}', "", [ADD]),
    (LLAMA3, f'<|python_tag|>{CALL}; {{"name": "f", "parameters": {{}}}}', "", [ADD, ("f", "{}")]),
    (LLAMA3, f"{CALL}\n\nThat is it.", "That is it.", [ADD]),
    # Further calls that the limit cuts
    (HERMES, f"{MARKED}\n<tool_call>", "", [ADD]),
    (HERMES, f'{MARKED}\n<tool_call>\n{{"na', "", [ADD]),
    (MISTRAL, f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]su", "", [ADD]),
    (HERMES, MARKED[:-5], "", [ADD]),
    (HERMES, MARKED[: -len("/tool_call>")], "", [ADD]),
    (HERMES, f"{MARKED}\n<tool_call>no", "\n<tool_call>no", [ADD]),
    # Calls in other shapes
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "", [("f", '"a"')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null, "n": 1}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "b\n\tc"}}</tool_call>',
        "",
        [("f", '{"a": "b\\n\\tc"}')],
    ),
    # Damaged calls
    (HERMES, f"<tool_call>{CALL}}}</tool_call> x", " x", [ADD]),
    (HERMES, f"<tool_call>{CALL[:-1]}\n</tool_call>", "", [ADD]),
    (HERMES, f"<tool_call>{CALL} x", "x", [ADD]),
    (HERMES, f'<tool_call>{{"x"}}{MARKED}', '<tool_call>{"x"}', [ADD]),
    (HERMES, 'a <tool_call>{"name": "f", "arguments": {"a": ', "a", [("f", '{"a": ')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>x', "x", [("f", '{"a": ')]),
]


def parse(format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of a divided reply."""
    parser = ToolParser(format, {"add"})
    content, calls = "", []
    for delta in (*map(parser.feed, pieces), parser.finish()):
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls


@pytest.mark.parametrize(("format", "text", "content", "calls"), REPLIES, ids=lambda value: str(value)[:40])
def test_replies(format, text, content, calls):
    assert parse(format, [text]) == (content, calls)
    assert parse(format, list(text)) == (content, calls)
    for at in range(len(text)):
        assert parse(format, [text[:at], text[at:]]) == (content, calls)


def test_damage_at_random_does_not_depend_on_pieces():
    rng = random.Random(0)
    for _ in range(500):
        format, text, *_ = rng.choice(REPLIES)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(text))
            text = (
                text[:at] + rng.choice(["", *'{}[]",:;<a\\ ', "[TOOL_CALLS]", "<tool_call>"]) + text[at + 1 :]
            )
        assert parse(format, list(text)) == parse(format, [text]), text


def test_arguments_grow_with_the_text():
    parser = ToolParser(HERMES, {"add"})
    parser.feed('<tool_call>{"name": "add"')
    assert [parser.feed(text).calls[0].arguments for text in (', "arguments": {"a"', ": 1", "}")] == [
        '{"a"',
        ": 1",
        "}",
    ]


def test_formats_are_chosen_by_the_template():
    formats = {"hermes": HERMES, "llama3 with tools": LLAMA3, "mistral": MISTRAL, "granite": GRANITE}
    assert {name: find_format(text) for name, text in TEMPLATES.items()} == dict.fromkeys(TEMPLATES) | formats
    assert find_format(TEMPLATES["hermes"] + "<function=") is None


def test_long_arguments_stay_whole():
    text = json.dumps({"name": "add", "arguments": {"text": "word " * 20_000}})
    (call,) = parse(LLAMA3, [text[at : at + 4] for at in range(0, len(text), 4)])[1]
    assert json.loads(call[1]) == {"text": "word " * 20_000}
