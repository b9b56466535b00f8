"""Process that tries grammars, so that one that takes too long or too much memory can be ended.

It listens on a Unix socket and starts a child process for each grammar. The child compiles the grammar and
walks through it at random. A child that takes longer than `SECONDS` is ended by its alarm, even inside native
code. The file runs as a script and imports nothing of this package, since importing JAX takes seconds.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
from socketserver import ForkingMixIn, StreamRequestHandler, UnixStreamServer
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

SECONDS = 0.5
"""Processor time that a grammar may take to compile, with a walk of `STEPS` tokens."""
STEPS = 24
MAX_BYTES = 4 * 2**30
"""Most address space of a child process."""
MAX_ERROR = 300
"""Most characters of an error message."""
SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""White space between the parts of a JSON text. Without a limit a model may write nothing else."""

JSON: Any = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""Options for JSON schemas. `oneOf` means `anyOf`, since a mask cannot exclude what fits two schemas."""


def new_tokenizer(text: str, vocab: int, end: int) -> LLTokenizer:
    """Return llguidance's tokenizer.

    Args:
      text: content of `tokenizer.json`.
      vocab: number of tokens.
      end: token that ends a text.
    """
    return LLTokenizer(text, n_vocab=vocab, eos_token=end)


def new_matcher(tokenizer: LLTokenizer, kind: str, source: str) -> LLMatcher:
    """Compile a grammar (`zdc_jax.generation.grammar.Grammar`); raise `ValueError` if it is malformed."""
    if kind == "json":
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=JSON)
    elif kind == "choice":
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(source))
        grammar = LLMatcher.grammar_from_lark(f"start: {options}")
    else:
        grammar = grammar_from("grammar" if kind == "grammar" else "regex", source)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def walk_through(matcher: LLMatcher, vocab: int, end: int) -> None:
    """Generate random tokens; raise `ValueError` if the grammar becomes too complex for a mask."""
    rng, mask = random.Random(0), allocate_token_bitmask(1, vocab)
    for _ in range(STEPS):
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        tokens = tokens[tokens != end]
        if matcher.is_stopped() or not len(tokens):
            return
        matcher.consume_token(int(rng.choice(tokens)))


class _Handler(StreamRequestHandler):
    """Answer of a child process: a line of JSON with an error message, or null."""

    def handle(self) -> None:
        """Try the grammar of one connection."""
        # Time of the processor: on a busy host a good grammar would otherwise be refused.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        server: Any = self.server
        error = None
        try:
            kind, source = json.loads(self.rfile.readline())
            walk_through(new_matcher(server.tokenizer, kind, source), server.tokenizer.vocab_size, server.end)
        except ValueError as problem:
            error = str(problem)[:MAX_ERROR]
        with contextlib.suppress(BrokenPipeError):  # The other side did not wait.
            self.wfile.write(json.dumps(error).encode() + b"\n")


class _Server(ForkingMixIn, UnixStreamServer):
    """Server that ends with the process that started it."""

    request_queue_size = 64
    tokenizer: LLTokenizer
    end: int
    parent = os.getppid()

    def service_actions(self) -> None:
        """Collect children that have ended."""
        super().service_actions()
        if os.getppid() != self.parent:
            sys.exit()


def main() -> None:
    """Serve at the socket path of the command line; standard input has the arguments of `new_tokenizer`."""
    text, vocab, end = json.load(sys.stdin)
    with _Server(sys.argv[1], _Handler, bind_and_activate=True) as server:
        server.tokenizer, server.end = new_tokenizer(text, vocab, end), end
        server.serve_forever()


if __name__ == "__main__":
    main()
