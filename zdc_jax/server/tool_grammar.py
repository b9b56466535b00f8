"""Grammars that bind an answer to calls of tools, for `tool_choice` `required` or a named tool."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from zdc_jax.conversation.tools.parser import ToolFormat
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.grammar_process import JSON
from zdc_jax.server.tools import NO_PARAMETERS


def tool_call_schema(tools: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the JSON schema of a call of one of some tools: an object with a name and arguments.

    Args:
      tools: tools in the format of chat templates, `{"type": "function", "function": {"name",
        "parameters"}}`. Tools with `NO_PARAMETERS` get no arguments.
      key: key of the arguments.
    """
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        parameters = function["parameters"]
        if parameters == NO_PARAMETERS:
            parameters = parameters | {"additionalProperties": False}
        place = f"#/$defs/{index}"
        definitions[str(index)] = _move_references(parameters, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: {"$ref": place}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    answer: str | None = None,
) -> Grammar:
    """Return the grammar of one call or more, as a model writes them.

    Args:
      tools: tools that may be called, as for `tool_call_schema`.
      format: format of the calls.
      tokenizer: tokenizer of the model, which may have tokens for the format's marks.
      parallel: allow several calls.
      answer: JSON schema of an answer without calls, which is then allowed, too.

    Raises:
      PromptError: `answer` is no JSON object.
    """
    schema = _write_schema(tool_call_schema(tools, format.arguments))
    added = tokenizer.get_added_tokens_decoder()
    tokens = {each.content: token for token, each in added.items()}

    def write_mark(mark: str) -> str:
        return f"<[{tokens[mark]}]>" if mark in tokens else json.dumps(mark)

    def repeat(call: str, separator: str) -> str:
        return f"{call} ({json.dumps(separator)} {call})*" if parallel else call

    start = write_mark(format.starts[0])
    if format.listed:
        calls = f'{start} "[" {repeat("call", ", ")} "]"'
    elif format.end is not None:
        calls = repeat(rf'{start} "\n" call "\n" {write_mark(format.end)}', "\n")
    else:
        calls = repeat("call", "; ")
    rules = [f"call: %json {schema}"]
    if answer is not None:
        with foreign_errors_as(PromptError, f"json={answer!r:.80} must be a JSON schema"):
            rules.append(f"answer: %json {_write_schema(json.loads(answer))}")
        calls = f"({calls}) | answer"
    return Grammar.text("\n".join([f"start: {calls}", *rules, ""]))


def _write_schema(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": JSON})


def _move_references(schema: Any, place: str) -> Any:
    """Return a schema whose references to its own parts hold where it is a part of another schema."""
    if isinstance(schema, list):
        return [_move_references(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _move_references(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
