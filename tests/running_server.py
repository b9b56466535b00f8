"""A server in a thread of the tests, with a fake engine."""

import threading
import time
from collections.abc import Callable, Sequence

import httpx
import pytest
from fake_engine import FakeEngine

from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.run import Server


class Running:
    """A server in a thread."""

    def __init__(
        self,
        settings: HttpSettings,
        engine: FakeEngine | None = None,
        *,
        name: str = "tiny",
        api_keys: Sequence[str] = ("key",),
        **client: object,
    ):
        self.engine = engine or FakeEngine()
        app = make_app(self.engine, name=name, api_keys=api_keys)
        self.server = Server(app, self.engine, name, settings, drain_seconds=20)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started)
        address = "http://socket" if settings.uds else self.server.address
        headers = {"Authorization": "Bearer key"}
        self.http = httpx.Client(base_url=address, headers=headers, timeout=20, **client)

    def end(self) -> None:
        """Stop the server and wait until all is closed."""
        self.server.should_exit = True
        self.thread.join(20)
        self.http.close()
        assert not self.thread.is_alive()


def until(happened: Callable[[], bool]) -> None:
    """Wait for a condition, but not forever."""
    for _ in range(1000):
        if happened():
            return
        time.sleep(0.01)
    pytest.fail("nothing happened")
