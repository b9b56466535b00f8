import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine import ANSWER
from running_server import Running, until

from zdc_jax.errors import PromptError
from zdc_jax.server.http_settings import HttpSettings

HELLO = [{"role": "user", "content": "hello"}]
HANGING = {"prompt": "on?"}
TESTS = Path(__file__).parents[1]
CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""Certificate that signs itself, and its key. It is valid until 2120."""


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(HttpSettings(port=0, keep_alive=0.2, allowed_origins=("https://chat.example",)))
    yield running
    running.end()


def test_the_client_of_openai(running):
    with openai.OpenAI(base_url=f"{running.server.address}/v1", api_key="key", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        completion = client.completions.create(model="tiny", prompt="on", max_tokens=1, logprobs=1)
        assert completion.choices[0].text == "in"
        assert completion.choices[0].logprobs.token_logprobs == [-0.5]
        chat = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == ANSWER
        assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "in"
        stream = client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert last.usage.prompt_tokens_details.cached_tokens > 0
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="on", presence_penalty=3)
        assert refused.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="on")
        with pytest.raises(openai.APIError, match="the device is lost"):
            list(client.completions.create(model="tiny", prompt="on!", stream=True))
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_a_client_that_goes_amid_a_stream(running):
    asked = HANGING | {"stream": True, "n": 2}
    with running.http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert not any(ticket.cancelled.is_set() for ticket in running.engine.tickets)
    until(lambda: [ticket.cancelled.is_set() for ticket in running.engine.tickets] == [True, True])


def test_a_client_that_does_not_wait_for_its_answer(running, caplog):
    caplog.set_level(logging.INFO, "zdc_jax.server")
    connection = HTTPConnection(*running.server.servers[0].sockets[0].getsockname())
    headers = {"Authorization": "Bearer key"}
    connection.request("POST", "/v1/completions", json.dumps(HANGING), headers)
    until(lambda: [ticket.cancelled.is_set() for ticket in running.engine.tickets] == [False])
    connection.close()
    until(lambda: [ticket.cancelled.is_set() for ticket in running.engine.tickets] == [True])
    until(lambda: running.engine.stats().running == 0)
    until(lambda: "POST /v1/completions: 499 in" in caplog.text)
    assert running.http.post("/v1/completions", json={"prompt": "on"}).status_code == 200


def test_idle_connections_close_after_the_chosen_time(running):
    address = running.server.servers[0].sockets[0].getsockname()
    with closing(HTTPConnection(*address, timeout=20)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b""
        began = time.monotonic()
        assert connection.sock.recv(1) == b""  # The server has closed it.
        assert 0.1 < time.monotonic() - began < 4


def test_silent_streams_get_comments_that_clients_skip(running, monkeypatch):
    monkeypatch.setattr("zdc_jax.server.keep_alive.SILENCE_SECONDS", 0.05)
    with running.http.stream("POST", "/v1/completions", json=HANGING | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert [next(lines) for _ in range(5)] == ["", ": keep-alive", "", ": keep-alive", ""]
        running.engine.tickets[0].cancel()
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    with openai.OpenAI(base_url=f"{running.server.address}/v1", api_key="key", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="on?", max_tokens=2, stream=True)
        assert next(stream).choices[0].text == "in"
        time.sleep(0.2)
        running.engine.tickets[1].cancel()
        with pytest.raises(openai.APIError, match="the request was cancelled"):
            next(stream)


def test_web_pages_of_allowed_origins_may_read_answers(running):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://chat.example", True), ("https://other.example", False)):
        preflight = running.http.options("/v1/completions", headers=ask | {"Origin": origin})
        assert preflight.is_success == allowed
        refused = running.http.post("/v1/completions", json={}, headers={"Origin": origin})
        for answer in (preflight, refused):
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_https_ends_although_a_client_does_not_confirm_it(monkeypatch):
    monkeypatch.setattr("zdc_jax.server.run.FLUSH_SECONDS", 0.2)
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    running = Running(HttpSettings(port=0, ssl_certfile=CERTIFICATE), verify=trusting)
    try:
        assert running.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert running.server.address.startswith("https://127.0.0.1:")
    finally:
        running.end()


def test_a_unix_domain_socket(tmp_path):
    path = tmp_path / "zdc.sock"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))  # A server that was killed leaves its socket.
    settings = HttpSettings(uds=path)
    settings.check_files_and_address()
    running = Running(settings, transport=httpx.HTTPTransport(uds=str(path)))
    try:
        assert running.http.get("/v1/models").status_code == 200
        assert running.server.address == f"http+unix://{path}"
        with pytest.raises(PromptError, match="another server listens there"):
            settings.check_files_and_address()
    finally:
        running.end()
    assert not path.exists()


def test_the_end_waits_for_requests_and_takes_no_more(running):
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(running.http.post, "/v1/chat/completions", json={"messages": HELLO})
        whole = pool.submit(running.http.post, "/v1/completions", json=HANGING)
        streamed = pool.submit(running.http.post, "/v1/completions", json=HANGING | {"stream": True})
        until(lambda: len(running.engine.tickets) == 3)
        assert ended.result().status_code == 200
        running.server.should_exit = True
        until(lambda: running.http.get("/health").status_code == 503)
        assert running.http.post("/v1/completions", json={"prompt": "on"}).status_code == 503
        assert not any(future.done() for future in (whole, streamed))
        for ticket in running.engine.tickets:
            ticket.cancel()
        assert whole.result().status_code == 503
        error, done = streamed.result().text.split("\n\n")[-3:-1]
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]"


SERVE = """
import logging
from fake_engine import FakeEngine
from zdc_jax.server.http_settings import HttpSettings
from zdc_jax.server.run import serve
logging.basicConfig(level=logging.INFO, force=True)
serve(FakeEngine(), name="tiny", settings=HttpSettings(port=0))
print("ended")
"""


@pytest.mark.full
def test_signals_end_it():
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(stream, text):
        return next(line for line in stream if text in line)

    with start() as first, start() as second:
        addresses = []
        for process in (first, second):
            line = process.stdout.readline()
            assert line.startswith("serving tiny at http://127.0.0.1:")
            addresses.append(line.split()[-1])
            assert httpx.get(addresses[-1] + "/health").status_code == 200
        first.send_signal(signal.SIGTERM)
        asked = HANGING | {"stream": True}
        with httpx.stream("POST", addresses[1] + "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()  # Dropping it would close the connection.
            assert next(lines).startswith("data: ")
            second.send_signal(signal.SIGINT)
            ending = wait_for(second.stderr, "ending: ")
            # One request runs; the fake engine always says that four wait.
            assert "requests that may finish within 30 s: 5; Ctrl-C ends at once\n" in ending
            second.send_signal(signal.SIGINT)
            assert second.wait(8) == -signal.SIGINT
        rest, _ = first.communicate(timeout=20)
        assert (rest, first.returncode) == ("ended\n", 0)
