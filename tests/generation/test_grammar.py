"""Answers that belong to a grammar, and grammars that cannot be used."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from tiny_tokenizers import ascii_tokenizer

from zdc_jax import Grammar, LanguageModel, Sampling, generate, stream
from zdc_jax.errors import PromptError
from zdc_jax.generation import grammar
from zdc_jax.generation.grammar import compile_grammar, warm_up
from zdc_jax.generation.guide import Guide, make_mask
from zdc_jax.plan import CompressionPlan

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1])
TOKENIZER = ascii_tokenizer()
STOP = 57
"""Token that ends an answer: the letter Z, which strings in JSON may contain otherwise."""
UNUSUAL = dict.fromkeys(TOKENIZER.encode(" \n\t").ids, -100)
"""Bias against white space, which a random model would write often."""
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["north", "south"]},
        "size": {"type": "integer", "minimum": -99, "maximum": 99},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "text": {"type": "string", "maxLength": 4},
    },
    "required": ["kind", "size", "text"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": Grammar.json(SCHEMA),
    "regex": Grammar.regex(r"[a-c]{3}(-[0-9]{2}){1,3}"),
    "choice": Grammar.choice(["yes", "yes and no", 'a "quoted" one']),
    "lark": Grammar.text('start: "(" inner ")"\ninner: /[xy]{1,3}/ | "[" /[0-9]{2}/ "]"'),
    "gbnf": Grammar.text('root ::= ("ab" | "cd") [0-9] [0-9]?'),
}


def belongs(name: str, text: str) -> bool:
    """Return whether a text belongs to a grammar, without llguidance."""
    if name == "json":
        value = json.loads(text)
        fits = value["kind"] in ("north", "south") and -99 <= value["size"] <= 99
        fits &= isinstance(value["size"], int) and len(value["text"]) <= 4 and len(value.get("more", ())) <= 2
        return bool(fits) and value.keys() <= SCHEMA["properties"].keys()
    if name == "choice":
        return text in ("yes", "yes and no", 'a "quoted" one')
    patterns = {
        "regex": r"[a-c]{3}(-[0-9]{2}){1,3}",
        "lark": r"\(([xy]{1,3}|\[[0-9]{2}\])\)",
        "gbnf": "(ab|cd)[0-9][0-9]?",
    }
    return re.fullmatch(patterns[name], text) is not None


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    network = TinyModel(CONFIG).model(CompressionPlan.full(CONFIG)).network
    return LanguageModel(network, TOKENIZER, None)


def test_answers_belong_to_their_grammars_and_change_no_neighbour(model):
    rng, names = np.random.default_rng(0), [*GRAMMARS, *GRAMMARS, "json", "none", "none"]
    samplings = [
        Sampling(1.0 if seed > 2 else 0.0, seed=seed, grammar=GRAMMARS.get(name), logit_bias=UNUSUAL)
        for seed, name in enumerate(names)
    ]
    prompts = rng.integers(3, 97, (len(names), 9)).tolist()
    texts, tokens, reasons = [""] * len(names), [()] * len(names), [None] * len(names)
    for delta in stream(model, prompts, 90, sampling=samplings, stop_tokens=STOP):
        texts[delta.sequence] += delta.text
        tokens[delta.sequence] += delta.tokens
        reasons[delta.sequence] = delta.finish_reason
    for name, text, reason in zip(names, texts, reasons, strict=True):
        if name != "none":
            assert (reason, belongs(name, text)) == ("stop", True), text
    alone = generate(model, prompts[-2:], 90, sampling=samplings[-2:], stop_tokens=STOP)
    assert [completion.tokens for completion in alone.completions] == tokens[-2:]


def walk(guide: Guide, seed: int) -> str:
    """Generate a text from random logits, and return it without its stop token."""
    rng, tokens = np.random.default_rng(seed), []
    while not guide.is_complete:
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")[:97]
        tokens.append(int(rng.choice(np.flatnonzero(bits))))
        guide.accept(tokens[-1:])
        if tokens[-1] == STOP:
            return TOKENIZER.decode(tokens[:-1])
    return TOKENIZER.decode(tokens)


@pytest.mark.parametrize("name", GRAMMARS)
def test_random_walks_belong_to_the_grammar(model, name):
    texts = [walk(Guide.of(model, Sampling(grammar=GRAMMARS[name]), (STOP,)), seed) for seed in range(20)]
    assert all(belongs(name, text) for text in texts)
    assert len(set(texts)) > 1


def test_threads_make_slow_masks(model, monkeypatch):
    # The matchers of a grammar are copies of several.
    guides = [Guide.of(model, Sampling(grammar=Grammar.regex("[ab]{1,6}")), (STOP,)) for _ in range(20)]
    for guide in guides[::3]:
        guide.accept([model.tokenizer.token_to_id("a")] * 6)
    expected, threads, mask = make_mask(guides, 97), [], Guide.mask
    assert len({row.tobytes() for row in expected}) == 2
    assert len({row.tobytes() for row in expected[::3]}) == 1

    def noted(guide):
        threads.append(threading.current_thread() is threading.main_thread())
        return mask(guide)

    monkeypatch.setattr(Guide, "mask", noted)
    for index, guide in enumerate(guides):
        guide.is_slow = index > 0
    np.testing.assert_array_equal(make_mask(guides, 97), expected)
    assert sorted(threads) == [False] * 19 + [True]


def test_stop_tokens_wait_for_the_least_tokens(model):
    sampling = Sampling(grammar=Grammar.regex("[ab]{1,6}"))
    texts = {walk(Guide.of(model, sampling, (STOP,), 4), seed) for seed in range(20)}
    assert {len(text) for text in texts} == {4, 5, 6}


def test_options_that_contradict_a_grammar_fail_by_name(model):
    guide = Guide.of(model, Sampling(grammar=Grammar.regex("[0-9]"), allowed_token_ids=[40]))
    guide.mask()
    with pytest.raises(PromptError, match="grammar, stop tokens, bad_words or min_tokens leave no token"):
        guide.accept([40])
    with pytest.raises(PromptError, match="the grammar refuses the token 40"):
        Guide.of(model, Sampling(grammar=Grammar.regex("[0-9]"))).accept([40])


EXPLOSIVE = {
    "intersections": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 25)]},
    "multiples": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99999989}}},
}


def test_explosive_grammars_are_refused_soon_and_block_nobody(model):
    compile_grammar(model, GRAMMARS["regex"])

    # Each takes half a second of processor time; the limits leave room for a busy machine.
    def refuse(schema: Any) -> float:
        began = time.monotonic()
        with pytest.raises(PromptError, match=r"json=.* cannot be used: it is too complex; make it smaller"):
            compile_grammar(model, Grammar.json(schema))
        return time.monotonic() - began

    with ThreadPoolExecutor() as threads:
        refusals = [threads.submit(refuse, schema) for schema in EXPLOSIVE.values()]
        began = time.monotonic()
        compile_grammar(model, Grammar.regex("a new one"))
        assert time.monotonic() - began < 4
        assert all(refusal.result() < 8 for refusal in refusals)
    assert refuse(EXPLOSIVE["multiples"]) < 0.01, "refusals are remembered"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda: Grammar.json({"type": "obj"}), "json=.* cannot be used: Invalid type: obj"),
        (lambda: Grammar.json("{"), "json='{' cannot be used: EOF"),
        (lambda: Grammar.regex("["), "regex=.* cannot be used: .*unclosed character class"),
        (lambda: Grammar.json({"a": {5}}), "json=.* must be a JSON schema"),
        (lambda: Grammar.json({"uniqueItems": True}), 'cannot be used: Unimplemented keys: ."uniqueItems"'),
        (lambda: Grammar.regex("(a"), "regex='.a' cannot be used: .*regex parse error"),
        (lambda: Grammar.regex(""), "regex='' must be a text that is not empty"),
        (lambda: Grammar.regex("a" * 2**20), "regex has 1048576 characters; at most 524288 are allowed"),
        (lambda: Grammar.choice([]), r"choice=\[\] must be a list of texts"),
        (lambda: Grammar.choice("yes"), "choice='yes' must be a list of texts"),
        (lambda: Grammar.text("start: x"), 'grammar=.* cannot be used: .*unknown name: "x"'),
    ],
)
def test_bad_grammars_are_refused_by_name(model, new, message):
    with pytest.raises(PromptError, match=message) as error:
        compile_grammar(model, new())
    assert "\n" not in str(error.value)


def test_a_compiler_is_created_once_for_all_threads(monkeypatch):
    tokenizer, created = ascii_tokenizer(), []

    class Compiler(grammar.GrammarCompiler):
        def __init__(self, *arguments: Any) -> None:
            created.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(grammar, "GrammarCompiler", Compiler)
    model = SimpleNamespace(tokenizer=tokenizer, config=CONFIG)
    with ThreadPoolExecutor() as threads:
        list(threads.map(warm_up, [model] * 3))
    assert len(created) == 1


def test_a_grammar_needs_a_tokenizer():
    bare = SimpleNamespace(tokenizer=None, config=CONFIG)
    with pytest.raises(PromptError, match="regex: a grammar needs a model with a tokenizer"):
        compile_grammar(bare, GRAMMARS["regex"])
    with pytest.raises(PromptError, match="grammar='a' must be a Grammar, or None"):
        Sampling(grammar="a")


def test_a_tokenizer_without_decoder_is_refused_by_name():
    tokenizer = ascii_tokenizer()
    tokenizer.decoder = None
    model = SimpleNamespace(tokenizer=tokenizer, config=LLAMA)
    with pytest.raises(PromptError, match="choice: grammars cannot use this model's tokenizer: "):
        compile_grammar(model, Grammar.choice(["a"]))
    warm_up(model)  # A server without grammars starts all the same.


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_may_have_the_text_of_the_end(special):
    tokenizer = ascii_tokenizer()
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([grammar.END])
    model = SimpleNamespace(tokenizer=tokenizer, config=CONFIG)
    assert compile_grammar(model, GRAMMARS["regex"]) is not None
