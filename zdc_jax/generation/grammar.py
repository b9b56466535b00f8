"""Grammars that an answer must belong to, and their compilation by llguidance."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.masks import clear_bit, full_mask
from zdc_jax.loading import TextModel

MAX_SOURCE = 2**19
"""Most characters of a grammar."""
CACHED_GRAMMARS = 128
MOST_ORIGINALS = 8
"""Most matchers of one grammar that are compiled apart, so that threads can make masks at the same time."""
QUICK_SECONDS = 0.01
"""Time within which a grammar compiles that may be compiled several times."""
START_SECONDS = 60
"""Seconds that the process which tries grammars may take to start."""
END = "<|end of grammar|>"
TRY_SECONDS = 10
"""Seconds after which a grammar counts as too complex on a busy host; else its process ends sooner."""
_CREATING = threading.Lock()
"""Lock of `_new_compiler`, so that two threads do not create the same compiler."""


@dataclass(frozen=True)
class Grammar:
    """Language of an answer. Use `json`, `regex`, `choice` or `text` to create one.

    Attributes:
      kind: kind of the source.
      source: JSON schema, regular expression, JSON list of texts, or Lark or GBNF grammar.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise PromptError(f"{self.kind}={self.source!r:.80} must be a text that is not empty")
        if len(self.source) > MAX_SOURCE:
            raise PromptError(
                f"{self.kind} has {len(self.source)} characters; at most {MAX_SOURCE} are allowed"
            )

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | None = None) -> "Grammar":
        """Return the grammar of JSON texts that fit a schema; None for all objects."""
        schema = {"type": "object"} if schema is None else schema
        try:
            return cls("json", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"json={schema!r:.80} must be a JSON schema: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of texts that match a regular expression as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> "Grammar":
        """Return the grammar of some texts, one of which is the answer."""
        is_list = isinstance(options, Sequence) and not isinstance(options, str)
        if not is_list or not options or not all(isinstance(option, str) and option for option in options):
            raise PromptError(f"choice={options!r:.80} must be a list of texts that are not empty")
        return cls("choice", json.dumps(list(options)))

    @classmethod
    def text(cls, grammar: str) -> "Grammar":
        """Return a grammar in the syntax of Lark or of llama.cpp's GBNF."""
        return cls("grammar", grammar)


class Matcher:
    """State of one answer in a grammar.

    Args:
      matcher: state of llguidance.
      vocab: tokens of llguidance's tokenizer.
      end: token that ends a text for llguidance.
    """

    def __init__(self, matcher: Any, vocab: int, end: int):
        self._matcher, self._end = matcher, end
        self._mask = full_mask(vocab, 1)

    def accept(self, token: int) -> bool:
        """Add a token if it belongs to the grammar, and return whether it does."""
        return token != self._end and bool(self._matcher.try_consume_tokens([token]))

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow; llguidance also stops after errors."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> tuple[np.ndarray, str]:
        """Return bits of tokens that may come next (`Shaping.mask`), and an error message or ''.

        Other threads may run meanwhile. Matchers that were copied from each other share a lock.
        """
        pointer, size = self._mask.ctypes.data, self._mask.nbytes
        self._matcher.unsafe_compute_mask_ptr(pointer, size)
        clear_bit(self._mask[0], self._end)
        return self._mask[0], self._matcher.get_error()


def compile_grammar(model: TextModel, grammar: Grammar) -> Matcher:
    """Compile a grammar for a model's tokenizer, and return its first state.

    A new grammar takes up to a second, most of it without Python's lock. Later ones come from a cache.

    Raises:
      PromptError: the grammar is malformed or too complex, the model has no tokenizer or one that llguidance
        cannot read, or llguidance is not installed.
    """
    if model.tokenizer is None:
        raise PromptError(f"{grammar.kind}: a grammar needs a model with a tokenizer")
    cannot = f"{grammar.kind}: grammars cannot use this model's tokenizer"
    with _CREATING, foreign_errors_as(PromptError, cannot):
        compiler = _new_compiler(model.tokenizer, model.config.vocab_size)
    return Matcher(compiler.compile(grammar), compiler.vocab, compiler.end)


def warm_up(model: TextModel) -> None:
    """Start what compiling needs, which takes seconds, unless it is not installed."""
    with suppress(PromptError):
        compile_grammar(model, Grammar.choice(["a"]))


class _Originals:
    """Matchers of one grammar to copy.

    Copies of one matcher share a lock, so that threads cannot make their masks at the same time. A grammar
    that compiles quickly has several matchers, copied in turns.

    Args:
      compile: function that compiles the grammar.
    """

    def __init__(self, compile: Callable[[], Any]):
        began = time.perf_counter()
        self._compile, self._all, self._lock = compile, [compile()], threading.Lock()
        self._most = MOST_ORIGINALS if time.perf_counter() - began < QUICK_SECONDS else 1
        self._taken = 0

    def copy(self) -> Any:
        """Return a copy in the first state of the grammar."""
        with self._lock:
            index = self._taken % self._most
            if index == len(self._all):
                self._all.append(self._compile())
            self._taken += 1
            return self._all[index].deep_copy()


class GrammarCompiler:
    """Compiler and cache of the grammars of one tokenizer.

    Args:
      tokenizer: tokenizer of the model.
      vocab: tokens of its vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        try:
            from zdc_jax.generation import grammar_process
        except ImportError as error:
            raise PromptError("grammars need the package llguidance: pip install 'zdc-jax[serve]'") from error
        # A token of its own ends a text for llguidance; guides replace it by the stop tokens of a request.
        added = tokenizer.get_added_tokens_decoder()  # Its ids follow the rule of the package tokenizers.
        self.end = max([tokenizer.get_vocab_size(with_added_tokens=False), *(id + 1 for id in added)])
        self.vocab = max(vocab, self.end + 1)
        name = END
        while tokenizer.token_to_id(name) is not None:
            name += END
        arguments = _write_tokenizer(tokenizer, name, self.end), self.vocab, self.end
        # First here, since the process would fail for the same reason without a message.
        self._tokenizer = grammar_process.new_tokenizer(*arguments)
        self._library = grammar_process
        self._folder = tempfile.TemporaryDirectory(prefix="zdc-grammars-")
        self._path = str(Path(self._folder.name) / "socket")
        command = [sys.executable, "-P", grammar_process.__file__, self._path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        weakref.finalize(self, _end_process, self._process, self._folder)
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            json.dump(arguments, pipe)
        self._compile = lru_cache(CACHED_GRAMMARS)(self._compile_new)

    def compile(self, grammar: Grammar) -> Any:
        """Return a matcher of its own for each call; raise `PromptError` if the grammar cannot be used."""
        result = self._compile(grammar)
        if isinstance(result, str):
            raise PromptError(result)
        return result.copy()

    def _compile_new(self, grammar: Grammar) -> "_Originals | str":
        """Return matchers to copy, or an error message."""
        error = self._try(grammar)
        if error is None:
            return _Originals(
                partial(self._library.new_matcher, self._tokenizer, grammar.kind, grammar.source)
            )
        cause = " ".join(str(error).split())  # In one line, without the drawing of the place.
        return f"{grammar.kind}={grammar.source!r:.80} cannot be used: {cause}"

    def _try(self, grammar: Grammar) -> str | None:
        """Compile a grammar in another process; return an error message, or None if it can be used."""
        answer = ""
        with self._connect() as connection, suppress(OSError):
            connection.settimeout(TRY_SECONDS)
            connection.sendall(json.dumps([grammar.kind, grammar.source]).encode() + b"\n")
            answer = connection.makefile().readline()
        return json.loads(answer) if answer else "it is too complex; make it smaller"

    def _connect(self) -> socket.socket:
        """Connect to the process, once it has started."""
        until = time.monotonic() + START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._path)
                return connection
            except OSError as error:
                connection.close()
                if self._process.poll() is not None or time.monotonic() > until:
                    raise PromptError("the process that tries grammars has ended; restart") from error
                time.sleep(0.02)


def _write_tokenizer(tokenizer: Tokenizer, name: str, end: int) -> str:
    """Return `tokenizer.json` with the special token `end`, and added tokens that are text among the others.

    llguidance takes added tokens in angle brackets, such as `<b>`, for special ones, and then fails where a
    grammar has their text.
    """
    content = json.loads(tokenizer.to_str())
    vocab, kept = content["model"].get("vocab"), []
    for token in content["added_tokens"]:
        text = token["content"]
        # Other characters are written in another way in some vocabularies.
        is_plain = isinstance(vocab, dict) and text.isascii() and text.isprintable() and " " not in text
        if is_plain and not token["special"]:
            vocab[text] = token["id"]
        else:
            kept.append(token)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [*kept, {"id": end, "content": name, "special": True, **flags}]
    return json.dumps(content)


def _end_process(process: subprocess.Popen[str], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    folder.cleanup()


@lru_cache(maxsize=4)
def _new_compiler(tokenizer: Tokenizer, vocab: int) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab)
