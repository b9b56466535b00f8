"""Answers of an engine: equal to `generate` for each request alone, whatever else runs."""

import copy
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel
from listening import CONFIG, TWO_LAYERS, Listener, ask, window_model
from tiny_tokenizers import ascii_tokenizer, byte_tokenizer
from tokenizers import Tokenizer, models

from zdc_jax import methods
from zdc_jax.engine import runner
from zdc_jax.engine.compiling import needed_bytes
from zdc_jax.engine.engine import Engine
from zdc_jax.engine.job import Job
from zdc_jax.engine.request import EngineRequest
from zdc_jax.generation.api import generate
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.next_token import Scores
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.plan import CompressionPlan


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(TWO_LAYERS)


@pytest.fixture(scope="module")
def model(tiny) -> LanguageModel:
    return window_model(tiny)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, CONFIG) as engine:
        yield engine


def requests_of(tiny, count: int, seed: int = 0) -> list[EngineRequest]:
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        prompt = tuple(rng.integers(3, LLAMA.vocab_size, rng.integers(1, 100)).tolist())
        sampling = Sampling() if i % 3 else Sampling(0.8, top_k=20, top_p=0.9, seed=i)
        found.append(EngineRequest(prompt, int(rng.integers(1, 40)), sampling, priority=int(rng.integers(2))))
    return found


def alone(model, request: EngineRequest, chunk: int = 32) -> tuple[int, ...]:
    found = generate(
        model,
        request.prompt,
        request.max_tokens,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens if request.ignore_eos else (*LLAMA.eos_ids, *request.stop_tokens),
        prefill_chunk=chunk,
    )
    return found.completions[0].tokens


def test_text_continues_the_prompt_unless_it_is_a_text_of_its_own(model):
    words = replace(model, tokenizer=Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, "w0")))
    for own in (False, True):
        job = Job(words, EngineRequest((5, 6), 2, new_text=own), (told := []).append, Job.cancel)
        job.add_tokens([7, 8], None)
        assert told[0].text == ("w7 w8" if own else " w7 w8")


def test_answers_are_those_of_generate(engine, model, tiny):
    requests = requests_of(tiny, 6)
    listeners = [ask(engine, request) for request in requests]
    for request, listener in zip(requests, listeners, strict=True):
        assert listener.tokens() == alone(model, request)
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.full
def test_an_urgent_request_takes_a_row_and_nobody_notices(engine, model, tiny):
    before = engine.stats().preemptions
    long = [EngineRequest(tuple(range(3 + i, 40)), 100, priority=1, ignore_eos=True) for i in range(4)]
    drawn = [replace(request, sampling=Sampling(0.7, seed=i)) for i, request in enumerate(long)]
    urgent, hurried = EngineRequest((7, 8, 9), 5, ignore_eos=True), Listener()
    # The urgent request comes when the third of three sequences has its first token.
    listeners = [Listener(), Listener(), Listener(lambda: engine.submit(urgent, hurried)), Listener()]
    for request, listener in zip(drawn, listeners, strict=True):
        engine.submit(request, listener)
    for request, listener in zip(drawn, listeners, strict=True):
        assert listener.tokens() == alone(model, request)
    assert hurried.tokens() == alone(model, urgent)
    assert all(hurried.ended_at < listener.ended_at for listener in listeners), "it waited for others to end"
    assert engine.stats().preemptions > before


def test_a_conversation_goes_on_where_its_prompt_ended(engine, model):
    first = EngineRequest(tuple(range(3, 60)), 8, ignore_eos=True)
    listener = ask(engine, first)
    text = first.prompt + listener.tokens()
    following = EngineRequest((*text, 5, 6, 7), 9, ignore_eos=True)
    again = ask(engine, following)
    assert again.tokens() == alone(model, following)
    assert again.events[0].cached_tokens == 48, "the prompt's last whole page has a snapshot"
    other = ask(engine, EngineRequest((*text, 5, 6, 7), 2, ignore_eos=True, salt="another"))
    other.tokens()
    assert other.events[0].cached_tokens == 0


@pytest.mark.full
def test_stop_tokens_end_an_answer_but_not_too_early(engine, model):
    request = EngineRequest(tuple(range(20, 50)), 20, ignore_eos=True)
    tokens = alone(model, request)
    stop = tokens[5]
    ended = ask(engine, EngineRequest(request.prompt, 20, stop_tokens=(stop,), ignore_eos=True))
    first = tokens.index(stop)
    assert ended.tokens() == tokens[: first + 1]
    assert ended.reason == "stop"
    late = EngineRequest(request.prompt, 20, stop_tokens=(stop,), ignore_eos=True, min_tokens=first + 4)
    given = ask(engine, late).tokens()
    assert len(given) >= first + 4
    assert given[:first] == tokens[:first]
    assert stop not in given[: first + 3]


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"sampling": Sampling(0.8, seed=3)}])
@pytest.mark.matrix
def test_tokens_of_several_steps_come_at_once_where_nobody_waits(engine, model, asked):
    request = EngineRequest((5, 6, 7), 10, ignore_eos=True, **asked)
    listener = ask(engine, request)
    assert listener.tokens() == alone(model, request)
    assert [len(event.tokens) for event in listener.events] == [1, 4, 4, 1]


def test_logprobs_are_those_of_the_model(engine, model):
    request = EngineRequest(tuple(range(3, 40)), 6, logprobs=3, ignore_eos=True)
    listener = ask(engine, request)
    tokens = listener.tokens()
    found = [logprobs for event in listener.events for logprobs in event.logprobs]
    assert [each.token for each in found] == list(tokens)
    logits = model.network(jnp.array([[*request.prompt, *tokens]]))[0, len(request.prompt) - 1 : -1]
    true = np.asarray(jax.nn.log_softmax(logits))
    for step, each in enumerate(found):
        best = np.argsort(-true[step])[:3]
        assert each.logprob == pytest.approx(true[step, each.token], abs=1e-3)
        assert [token for token, _ in each.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in each.top], true[step, best], atol=1e-3)


def test_no_likeliest_ones_are_still_a_logprob(engine):
    # Sequences that sample or ask for no logprobs change no numbers of their neighbours.
    request = EngineRequest(tuple(range(3, 40)), 6, logprobs=0, ignore_eos=True)
    alone = ask(engine, request)
    alone.tokens()
    several = [ask(engine, each) for each in (request, replace(request, sampling=Sampling(1.0)))]
    several.append(ask(engine, replace(request, logprobs=None)))
    expected = [each for event in alone.events for each in event.logprobs]
    assert several[0].tokens() == alone.tokens() == several[2].tokens()
    several[1].tokens()
    beside = [each for event in several[0].events for each in event.logprobs]
    assert len(expected) == len(beside) == 6
    assert not any(each.top for each in (*expected, *beside))
    np.testing.assert_allclose([e.logprob for e in beside], [e.logprob for e in expected], atol=1e-5)
    assert not any(event.logprobs for event in several[2].events)


WORDS = Sampling(allowed_token_ids=[40, 41], bad_words=[byte_tokenizer(LLAMA.vocab_size).decode([40, 41])])
SHAPED = [
    EngineRequest(tuple(range(3, 40)), 20, sampling, ignore_eos=True)
    for sampling in (
        Sampling(),
        WORDS,
        Sampling(0.8, seed=1, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={7: 3}),
    )
]
"""Requests whose answers are chosen without options, with masks of the host, and with penalties."""


@pytest.fixture
def named(engine, model, monkeypatch) -> LanguageModel:
    """Return the engine's model with a tokenizer."""
    named = replace(model, tokenizer=byte_tokenizer(LLAMA.vocab_size))
    monkeypatch.setattr(engine, "model", named)
    return named


def test_options_of_one_request_change_no_other(engine, named):
    expected = [ask(engine, request).tokens() for request in SHAPED]
    listeners = [ask(engine, request) for request in SHAPED]
    assert [listener.tokens() for listener in listeners] == expected
    counts = [max(len(event.tokens) for event in listener.events) for listener in listeners]
    assert counts == [4, 4, 4], "the tokens of several steps are delivered together"
    assert set(expected[1]) == {40, 41}
    assert (40, 41) not in zip(expected[1], expected[1][1:], strict=False)
    assert len({tokens[:5] for tokens in expected}) == 3
    # A sequence without options takes the place of one with options, whose arrays are still there.
    for tokens, request in zip(expected[:1] * 3, SHAPED[:1] * 3, strict=True):
        assert ask(engine, request).tokens() == tokens


def test_nothing_compiles_once_it_runs(engine, tiny, named):
    engine._runner._programs.compile_all()
    ask(engine, requests_of(tiny, 1)[0]).tokens()
    jax.clear_caches()  # Otherwise operations that other tests compiled stay unseen.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: (
            compiled.append(name) if name.endswith("backend_compile_duration") else None
        )
    )
    for listener in [ask(engine, request) for request in (*requests_of(tiny, 5, seed=3), *SHAPED)]:
        listener.tokens()
    assert not compiled


def test_grammars_bind_their_requests_alone(engine, model, monkeypatch):
    named = replace(model, tokenizer=ascii_tokenizer())
    monkeypatch.setattr(engine, "model", named)
    free = EngineRequest(tuple(range(3, 40)), 20, ignore_eos=True)
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 2}
    blanks = dict.fromkeys(named.tokenizer.encode(" \n\t").ids, -100)
    bound = Sampling(1.0, seed=3, grammar=Grammar.json(schema), logit_bias=blanks)
    expected = ask(engine, free).tokens()
    for prompt in (free.prompt, free.prompt[::-1]):
        request = replace(free, prompt=prompt, sampling=bound, logprobs=1)
        listeners = [ask(engine, free), ask(engine, request)]
        assert listeners[0].tokens() == expected
        tokens = listeners[1].tokens()
        scored = [each for event in listeners[1].events for each in event.logprobs]
        assert tuple(each.token for each in scored) == tokens
        assert all(-50 < each.logprob <= 0 for each in scored)
        numbers = json.loads("".join(event.text for event in listeners[1].events))
        assert all(0 <= number <= 99 for number in numbers)
        assert listeners[1].reason == "stop"
        # The tokens of a call are delivered together, also those before the end of a text.
        assert max(len(event.tokens) for event in listeners[0].events) == 4
        assert max(len(event.tokens) for event in listeners[1].events) > 1
    # The first token is possible.
    impossible = Sampling(grammar=Grammar.regex("a[0-9]"), allowed_token_ids=named.tokenizer.encode("a").ids)
    listeners = [ask(engine, free), ask(engine, replace(free, sampling=impossible))]
    assert listeners[0].tokens() == expected
    listeners[1].tokens()
    assert listeners[1].reason == "error"
    assert "leave no token of allowed_token_ids" in listeners[1].events[-1].error


@pytest.mark.full
def test_answers_with_options_are_those_of_generate(engine, named):
    urgent = [replace(request, priority=-1) for request in SHAPED]
    listeners = [ask(engine, request) for request in (*SHAPED, *urgent)]
    for request, listener in zip((*SHAPED, *urgent), listeners, strict=True):
        assert listener.tokens() == alone(named, request)


def test_pieces_are_read_in_one_program_with_one_another_and_tokens_of_others(engine, tiny, monkeypatch):
    prefill, groups = engine._runner.prefill, []

    def noted(chunks, decoding):
        groups.append((len(chunks), decoding.active.any()))
        return prefill(chunks, decoding)

    monkeypatch.setattr(engine._runner, "prefill", noted)
    listeners = [ask(engine, request) for request in requests_of(tiny, 6, seed=1)]
    assert all(listener.tokens() is not None for listener in listeners)
    assert any(active for _, active in groups)
    assert any(count > 1 for count, _ in groups)


def test_logprobs_of_a_prompt_are_those_of_the_model(engine, model, tiny):
    prompt = tuple(np.random.default_rng(1).integers(3, LLAMA.vocab_size, 90).tolist())
    ask(engine, EngineRequest(prompt, 2)).tokens()  # Its pages exist and must not be shared.
    request = EngineRequest(prompt, 3, logprobs=2, prompt_logprobs=True, ignore_eos=True)
    scored, *others = [ask(engine, each) for each in (request, *requests_of(tiny, 3, seed=5))]
    assert scored.tokens() == alone(model, request)
    for listener in others:
        listener.tokens()
    first, *found = scored.events[0].prompt_logprobs
    assert (first.token, first.logprob, first.top) == (prompt[0], None, ())
    assert not any(event.prompt_logprobs for event in scored.events[1:])
    assert scored.events[0].cached_tokens == 0
    true = np.asarray(jax.nn.log_softmax(model.network(jnp.array([prompt]))[0, :-1]))
    assert [each.token for each in found] == list(prompt[1:])
    for step, each in enumerate(found):
        assert each.logprob == pytest.approx(true[step, each.token], abs=1e-3)
        np.testing.assert_allclose([value for _, value in each.top], np.sort(true[step])[:-3:-1], atol=1e-3)
    best = EngineRequest((*prompt[:40], found[39].top[0][0]), 1, logprobs=0, prompt_logprobs=True)
    listener = ask(engine, best)
    listener.tokens()
    assert listener.events[0].prompt_logprobs[-1].logprob == found[39].top[0][1], "exactly equal"


def test_a_prompt_that_is_read_again_is_told_of_once(model):
    # A preemption restarts the prompt from the beginning, in other chunks.
    told, prompt = [], tuple(range(3, 13))
    job = Job(model, EngineRequest(prompt, 3, logprobs=1, prompt_logprobs=True), told.append, Job.cancel)

    def scores(begin: int, end: int) -> Scores:
        """Return scores that identify their positions, with NaN after the chunk."""
        positions = np.arange(begin + 1, begin + 9, dtype=np.float32)
        positions[end - begin :] = np.nan
        return Scores(-positions, np.zeros((8, 5), np.int32), np.zeros((8, 5), np.float32))

    for begin, end in [(0, 4), (4, 8), (0, 6), (6, 10)]:
        job.add_scores(begin, end, scores(begin, end))
    job.add_tokens([7], Scores(np.zeros(1), np.zeros((1, 5)), np.zeros((1, 5))))
    found = told[0].prompt_logprobs
    assert [each.token for each in found] == list(prompt)
    assert [each.logprob for each in found] == [None, *(-float(i) for i in range(1, 10))]


def test_cancelled_requests_free_their_rows(engine, model):
    long = EngineRequest(tuple(range(3, 30)), 120, ignore_eos=True)
    listeners = [Listener() for _ in range(5)]
    jobs = [engine.submit(long, listener) for listener in listeners]
    for job in jobs:
        job.cancel()
    for listener in listeners:
        listener.tokens()
        assert listener.reason == "cancelled"
    short = EngineRequest((5, 6, 7), 4, ignore_eos=True)
    assert ask(engine, short).tokens() == alone(model, short)
    assert engine.stats().running == 0


def test_a_step_that_fails_ends_its_requests_alone(engine, model, monkeypatch, caplog):
    request = EngineRequest(tuple(range(3, 30)), 6, ignore_eos=True, id="request-7")
    prefill, failed = engine._runner.prefill, []

    def fails(*args):
        if not failed:
            failed.append(True)
            raise RuntimeError("out of luck")
        return prefill(*args)

    monkeypatch.setattr(engine._runner, "prefill", fails)
    first = ask(engine, request)
    first.tokens()
    assert (first.reason, first.events[-1].error) == ("error", "RuntimeError: out of luck")
    assert caplog.messages == ["a step failed: requests request-7 end with an error, waiting ones continue"]
    assert ask(engine, request).tokens() == alone(model, request)


def test_a_prefix_is_shared_by_requests_at_once(engine, model):
    prefix = tuple(range(30, 80))
    requests = [EngineRequest((*prefix, i, *range(3, 30)), 20, ignore_eos=True) for i in range(4, 12)]
    listeners = [ask(engine, request) for request in requests]
    for request, listener in zip(requests, listeners, strict=True):
        assert listener.tokens() == alone(model, request)
    assert listeners[-1].events[0].cached_tokens == 48, "two equal prefixes lead to a snapshot"


@pytest.mark.full
def test_requests_make_room_for_one_another_where_pages_run_out(model):
    # Pages suffice for one and a half requests, and all requests grow.
    config = replace(CONFIG, cache_tokens=240, reuse=False)
    requests = [EngineRequest(tuple(range(3 + i, 60)), 90, ignore_eos=True, priority=i % 2) for i in range(5)]
    with Engine(model, config) as engine:
        listeners = [ask(engine, request) for request in requests]
        for request, listener in zip(requests, listeners, strict=True):
            assert listener.tokens() == alone(model, request)
        assert engine.stats().preemptions
        assert engine.stats().cache_usage == 0


def test_rows_are_sent_to_the_device_where_they_changed(engine):
    own = copy.copy(engine._runner)
    send, rows = own._send, own.new_decode_inputs()
    first = send(rows.pack())
    assert send(rows.pack()) is first
    rows.add(1, np.arange(rows.numbers.shape[1]), "greedy")
    np.testing.assert_array_equal(send(rows.pack()), rows.pack())


def test_pieces_are_read_one_by_one_where_several_have_no_room(engine, monkeypatch):
    own = copy.copy(engine._runner)
    needed = {name: needed_bytes(program) for name, program in own._programs.items()}
    largest, *others = sorted(needed.values(), reverse=True)
    assert largest == needed["prefill 3 chunks and decode, 32 tokens"]
    assert largest > others[0]
    monkeypatch.setattr(runner, "free_device_bytes", lambda: largest)
    own._check_memory()
    assert own.grouping.several == 3
    monkeypatch.setattr(runner, "free_device_bytes", lambda: largest - 1)
    own._check_memory()
    assert own.grouping.several == 1


PLANS = {
    "full": ("zdc", {}),
    "codes chosen": ("coded", {"index": 16, "read": 16}),
    "evicting": ("h2o", {}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.full
def test_answers_of_other_caches_are_those_of_generate(tiny, name):
    method, settings = PLANS[name]
    plan = CompressionPlan.uniform(TWO_LAYERS, qk=32, v=32, sinks=2, window=16)
    model = tiny.model(CompressionPlan.full(TWO_LAYERS))
    if method != "zdc":
        made = methods.named(method).Settings(**settings)
        layers = tuple(replace(ranks, settings=made) for ranks in plan.layers)
        model.network.plan = replace(plan, method=method, settings=made, layers=layers)
    prompts = tiny.tokens(3, 100).tolist()
    cut = zip(prompts, (70, 100, 90), strict=True)
    requests = [EngineRequest(tuple(prompt[:length]), 12, ignore_eos=True) for prompt, length in cut]
    with Engine(model, replace(CONFIG, max_sequences=2, chunk=64)) as engine:
        listeners = [ask(engine, request) for request in requests]
        for request, listener in zip(requests, listeners, strict=True):
            assert listener.tokens() == alone(model, request, chunk=64)


def test_every_piece_is_waited_for(engine, monkeypatch):
    # Otherwise chunks would be queued far ahead, and a short request would wait for a whole long prompt.
    waited, deliver = [], engine._deliver
    monkeypatch.setattr(engine, "_deliver", lambda results: (waited.append(len(results)), deliver(results)))
    ask(engine, EngineRequest(tuple(range(96, 2, -1)), 1, ignore_eos=True)).tokens()
    assert [count for count in waited if count] == [1, 1, 1], "a snapshot splits no chunk"


def test_a_tokenizer_that_fails_ends_its_request_alone(engine, model, monkeypatch):
    listener, other = Listener(), Listener()
    job = engine.submit(EngineRequest((5, 6, 7), 40, ignore_eos=True), listener)

    def fails(*_, **__):
        raise RuntimeError("half a character")

    monkeypatch.setattr(job.answer, "append", fails)
    request = EngineRequest((8, 9), 12, ignore_eos=True)
    engine.submit(request, other)
    listener.tokens()
    assert listener.reason == "error"
    assert "cannot decode the answer" in listener.events[-1].error
    assert other.tokens() == alone(model, request)
