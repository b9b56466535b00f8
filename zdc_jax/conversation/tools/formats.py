"""Formats of the supported families of models, and their choice by the chat template."""

from zdc_jax.conversation.tools.parser import ToolFormat

HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>")
"""Hermes, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call."""
GRANITE = ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "</tool_call>", listed=True)
"""Granite 3: `<|tool_call|>[{"name": …, "arguments": …}, …]`."""
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), named=True, listed=True)
"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), arguments="parameters")
"""Llama 3.1 to 3.3: `{"name": …, "parameters": …}`, several divided by semicolons."""
FORMATS = (HERMES, GRANITE, MISTRAL, LLAMA3)

OTHER_FORMATS = ("<function=", "<arg_key>")
"""Text of templates that write calls within `<tool_call>` in another way than JSON."""


def find_format(template: str) -> ToolFormat | None:
    """Return the format of tool calls that a chat template teaches; None if it mentions none of them.

    Args:
      template: Jinja source of the template.
    """
    if any(text in template for text in OTHER_FORMATS):
        return None
    for format in (MISTRAL, GRANITE, HERMES):
        if format.starts[0] in template:
            return format
    return LLAMA3 if '"parameters": ' in template and "ipython" in template else None
