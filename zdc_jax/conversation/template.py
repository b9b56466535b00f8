"""The chat template that a model comes with: from messages to the text that the model learned to go on from.

Templates are programs in Jinja, written by whoever made the model. They run in Jinja's sandbox, with what
`apply_chat_template` of transformers gives them, so that they give the same text.
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

Message = Mapping[str, str]
"""`role`, one of `ROLES`, and `content`."""

OURS = {"messages", "add_generation_prompt"}
"""Variables that are no options."""
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
LONGEST_SOURCE = 2**20
"""Characters of a template; those of known models have at most some ten thousand."""
LONGEST_TEXT = 2**26
"""Characters that a template may give."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, and what `bos_token`, `eos_token` and their like are for it.

    What a template can do is limited by Jinja's sandbox (no attributes that lead out of it, no change of what
    it is given, at most 100,000 numbers in one `range`) and by `LONGEST_SOURCE` and `LONGEST_TEXT`. Its time
    and memory are not: nested loops that write nothing, or one expression such as `'x' * 10**10`, can take
    what they like. A model from somebody you do not trust belongs into a process with limits of its own.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self | None:
        """The template in a converted folder, or None where there is none.

        It is `chat_template.jinja`, else `chat_template` of tokenizer_config.json (of several, the one named
        "default"). Special tokens are those of tokenizer_config.json, else of special_tokens_map.json. The
        template is parsed when it is first used, so that one that cannot be does not hinder `generate`.

        Raises:
          CheckpointError: one of these files is damaged, or holds values of kinds that it cannot hold.
        """
        config = _json_object(checkpoint, TOKENIZER_CONFIG)
        source = checkpoint.text(TEMPLATE_FILE)
        if source is None:
            source = _default(config.get("chat_template"))
        if source is None:
            return None
        older = _special_tokens(_json_object(checkpoint, SPECIAL_TOKENS_FILE), SPECIAL_TOKENS_FILE)
        return cls(source, older | _special_tokens(config, TOKENIZER_CONFIG))

    def render(
        self,
        messages: Iterable[Message],
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of a chat.

        Args:
          messages: oldest first, each with a `role` and a `content`.
          options: further variables of the template, plain JSON values, such as `{"enable_thinking": False}`.
          add_generation_prompt: end with what an answer of the assistant begins with.

        Raises:
          ChatError: malformed messages, an option that the template does not read, a template that is no
            Jinja, that refuses the messages, leaves the sandbox or the limits above, or fails in another way.
        """
        checked = checked_messages(messages)
        with _errors_of_templates():
            template, read = _compiled(self.source)
            options, known = options or {}, read - OURS
            if unknown := sorted(options.keys() - known):
                raise ChatError(
                    f"the chat template reads no {', '.join(unknown)}; it reads {', '.join(sorted(known))}"
                )
            variables = {"tools": None, "documents": None, **self.special_tokens, **options}
            pieces = template.generate(
                messages=checked, add_generation_prompt=add_generation_prompt, **variables
            )
            return _joined(pieces)


def checked_messages(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Copies of messages that have one of `ROLES` and a text each; raises `ChatError` for others."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ChatError(f"{messages=!r:.80} must be a list of messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatError(f"message {index}, {message!r:.80}, must have a role, a content and nothing else")
        if message["role"] not in ROLES:
            raise ChatError(f"message {index}: role={message['role']!r:.80} must be one of {ROLES}")
        if not isinstance(message["content"], str):
            raise ChatError(f"message {index}: content={message['content']!r:.80} must be a string")
        checked.append({"role": str(message["role"]), "content": str(message["content"])})
    if not checked:
        raise ChatError("messages=[] must hold at least one message")
    return checked


def _joined(pieces: Iterable[str]) -> str:
    """Their text, if it ends in time."""
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > LONGEST_TEXT:
            raise ChatError(f"the chat template gives more than {LONGEST_TEXT:,} characters")
        text.append(piece)
    return "".join(text)


@contextmanager
def _errors_of_templates() -> Iterator[None]:
    """Raises as `ChatError` whatever a template raises; says what the template did."""
    try:
        yield
    except ChatError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"line {error.lineno} of the chat template is no Jinja: {error}") from error
    except jinja2.exceptions.SecurityError as error:
        raise ChatError(f"the chat template does what it must not: {error}") from error
    except _Refusal as error:
        raise ChatError(f"the chat template refuses these messages: {error}") from error
    except Exception as error:
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error


class _Refusal(jinja2.TemplateError):
    """What a template says by `raise_exception`."""


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """A template, and the names of the variables that it reads."""
    if len(source) > LONGEST_SOURCE:
        raise ChatError(f"the chat template has {len(source):,} characters, more than {LONGEST_SOURCE:,}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    names = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    return environment.from_string(source), frozenset(names)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


class _Dict:
    """`dict`, without what a type leads to."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace`, without attributes that Python itself would look for."""

    def __init__(*args: Any, **kwargs: Any):  # As Jinja's: `self` may be one of the keywords.
        self, *given = args
        for name in (attributes := dict(*given, **kwargs)):
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"attribute {name!r} of a namespace is unsafe.")


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`, which mark for training what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _json_object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """What a JSON file of the folder holds; nothing where it is absent."""
    path, text = checkpoint.path / name, checkpoint.text(name)
    with foreign_errors_as(CheckpointError, f"cannot read {path}"):
        found = {} if text is None else json.loads(text)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds {found!r:.80}")
    return found


def _default(templates: Any) -> str | None:
    """The template, or of a list of named ones the default."""
    if isinstance(templates, list) and all(isinstance(one, dict) for one in templates):
        templates = {one.get("name"): one.get("template") for one in templates}.get("default")
    if templates is None or isinstance(templates, str):
        return templates
    raise CheckpointError(
        f"{TOKENIZER_CONFIG}: chat_template={templates!r:.80} must be a string or a list of named templates"
    )


def _special_tokens(config: Mapping[str, Any], file: str) -> dict[str, str]:
    """Those that a file names: each is a string, or an object that has it as its `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        given = config.get(name)
        token = given.get("content") if isinstance(given, dict) else given
        if isinstance(token, str):
            tokens[name] = token
        elif given is not None:
            raise CheckpointError(
                f"{file}: {name}={given!r:.80} must be a string, or have one as its content"
            )
    return tokens
