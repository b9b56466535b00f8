"""Grammars that bind an answer to calls of tools, for `tool_choice` `required` or a named tool."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zdc_jax.errors import PromptError
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.grammar_process import JSON

BEGIN, END = "<tool_call>\n", "\n</tool_call>"
"""Text around a call in the format of Hermes and Qwen."""
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of some tools: an object with `name` and `arguments`.

    Args:
      tools: tools in OpenAI's format, `{"type": "function", "function": {"name", "parameters"}}`. Tools
        without parameters get no arguments.

    Raises:
      PromptError: there are no tools, or one of them is malformed.
    """
    if not tools:
        raise PromptError("tools=[] must have at least one tool to call")
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f"tools.{index}.function={function!r:.80} must be an object with a name")
        parameters = function.get("parameters") or NO_ARGUMENTS
        if not isinstance(parameters, Mapping):
            raise PromptError(f"tools.{index}.function.parameters={parameters!r:.80} must be a JSON schema")
        place = f"#/$defs/{index}"
        definitions[str(index)] = _move_references(parameters, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], *, begin: str = BEGIN, end: str = END, parallel: bool = True
) -> Grammar:
    """Return the grammar of one call or more, each between two texts.

    Args:
      tools: tools that may be called, in OpenAI's format.
      begin: text before a call.
      end: text after a call.
      parallel: allow several calls, on lines of their own.

    Raises:
      PromptError: there are no tools, or one of them is malformed.
    """
    schema = json.dumps(tool_call_schema(tools) | {"x-guidance": JSON})
    more = r' ("\n" call)*' if parallel else ""
    call = f"{json.dumps(begin)} body {json.dumps(end)}"
    return Grammar.text(f"start: call{more}\ncall: {call}\nbody: %json {schema}\n")


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
