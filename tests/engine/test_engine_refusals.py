"""Refusals of an engine: requests, settings and caches, and requests after it has closed or failed."""

import threading
from dataclasses import replace

import jax
import pytest
from conftest import TinyModel
from listening import CONFIG, TWO_LAYERS, Listener, ask, window_model

from zdc_jax import methods
from zdc_jax.engine import layout, runner
from zdc_jax.engine.checks import check_request
from zdc_jax.engine.compiling import compile_all
from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import Busy, EngineRequest
from zdc_jax.errors import CacheMemoryError, PlanError, PromptError
from zdc_jax.generation.sampling import Sampling
from zdc_jax.loading import LanguageModel
from zdc_jax.plan import CompressionPlan


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(TWO_LAYERS)


@pytest.fixture(scope="module")
def model(tiny) -> LanguageModel:
    return window_model(tiny)


@pytest.mark.full
def test_an_engine_that_cannot_go_on_tells_everybody(model, monkeypatch):
    engine = Engine(model, EngineConfig(max_sequences=1, max_model_len=160, chunk=32))

    def fails(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._runner, "prefill", fails)
    monkeypatch.setattr(engine._runner, "reset", fails)
    request = EngineRequest(tuple(range(3, 30)), 6)
    first, second = (ask(engine, request) for _ in range(2))
    for listener in (first, second):
        assert listener.ended.wait(60)
        assert listener.reason == "error"
    engine.close(drain=True, timeout=10)
    with pytest.raises(Busy, match="closing"):
        ask(engine, request)


@pytest.mark.full
def test_a_closed_engine_leaves_no_step_on_the_device(model, monkeypatch):
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waited.append(wait(arrays)))
    engine = Engine(model, EngineConfig(max_sequences=1, max_model_len=160, chunk=32))
    begun = threading.Event()
    listener = Listener(begun.set)
    engine.submit(EngineRequest((3, 4), 150), listener)
    assert begun.wait(60)
    engine.close(drain=False, timeout=0)
    assert listener.reason == "cancelled"
    assert jax.tree.leaves(waited[-1])  # Otherwise the process would be aborted at its end.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "is empty"),
        ({"prompt": (500,)}, "token id 500 lies outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number >= 1"),
        ({"max_tokens": 200}, "max_tokens=200: 2 prompt tokens plus 200 new ones exceed max_model_len=160"),
        ({"max_tokens": 300}, "max_tokens=300: 2 prompt tokens plus 300 new ones exceed max_model_len=160"),
        ({"min_tokens": 9}, "min_tokens=9 must be a whole number from 0 to max_tokens=8"),
        ({"logprobs": 21}, "logprobs=21 must be a whole number from 0 to 20"),
        ({"stop_tokens": tuple(range(20))}, "at most 16 are allowed"),
        ({"stop_tokens": None}, "stop_tokens=None must be a token id or a list"),
        ({"stop_tokens": (3, 2**40)}, f"token id {2**40} lies outside the vocabulary"),
        ({"stop": ("x",)}, "needs a model with a tokenizer"),
        ({"stop": (5,)}, "stop=.5,. must be a string"),
        ({"logprobs": 2.5}, "logprobs=2.5 must be a whole number from 0 to 20"),
        ({"sampling": Sampling(logit_bias={97: 1})}, "logit_bias: token id 97 lies outside the vocabulary"),
        ({"sampling": Sampling(bad_words=["a"])}, "bad_words needs a model with a tokenizer"),
        ({"priority": "high"}, "priority='high' must be a whole number"),
        ({"salt": None}, "salt=None must be a string"),
        ({"salt": "\ud800"}, r"salt='\\ud800' must be a string"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model, change, message):
    given = {"prompt": (3, 4), "max_tokens": 8} | change
    with pytest.raises(PromptError, match=message):
        check_request(model, 160, EngineRequest(**given))


def test_caches_that_are_not_on_the_device_are_refused_by_name(tiny):
    model = tiny.model(CompressionPlan.full(TWO_LAYERS))
    hosted = methods.named("coded").Settings(memory="host", index=16, read=16)
    near = CompressionPlan.uniform(TWO_LAYERS, qk=32, v=32, sinks=2, window=16)
    layers = tuple(replace(ranks, settings=hosted) for ranks in near.layers)
    model.network.plan = replace(near, method="coded", settings=hosted, layers=layers)
    with pytest.raises(PlanError, match="layer 0: memory='host' is not served"):
        Engine(model, CONFIG)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_sequences", 0, "at least 1"),
        ("decode_steps", 0, "at least 1"),
        ("max_waiting", 0, "at least 1"),
        ("cache_tokens", 0, "at least 1"),
        ("max_model_len", 1, "at least 2"),
        ("chunk", 33, "a power of two >= 32"),
        ("max_sequences", 2.5, "an integer"),
        ("page", True, "an integer"),
        ("max_model_len", "long", "an integer .* or None"),
        ("reuse", 1, "true or false"),
    ],
)
def test_numbers_that_cannot_be(name, value, allowed):
    with pytest.raises(PromptError, match=f"{name}={value!r} must be {allowed}"):
        EngineConfig(**{name: value})


def test_more_tokens_than_the_model_has_positions_for_are_refused(model):
    with pytest.raises(PromptError, match="max_model_len=257 must be at most 256, the model's positions"):
        Engine(model, replace(CONFIG, max_model_len=257))


def test_tokens_of_a_cache_without_pages_are_refused(tiny):
    settings = methods.named("h2o").Settings(kept=16, block=16)
    plan = replace(CompressionPlan.full(TWO_LAYERS), method="h2o", settings=settings)
    specs, given = plan.layer_caches("float32"), {"rows": 3, "longest": 160, "page": 16, "reuse": True}
    refusal = "cache_tokens=480: the plan's method has no pages and reserves max_sequences=3 times 160 tokens"
    with pytest.raises(PlanError, match=refusal):
        layout.Layout.of(specs, cache_tokens=480, **given)
    made = layout.Layout.of(specs, cache_tokens=None, **given)
    assert (made.has_pages, made.pages, made.tails) == (False, 3, None)


def test_a_cache_that_does_not_keep_the_contract_is_refused_by_name(model, monkeypatch):
    (kind,) = {type(spec) for spec in model.network.layer_caches}
    monkeypatch.setattr(kind, "clauses", kind.clauses - {"reuse"})
    with pytest.raises(PlanError, match=r"layer 0: \w+ does not support \['reuse'\]"):
        Engine(model, CONFIG)


def test_a_cache_that_has_no_room_for_one_request_is_refused(model):
    config = replace(CONFIG, cache_tokens=150)
    with pytest.raises(PromptError, match=r"cache_tokens=150 must be at least 160, .* max_model_len=160"):
        Engine(model, config)


def test_memory_for_less_than_one_request_is_refused(model, monkeypatch):
    monkeypatch.setattr(layout, "free_bytes", lambda: 20_000)
    with pytest.raises(
        CacheMemoryError, match=r"max_model_len=160: .* lower max_sequences or max_model_len$"
    ):
        Engine(model, CONFIG)


def test_more_tokens_than_memory_holds_are_refused_with_the_number_that_fit(model, monkeypatch):
    monkeypatch.setattr(layout, "free_bytes", lambda: 10_000_000)
    with pytest.raises(
        CacheMemoryError, match=r"cache_tokens=1000000: memory has room for \d+ tokens"
    ) as found:
        Engine(model, replace(CONFIG, cache_tokens=1_000_000))
    room = int(str(found.value).split("room for ")[1].split()[0])
    specs, given = model.network.device_caches, {"rows": 3, "longest": 160, "page": 16, "reuse": True}
    made = layout.Layout.of(specs, cache_tokens=room, **given)
    assert made.pages * 16 == room
    held = made.tails * made._unpaged_bytes(specs) + sum(spec.bytes(160, 3) for spec in made.specs)
    assert 0.99 * 10_000_000 < held <= 10_000_000


@pytest.mark.full
def test_steps_that_have_no_room_beside_the_cache_are_refused(model, monkeypatch):
    monkeypatch.setattr(runner, "compile_all", compile_all)  # Others compile programs when they use them.
    monkeypatch.setattr(runner, "free_device_bytes", lambda: 1000)
    with pytest.raises(CacheMemoryError, match=r"the program '.*' needs [\d,]+ bytes .*, 1,000 are free"):
        Engine(model, replace(CONFIG, max_sequences=1))


@pytest.mark.full
def test_a_full_queue_and_a_closing_engine_refuse(model):
    engine = Engine(model, EngineConfig(max_sequences=1, max_model_len=160, chunk=32, max_waiting=1))
    long = EngineRequest(tuple(range(3, 30)), 100, ignore_eos=True)
    began, full = threading.Event(), threading.Event()
    first, second = Listener(lambda: began.set() or full.wait(60)), Listener()
    engine.submit(long, first)
    assert began.wait(60)
    engine.submit(long, second)
    assert engine.max_requests == 2
    with pytest.raises(Busy, match=r"the queue is full \(1 waiting requests\)"):
        ask(engine, long)
    full.set()
    engine.close(drain=False, timeout=0)
    assert first.ended.wait(10)
    assert second.ended.wait(10)
    assert {first.reason, second.reason} == {"cancelled"}
    with pytest.raises(Busy, match="closing"):
        ask(engine, long)
