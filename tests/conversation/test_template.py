"""Chat templates: the text of transformers, the sandbox, and files that may contain a template."""

import json
import shutil
from pathlib import Path

import pytest
from chat_templates import CHATML, GEMMA, LLAMA2, LLAMA3, TEMPLATES, THINKING
from hf_variants import write_variant
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from convert.conversion import convert
from zdc_jax import Checkpoint, load
from zdc_jax.conversation import template
from zdc_jax.conversation.template import ChatTemplate
from zdc_jax.errors import ChatError, CheckpointError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
CHATS = {
    "hello": HELLO,
    "system": [{"role": "system", "content": " Be <b>brief</b> & 'kind'. "}, *HELLO],
    "turns": [
        {"role": "user", "content": '  é\n\t"quoted" {{ messages }} '},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes "},
        {"role": "user", "content": "日本 🙂"},
    ],
    "ended": [*HELLO, {"role": "assistant", "content": "Hi </think> there"}],
    "wrong order": [{"role": "assistant", "content": "Hi"}, *HELLO],
}


def in_transformers(source: str, messages: list, generate: bool = False, **options) -> str | None:
    """Render a template with transformers; return None if the template refuses the messages."""
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=generate, **SPECIAL, **options
        )
    except TemplateError:
        return None
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_rendered_as_in_transformers(name, chat):
    found = ChatTemplate(TEMPLATES[name], SPECIAL)
    for generate in (True, False):
        expected = in_transformers(TEMPLATES[name], CHATS[chat], generate)
        if expected is None:
            with pytest.raises(ChatError, match=r"refuses these messages: (System role|Roles must)"):
                found.render(CHATS[chat], add_generation_prompt=generate)
        else:
            assert found.render(CHATS[chat], add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "thinking"])
@pytest.mark.parametrize("content", ["Yes, ", "<think>\nhm\n</think>\n\nYes", "", " é\n"])
def test_a_message_is_continued_as_in_transformers(name, content):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    expected = in_transformers(TEMPLATES[name], messages, continue_final_message=True)
    found = ChatTemplate(TEMPLATES[name], SPECIAL)
    text = found.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected


def test_a_message_that_the_template_leaves_out_cannot_be_continued():
    with pytest.raises(ChatError, match="does not write the last message whole"):
        ChatTemplate("{{ messages[0].content }}").render([*HELLO, *HELLO], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (THINKING, {"enable_thinking": False}),
        (LLAMA3, {"date_string": "26 Jul 2024"}),
        (LLAMA3.replace("tools is not none", "tools[0].name != 'f'"), {"tools": [{"name": "f"}]}),
        (LLAMA2, {"bos_token": "<<"}),
    ],
)
def test_options_are_variables_of_the_template(source, options):
    (expected,), _ = render_jinja_template(
        [HELLO], chat_template=source, add_generation_prompt=True, **(SPECIAL | options)
    )
    assert ChatTemplate(source, SPECIAL).render(HELLO, options) == expected


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "é <"}}}
TOOL_CHAT = [
    *HELLO,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
]


@pytest.mark.parametrize("name", ["hermes", "llama3 with tools", "mistral", "granite"])
@pytest.mark.parametrize("messages", [HELLO, TOOL_CHAT], ids=["hello", "history"])
def test_tools_are_rendered_as_in_transformers(name, messages):
    expected = in_transformers(TEMPLATES[name], messages, True, tools=[ADD])
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, {"tools": [ADD]}) == expected
    assert "add" in expected


def test_an_option_that_is_not_read_is_refused():
    with pytest.raises(ChatError, match=r"options: enable_thnking; .* uses .*enable_thinking"):
        ChatTemplate(THINKING).render(HELLO, {"enable_thnking": False})


ATTACKS = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "the class of dict": "{{ dict.__class__.__base__.__subclasses__() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "the attr filter": "{{ (messages|attr('__class__')).__mro__ }}",
    "changing the messages": "{{ messages.append(messages[0]) }}",
    "changing a message": "{{ messages[0].update(content='x') }}",
    "dunders of a namespace": "{% set ns = namespace(__html__=1) %}{{ ns }}",
    "set dunders of a namespace": "{% set ns = namespace() %}{% set ns.__call__ = 1 %}{{ ns }}",
    "the extension": "{{ self._TemplateReference__context.environment.extensions }}",
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_ways_out_of_the_sandbox_are_closed(source):
    messages = [dict(HELLO[0])]
    with pytest.raises(ChatError, match="violates the sandbox"):
        ChatTemplate(source).render(messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
            "67,1",
        ),
        ("x" * 2**21, "2,097,152 characters, more than"),
        ("{% if %}", "line 1 of the chat template is not valid Jinja: Expected an expression"),
        ("\n{% for x in messages %}", "line 2 .* not valid Jinja"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "RecursionError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('not you') }}", "refuses these messages: not you"),
    ],
)
def test_templates_that_cannot_be_used_are_one_error(source, said):
    with pytest.raises(ChatError, match=said):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Hello", "must be a list"),
        (HELLO[0], "must be a list"),
        (None, "must be a list"),
        ([], "at least one"),
        (["Hello"], r"messages\[0\]='Hello' must have a role"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]=.* must have a role"),
        ([{"role": "user", "content": "x", "mood": "y"}], "may have name, reasoning_content, tool_call_id"),
        (
            [{"role": "critic", "content": "x"}],
            r"role='critic' must be one of \('system', 'user', .*'tool'\)",
        ),
        ([{"role": ["user"], "content": "x"}], "role="),
        ([{"role": "user", "content": None}], "content=None must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "must be a string"),
    ],
)
def test_malformed_messages_are_refused(messages, said):
    with pytest.raises(ChatError, match=said):
        ChatTemplate(CHATML).render(messages)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a Hugging Face folder with a chat template."""
    folder = write_variant("llama-gqa", tmp_path_factory.mktemp("hf"))
    tokens = {"bos_token": {"content": "w1", "lstrip": False}, "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, **tokens}))
    older = {"bos_token": "w9", "eos_token": {"content": "w2"}, "unk_token": "w0"}
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    return folder


def converted(source: Path, output: Path, **files: str) -> Path:
    """Convert a copy of the folder in which these files (`__` for a dot) are replaced."""
    copy = shutil.copytree(source, output / "hf")
    for name, text in files.items():
        (copy / name.replace("__", ".")).write_text(text)
    convert(copy, output / "model", progress=False)
    return output / "model"


def test_a_template_comes_with_its_special_tokens(source, tmp_path):
    found = load(converted(source, tmp_path)).chat_template
    assert found == ChatTemplate(CHATML, {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0"})


def test_a_file_of_its_own_wins(source, tmp_path):
    model = converted(source, tmp_path, chat_template__jinja=GEMMA)
    assert load(model).chat_template.source == GEMMA
    assert (model / "chat_template.jinja").read_text() == GEMMA


def test_of_several_templates_the_default_is_taken(source, tmp_path):
    named = [{"name": "tool_use", "template": GEMMA}, {"name": "default", "template": CHATML}]
    for index, (templates, expected) in enumerate([(named, CHATML), (named[:1], None), (None, None)]):
        config = json.dumps({"chat_template": templates})
        model = converted(source, tmp_path / str(index), tokenizer_config__json=config)
        found = load(model).chat_template
        assert (found and found.source) == expected
        assert (found and found.for_tools().source) == (found and GEMMA)


def test_a_template_may_come_later(source, tmp_path):
    model = converted(source, tmp_path, tokenizer_config__json="{}")
    assert load(model).chat_template is None
    (model / "chat_template.jinja").write_text(CHATML)
    assert load(model).chat_template.source == CHATML


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read .*tokenizer_config.json"),
        ("[" * 10**5, "cannot read .*tokenizer_config.json"),
        ("[]", r"tokenizer_config.json must contain a JSON object, not \[\]"),
        ('{"chat_template": 3}', "tokenizer_config.json: chat_template=3 must be"),
        ('{"chat_template": ["x"]}', "tokenizer_config.json: chat_template=.'x'. must be"),
        ('{"chat_template": [{"name": "default", "template": {}}]}', "chat_template={} must be"),
        ('{"chat_template": "x", "eos_token": 2}', "tokenizer_config.json: eos_token=2 must be"),
        ('{"chat_template": "x", "eos_token": {"content": []}}', "eos_token={'content': ..} must be"),
    ],
)
def test_a_damaged_file_is_named(source, tmp_path, text, said):
    model = converted(source, tmp_path, tokenizer_config__json=text)
    with pytest.raises(CheckpointError, match=said):
        load(model)


def test_a_file_that_changed_is_named(source, tmp_path):
    model = converted(source, tmp_path, chat_template__jinja=GEMMA)
    (model / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is damaged \(its hash changed\)"):
        load(model)
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is damaged"):
        Checkpoint.open(model).check()


def test_text_that_is_no_utf_8_is_named(source, tmp_path):
    model = converted(source, tmp_path)
    (model / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"cannot read .*chat_template.jinja: .*utf-8"):
        load(model)


def test_a_template_that_cannot_be_parsed_hinders_no_other_work(source, tmp_path):
    found = load(converted(source, tmp_path, chat_template__jinja="{% if %}")).chat_template
    with pytest.raises(ChatError, match="not valid Jinja"):
        found.render(HELLO)


def test_limits_are_far_from_what_models_need():
    assert all(len(text) * 100 < template.LONGEST_SOURCE for text in TEMPLATES.values())
