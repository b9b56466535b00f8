"""Grammars that bind an answer to calls of tools, for `tool_choice` `required` or a named tool."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from zdc_jax.conversation.tools.parser import ToolFormat
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.grammar_process import JSON

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_call_schema(tools: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the JSON schema of a call of one of some tools: an object with a name and arguments.

    Args:
      tools: tools in OpenAI's format, `{"type": "function", "function": {"name", "parameters"}}`. Tools
        without parameters get no arguments.
      key: key of the arguments.
    """
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or NO_ARGUMENTS
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
    tools: Sequence[Mapping[str, Any]], format: ToolFormat, tokenizer: Tokenizer, *, parallel: bool = True
) -> Grammar:
    """Return the grammar of one call or more, as a model writes them.

    Args:
      tools: tools that may be called, in OpenAI's format.
      format: format of the calls.
      tokenizer: tokenizer of the model, which may have tokens for the format's marks.
      parallel: allow several calls.
    """
    schema = json.dumps(tool_call_schema(tools, format.arguments) | {"x-guidance": JSON})
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
    return Grammar.text(f"start: {calls}\ncall: %json {schema}\n")


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
