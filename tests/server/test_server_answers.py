"""The way of events from the engine's threads to the event loop."""

from functools import partial

from zdc_jax.server.answers import Relay


class Loop:
    """Event loop that remembers what it shall run; None means that it is closed."""

    def __init__(self):
        self.woken = []

    def call_soon_threadsafe(self, call):
        if self.woken is None:
            raise RuntimeError("Event loop is closed")
        self.woken.append(call)

    def turn(self):
        calls, self.woken = self.woken, []
        for call in calls:
            call()


def test_the_loop_is_woken_once_for_calls_that_wait():
    relay, loop, done = Relay(), Loop(), []
    for step in range(3):
        for token in range(64):
            relay.pass_to(loop, partial(done.append, (step, token)))
        assert len(loop.woken) == 1
        loop.turn()
    assert done == [(step, token) for step in range(3) for token in range(64)]


def test_a_call_that_comes_while_others_run_is_not_lost():
    relay, loop, done = Relay(), Loop(), []
    relay.pass_to(loop, lambda: relay.pass_to(loop, partial(done.append, "second")))
    loop.turn()
    loop.turn()
    assert done == ["second"]


def test_a_closed_loop_does_not_disturb_the_engine():
    relay, loop = Relay(), Loop()
    loop.woken = None
    relay.pass_to(loop, print)
