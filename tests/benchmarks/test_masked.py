"""Throughput with masks: which requests have one, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from running_server import Running

from benchmarks.serving import masked
from benchmarks.serving.client import MODEL
from benchmarks.serving.loads import parse_loop
from benchmarks.serving.masked import Options, main, measure
from benchmarks.serving.systems import ServerFailed
from zdc_jax.generation.grammar import Grammar
from zdc_jax.server.http_settings import HttpSettings

LOAD = parse_loop("8/5@4x1")


@pytest.fixture
def server():
    """Serve a fake engine with our server."""
    running = Running(HttpSettings(port=0), name=MODEL, api_keys=())
    yield running
    running.end()


def test_some_requests_have_a_grammar(server):
    speed = measure(server.http.base_url.port, LOAD, masked=3, grammar="regex", vocab_size=90, salt="a")
    assert speed > 0
    grammars = [request.sampling.grammar for request in server.engine.submitted]
    assert sorted(map(bool, grammars)) == [False, True, True, True]
    assert set(grammars) == {None, Grammar.regex(*masked.GRAMMARS["regex"].values())}


def test_a_failed_request_has_no_speed(server):
    long = replace(LOAD, requests=[replace(LOAD.requests[0], prompt=500)])
    with pytest.raises(ServerFailed, match=r"a request failed: .*200 tokens"):
        measure(server.http.base_url.port, long, masked=1, grammar="json", vocab_size=90, salt="a")


@pytest.mark.parametrize("count", [0, 33])
def test_the_number_of_masks_is_checked_first(count):
    with pytest.raises(SystemExit, match=rf"--masked {count}: must be 1 to 32, the clients of --load"):
        main(Options(Path("missing"), masked=count))
