"""Events reach the event loop in order, with few calls that wake it, and without disturbing each other."""

import asyncio
import threading

from zdc_jax.engine.request import Event
from zdc_jax.server.mailbox import Mailbox


def events(count: int) -> list[Event]:
    return [Event(tokens=(index,)) for index in range(count)]


def test_events_of_several_threads_arrive_in_order():
    async def collect() -> list[list[Event]]:
        loop, mailbox = asyncio.get_running_loop(), Mailbox.of_running_loop()
        assert mailbox is Mailbox.of_running_loop()
        found: list[list[Event]] = [[] for _ in range(4)]

        def send(into: list[Event]) -> None:
            for event in events(500):
                mailbox.put(loop, into.append, event)

        threads = [threading.Thread(target=send, args=(into,)) for into in found]
        for thread in threads:
            thread.start()
        while any(len(into) < 500 for into in found):
            await asyncio.sleep(0)
        return found

    assert asyncio.run(asyncio.wait_for(collect(), 20)) == [events(500)] * 4


def test_the_loop_is_woken_once_for_all_events_that_wait(monkeypatch):
    async def collect() -> tuple[int, list[Event]]:
        loop, mailbox = asyncio.get_running_loop(), Mailbox.of_running_loop()
        woken, wake, found = [], loop.call_soon_threadsafe, list[Event]()
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: (woken.append(call), wake(call)))
        for _ in range(3):
            for event in events(20):
                mailbox.put(loop, found.append, event)
            await asyncio.sleep(0)
        return len(woken), found

    assert asyncio.run(collect()) == (3, events(20) * 3)


def test_a_failure_loses_its_event_alone(caplog):
    async def collect() -> list[Event]:
        loop, mailbox, found = asyncio.get_running_loop(), Mailbox.of_running_loop(), list[Event]()

        def fail(event: Event) -> None:
            raise ValueError(event)

        for event, receive in zip(events(3), (found.append, fail, found.append), strict=True):
            mailbox.put(loop, receive, event)
        await asyncio.sleep(0)
        return found

    first, _, last = events(3)
    assert asyncio.run(collect()) == [first, last]
    assert "an event was lost" in caplog.text


def test_a_closed_loop_takes_no_events():
    loop = asyncio.new_event_loop()
    loop.close()
    found: list[Event] = []
    Mailbox().put(loop, found.append, Event())
    assert not found
