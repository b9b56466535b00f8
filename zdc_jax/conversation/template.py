"""Chat templates, which convert messages to the text format that a model was trained on.

A template is a Jinja program from the model's authors. It runs in Jinja's sandbox, with the same variables
and functions as in `apply_chat_template` of transformers, so that it writes the same text.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Self

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import ChatError, CheckpointError, foreign_errors_as

Message = Mapping[str, Any]
"""Message with a `role`, one of `ROLES`, a `content`, and optional fields, those of `OPTIONAL_FIELDS`."""

RESERVED = {"messages", "add_generation_prompt"}
"""Variables that cannot be set as options."""
ROLES = ("system", "user", "assistant", "tool")
OPTIONAL_FIELDS = {"name", "reasoning_content", "tool_call_id", "tool_calls"}
"""Fields of messages that templates may read, in the format of transformers."""
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
LONGEST_SOURCE = 2**20
"""Most characters of a template; known templates have about ten thousand."""
LONGEST_TEXT = 2**26
"""Most characters that a template may write."""
END_OF_CONTENT = "END_OF_CONTENT_TO_CONTINUE "
"""Mark after the content of a message to continue. Its last space tells whether the template trims."""


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a model.

    Jinja's sandbox, `LONGEST_SOURCE` and `LONGEST_TEXT` limit what a template can do. The sandbox blocks
    unsafe attributes and changes of arguments, and a `range` has at most 100,000 numbers. Time and memory are
    not limited: nested loops without output, or an expression such as `'x' * 10**10`, can take any amount.
    Use models from untrusted sources only in a process with resource limits.

    Attributes:
      source: Jinja source.
      special_tokens: text of `bos_token`, `eos_token` and the other special tokens.
      tool_source: Jinja source for chats with tools; None for `source`.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self | None:
        """Return the template of a converted folder, or None if there is none.

        The template is `chat_template.jinja`, otherwise `chat_template` of tokenizer_config.json. If that is
        a list, the template named "default" is used, and the one named "tool_use" for chats with tools.
        Special tokens come from tokenizer_config.json, otherwise from special_tokens_map.json. The template
        is parsed at its first use, so that an invalid one does not prevent `generate`.

        Raises:
          CheckpointError: a file is damaged or has values of the wrong type.
        """
        config = _read_json_object(checkpoint, TOKENIZER_CONFIG)
        source, tool_source = checkpoint.text(TEMPLATE_FILE), None
        if source is None:
            source, tool_source = _select_templates(config.get("chat_template"))
        if source is None:
            return None
        older = _read_special_tokens(_read_json_object(checkpoint, SPECIAL_TOKENS_FILE), SPECIAL_TOKENS_FILE)
        return cls(source, older | _read_special_tokens(config, TOKENIZER_CONFIG), tool_source)

    def for_tools(self) -> "ChatTemplate":
        """Return the template for chats with tools."""
        return self if self.tool_source is None else ChatTemplate(self.tool_source, self.special_tokens)

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template uses; raise `ChatError` if it is invalid."""
        with _convert_template_errors():
            return _compile(self.source)[1] - RESERVED

    def render(
        self,
        messages: Iterable[Message],
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a chat.

        Args:
          messages: messages, oldest first, each with a `role` and a `content`.
          options: further variables of the template, plain JSON values, such as `{"enable_thinking": False}`.
          add_generation_prompt: end the text with the start of an assistant's reply.
          continue_final_message: end the text with the content of the last message, for a model to continue.

        Raises:
          ChatError: messages are malformed, the template does not use an option, or the template fails. It
            may be invalid, refuse the messages, or violate the sandbox or its limits.
        """
        checked = checked_messages(messages)
        if continue_final_message:
            checked[-1]["content"] += END_OF_CONTENT
        with _convert_template_errors():
            template, variables_used = _compile(self.source)
            options, known = options or {}, variables_used - RESERVED
            if unknown := sorted(options.keys() - known):
                raise ChatError(
                    f"unknown template options: {', '.join(unknown)}; "
                    f"the chat template uses {', '.join(sorted(known))}"
                )
            variables = {"tools": None, "documents": None, **self.special_tokens, **options}
            parts = template.generate(
                messages=checked, add_generation_prompt=add_generation_prompt, **variables
            )
            text = _join(parts)
        return _cut_after_content(text) if continue_final_message else text


def _cut_after_content(text: str) -> str:
    """Cut a text after the content of its last message, as transformers does."""
    end = text.rfind(END_OF_CONTENT.rstrip())
    if end < 0:
        raise ChatError(
            "the chat template does not write the last message whole, so it cannot be continued; "
            "end the messages with one of the user"
        )
    trimmed = not text.startswith(END_OF_CONTENT, end)
    return text[:end].rstrip() if trimmed else text[:end]


def checked_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return copies of messages; raise `ChatError` unless each has a valid role and a text."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ChatError(f"{messages=!r:.80} must be a list of messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) - OPTIONAL_FIELDS != {"role", "content"}:
            raise ChatError(
                f"messages[{index}]={message!r:.80} must have a role and a content, and may have "
                f"{', '.join(sorted(OPTIONAL_FIELDS))}"
            )
        if message["role"] not in ROLES:
            raise ChatError(f"messages[{index}]: role={message['role']!r:.80} must be one of {ROLES}")
        if not isinstance(message["content"], str):
            raise ChatError(f"messages[{index}]: content={message['content']!r:.80} must be a string")
        checked.append({**message, "role": str(message["role"]), "content": str(message["content"])})
    if not checked:
        raise ChatError("messages=[] must contain at least one message")
    return checked


def _join(parts: Iterable[str]) -> str:
    """Join the parts of a text of at most `LONGEST_TEXT` characters."""
    text, length = [], 0
    for part in parts:
        length += len(part)
        if length > LONGEST_TEXT:
            raise ChatError(f"the chat template writes more than {LONGEST_TEXT:,} characters")
        text.append(part)
    return "".join(text)


@contextmanager
def _convert_template_errors() -> Iterator[None]:
    """Convert errors of a template to `ChatError`."""
    try:
        yield
    except ChatError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"line {error.lineno} of the chat template is not valid Jinja: {error}") from error
    except jinja2.exceptions.SecurityError as error:
        raise ChatError(f"the chat template violates the sandbox: {error}") from error
    except _Refusal as error:
        raise ChatError(f"the chat template refuses these messages: {error}") from error
    except Exception as error:
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error


class _Refusal(jinja2.TemplateError):
    """Exception raised by `raise_exception` in a template."""


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compile a template; return it with the names of the variables that it uses."""
    if len(source) > LONGEST_SOURCE:
        raise ChatError(f"the chat template has {len(source):,} characters, more than {LONGEST_SOURCE:,}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    names = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    return environment.from_string(source), frozenset(names)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Convert to JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """Replacement of `dict` that does not expose a type and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Replacement of `namespace` that refuses special attributes of Python."""

    def __init__(*args: Any, **kwargs: Any):  # As in Jinja, `self` may be a keyword.
        self, *positional = args
        for name in (attributes := dict(*positional, **kwargs)):
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"attribute {name!r} of a namespace is unsafe.")


class _Generation(Extension):
    """Extension for `{% generation %}` … `{% endgeneration %}`, which mark replies for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _read_json_object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read a JSON file of the folder; return an empty object if it is absent."""
    path, text = checkpoint.path / name, checkpoint.text(name)
    with foreign_errors_as(CheckpointError, f"cannot read {path}"):
        value = {} if text is None else json.loads(text)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must contain a JSON object, not {value!r:.80}")
    return value


def _select_templates(templates: Any) -> tuple[str | None, str | None]:
    """Return the only template, or those named "default" and "tool_use" of a list."""
    tool_template = None
    if isinstance(templates, list) and all(isinstance(each, dict) for each in templates):
        named = {each.get("name"): each.get("template") for each in templates}
        templates, tool_template = named.get("default"), named.get("tool_use")
    for each in (templates, tool_template):
        if not (each is None or isinstance(each, str)):
            raise CheckpointError(
                f"{TOKENIZER_CONFIG}: chat_template={each!r:.80} must be a string, or a list of named strings"
            )
    return templates, tool_template


def _read_special_tokens(config: Mapping[str, Any], file: str) -> dict[str, str]:
    """Read the special tokens of a file, each a string or an object with a string as its `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            tokens[name] = token
        elif value is not None:
            raise CheckpointError(
                f"{file}: {name}={value!r:.80} must be a string, or an object with a string as content"
            )
    return tokens
