"""Events on their way from an engine's thread to the event loop of a server."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar
from weakref import WeakKeyDictionary

from zdc_jax.engine.request import Event

logger = logging.getLogger("zdc_jax")

Receive = Callable[[Event], None]


class Mailbox:
    """Events for one event loop, which is woken once for all that wait.

    To wake a loop is a system call, in which the calling thread hands Python's lock to the loop's thread. An
    engine that woke it for each event would wait for the lock as often, while its device has nothing to do.
    """

    _all: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "Mailbox"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._waiting: deque[tuple[Receive, Event]] = deque()
        self._woken = False

    @classmethod
    def of_running_loop(cls) -> "Mailbox":
        """Return the mailbox of the running event loop."""
        return cls._all.setdefault(asyncio.get_running_loop(), cls())

    def put(self, loop: asyncio.AbstractEventLoop, receive: Receive, event: Event) -> None:
        """Let the loop call `receive(event)` soon, after all earlier ones; call it from any thread."""
        self._waiting.append((receive, event))
        if not self._woken:
            self._woken = True
            # The loop may be closed already; the engine's thread must not fail then.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        """Pass on all events that wait."""
        self._woken = False  # What comes from now on wakes the loop again, at worst for nothing.
        while self._waiting:
            receive, event = self._waiting.popleft()
            try:
                receive(event)
            except Exception:
                logger.exception("an event was lost")
