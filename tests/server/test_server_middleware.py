"""Request ids, access lines and internal errors, around the routes."""

import logging
import re

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.middleware import wrap

PROMPT = {"prompt": "on", "max_tokens": 2}


def make_client(engine: FakeEngine, *, api_keys: tuple[str, ...] = (), **settings: object) -> TestClient:
    app = wrap(make_app(engine, name="tiny", api_keys=api_keys), HttpSettings(**settings))
    return TestClient(app, raise_server_exceptions=False)


def test_ids_of_clients_come_back_and_reach_the_engine():
    engine = FakeEngine()
    client = make_client(engine)
    answer = client.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    client.post("/v1/completions", json=PROMPT | {"n": 2}, headers={"X-Request-Id": "mine-2"})
    assert [request.id for request in engine.submitted] == ["mine-1", "mine-2-0", "mine-2-1"]


@pytest.mark.parametrize("sent", [None, "", "two words", "é".encode("latin-1"), "x" * 129, "a\tb"])
def test_other_requests_get_an_id_of_their_own(sent):
    headers = {} if sent is None else {"X-Request-Id": sent}
    client = make_client(FakeEngine())
    ids = [client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in ids)
    assert ids[0] != ids[1]


def test_refused_and_failed_requests_have_ids_and_may_be_read_by_allowed_pages(caplog):
    engine = FakeEngine()
    engine.submit = lambda request, notify: 1 / 0
    client = make_client(engine, api_keys=("key",), allowed_origins=("*",))
    with caplog.at_level(logging.INFO, "zdc_jax.server"):
        for key, status in (("wrong", 401), ("key", 500)):
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": key, "Origin": "https://a.example"}
            answer = client.post("/v1/completions", json=PROMPT, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, key)
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            line = rf"testclient:50000 POST /v1/completions: {status} in \d+\.\d{{3}} s, request {key}"
            assert re.fullmatch(line, caplog.messages[-1])


def test_paths_cannot_forge_lines_and_queries_stay_secret(caplog):
    with caplog.at_level(logging.INFO, "zdc_jax.server"):
        make_client(FakeEngine()).get("/a%0Ab?key=secret")
    (line,) = caplog.messages
    assert " GET /a%0Ab: 404 in " in line
    assert "secret" not in line


def test_lines_can_be_left_out(caplog):
    with caplog.at_level(logging.INFO, "zdc_jax.server"):
        answer = make_client(FakeEngine(), access_log=False).get("/health")
    assert "x-request-id" in answer.headers
    assert caplog.messages == []


def test_a_proxy_may_strip_the_root_path_or_not():
    client = make_client(FakeEngine(), root_path="/llm")
    for path in ("/v1/models", "/llm/v1/models", "/", "/llm/", "/llm"):
        assert client.get(path).status_code == 200
    for path in ("/llm/llm/v1/models", "/llmv1/models", "/other/v1/models"):
        assert client.get(path).status_code == 404
