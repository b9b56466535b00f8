"""Answers that outlive their replicas, on replicas in this process."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import cycle

import pytest
from conftest import LLAMA, TinyModel
from fake_engine import ANSWER, FakeEngine
from starlette.testclient import TestClient

from zdc_jax.engine.request import Busy, Closing, EngineRequest, EngineStats, Event
from zdc_jax.errors import PromptError
from zdc_jax.replicas import front
from zdc_jax.replicas.front import MAX_LOST, Front, ReplicaLostError, stream
from zdc_jax.replicas.settings import ReplicaSettings
from zdc_jax.server.app import make_app


class LocalFleet:
    """A fleet of engines in rotation. Streams of `dying` engines break after a number of events."""

    def __init__(self, engines: Sequence[FakeEngine], dying: dict[int, int] | None = None):
        self.engines, self.dying, self.asked = engines, dying or {}, []
        self._turn = cycle(range(len(engines)))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        index = next(self._turn)
        self.asked.append((index, request))
        left = self.dying.get(index, 1000)
        async with aclosing(stream(self.engines[index], request)) as events:
            async for event in events:
                if not left:
                    raise ReplicaLostError(f"replica {index} died")
                left -= 1
                yield event

    def stats(self) -> list[EngineStats]:
        return [engine.stats() for engine in self.engines]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(front, "PAUSE", 0.0)


@pytest.fixture
def engines():
    engines = [FakeEngine(), FakeEngine()]
    yield engines
    for engine in engines:
        engine.close(drain=False, timeout=0)


def made(fleet: LocalFleet, room: int = 10) -> Front:
    return Front(fleet.engines[0].model, 200, fleet, room)


def answered(fleet: LocalFleet, request: EngineRequest) -> list[Event]:
    """Return all events of a request."""

    async def run() -> list[Event]:
        events, ended = [], asyncio.Event()

        def notify(event: Event) -> None:
            events.append(event)
            if event.finish_reason:
                ended.set()

        made(fleet).submit(request, notify)
        await asyncio.wait_for(ended.wait(), 20)
        return events

    return asyncio.run(run())


def told(events: list[Event]) -> tuple[tuple[int, ...], str]:
    tokens = tuple(token for event in events for token in event.tokens)
    return tokens, "".join(event.text or "" for event in events)


def test_replicas_take_turns(engines):
    fleet = LocalFleet(engines)
    client = TestClient(make_app(made(fleet), name="tiny"))
    for _ in range(4):
        body = {"prompt": "on", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert [index for index, _ in fleet.asked] == [0, 1, 0, 1]


@pytest.mark.parametrize("pieces", range(5))
def test_an_answer_goes_on_at_another_replica(engines, pieces):
    request = EngineRequest((5, 6), 9, stop=("e e",))
    whole = answered(LocalFleet(engines), request)
    fleet = LocalFleet(engines, dying={0: pieces})
    assert told(answered(fleet, request)) == told(whole)
    (first, asked), (second, rest) = fleet.asked
    assert (first, second) == (0, 1)
    assert (asked.generated, rest.generated) == ((), told(whole[:pieces])[0])


def test_a_client_sees_one_stream(engines):
    client = TestClient(make_app(made(LocalFleet(engines, dying={0: 2})), name="tiny"))
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == ANSWER


def test_a_request_does_not_take_all_replicas_with_it(engines):
    fleet = LocalFleet(engines, dying={0: 1, 1: 1})
    last = answered(fleet, EngineRequest((5, 6), 20))[-1]
    assert last.finish_reason == "error"
    assert last.error == f"the request lost {MAX_LOST} replicas"
    assert len(fleet.asked) == MAX_LOST


def test_an_engine_that_ends_is_a_replica_lost(engines):
    engines[0].close(drain=False, timeout=0)
    fleet = LocalFleet(engines)
    assert answered(fleet, EngineRequest((5, 6), 3))[-1].finish_reason == "length"
    assert [index for index, _ in fleet.asked] == [0, 1]


def test_what_a_replica_refuses_ends_the_request(engines):
    engines[0].max_model_len = 4
    (last,) = answered(LocalFleet(engines), EngineRequest((5, 6), 20))
    assert (last.finish_reason, last.error) == ("error", "more than 4 tokens")


def test_who_gives_up_gives_up_at_the_replica(engines):
    async def run() -> list[Event]:
        events, begun, ended = [], asyncio.Event(), asyncio.Event()

        def notify(event: Event) -> None:
            events.append(event)
            (ended if event.finish_reason else begun).set()

        hanging = tuple(engines[0].model.tokenizer.encode("on?").ids)
        passage = made(LocalFleet(engines)).submit(EngineRequest(hanging, 9), notify)
        await asyncio.wait_for(begun.wait(), 20)
        passage.cancel()
        await asyncio.wait_for(ended.wait(), 20)
        return events

    assert asyncio.run(run())[-1] == Event(finish_reason="cancelled")
    assert engines[0].tickets[0].cancelled.is_set()


def test_more_tokens_than_the_model_has_positions_for_are_refused(tmp_path):
    TinyModel(LLAMA).write(tmp_path / "tiny")
    settings = ReplicaSettings(str(tmp_path / "tiny"), "tiny", engine={"max_model_len": 257})
    with pytest.raises(PromptError, match="max_model_len=257 must be at most 256, the model's positions"):
        settings.text_side()


def test_what_cannot_be_served_is_refused_at_the_front(engines):
    asked = made(LocalFleet(engines), room=1)

    async def run() -> None:
        with pytest.raises(PromptError, match="exceed max_model_len=200"):
            asked.submit(EngineRequest((5,), 200), lambda event: None)
        hanging = tuple(engines[0].model.tokenizer.encode("on?").ids)
        asked.submit(EngineRequest(hanging, 9), lambda event: None)
        with pytest.raises(Busy, match=r"the queue is full \(1 running or waiting requests\)"):
            asked.submit(EngineRequest((5,), 2), lambda event: None)
        closer = threading.Thread(target=asked.close, kwargs={"drain": False, "timeout": 0})
        closer.start()
        while not asked.closing:
            await asyncio.sleep(0.01)
        with pytest.raises(Closing):
            asked.submit(EngineRequest((5,), 2), lambda event: None)
        closer.join()

    asyncio.run(run())


def test_stats_are_sums_and_the_cache_is_used_on_average(engines):
    assert made(LocalFleet(engines)).stats() == EngineStats(0, 8, 0.5, 120, 140, 160, 180, 200, 220)
