"""The page to talk to the model: how it is served, and what it does in Chromium."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from browser import Browser, find_chromium
from fake_engine import ANSWER, CACHED, FakeEngine
from running_server import Running, until
from starlette.testclient import TestClient
from tiny_tokenizers import chat_tokenizer

from zdc_jax.conversation.prompt import chat_prompt
from zdc_jax.engine.request import Event
from zdc_jax.server.app import make_app
from zdc_jax.server.http_settings import HttpSettings

LENGTH = len(chat_tokenizer().encode(ANSWER).ids) + 1
"""Tokens of an answer, with the token that ends it."""
MARKUP = "<img src=x onerror=\"document.title='broken'\"> & <b>bold</b>"


class Elements(HTMLParser):
    """Elements of a page with their attributes, and contents of its scripts and styles."""

    def __init__(self, html: str):
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.contents: dict[str, str] = {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes

    def handle_data(self, data):
        if self.cdata_elem:
            self.contents[self.cdata_elem] = self.contents.get(self.cdata_elem, "") + data


def test_the_page_needs_no_key_and_allows_nothing_but_itself():
    answer = TestClient(make_app(FakeEngine(), name="tiny", api_keys=["key"])).get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    elements = Elements(answer.text)
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        digest = b64encode(sha256(elements.contents[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_the_page_loads_nothing_and_makes_no_markup_of_text():
    html = TestClient(make_app(FakeEngine(), name="tiny")).get("/").text
    assert "//" not in re.sub(r"//( .*)$", "", html, flags=re.MULTILINE)  # Only comments have slashes.
    urls = [value for name, value in Elements(html).attributes if name in ("src", "href", "action")]
    assert urls == ["data:,"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(", html)
    assert not [name for name, _ in Elements(html).attributes if name.startswith("on") or name == "style"]


class ScriptedEngine(FakeEngine):
    """A fake engine that answers a question about markup with markup, and hangs after a question mark."""

    def _spell(self, request, ticket, notify):
        asked = self.model.tokenizer.decode(request.prompt)
        if "?" in asked:
            notify(Event((5,), text="half"))
            assert ticket.cancelled.wait(20)
            return Event(finish_reason="cancelled")
        if "!" in asked:
            return Event((5,), text=MARKUP, finish_reason="stop", cached_tokens=CACHED)
        return super()._spell(request, ticket, notify)


@pytest.fixture
def browser(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("Chromium is absent: put it on the path, or into ZDC_CHROMIUM")
    with Browser(program, tmp_path) as browser:
        yield browser


def send(browser: Browser, text: str) -> None:
    """Send a message as a user does, with the button."""
    browser.evaluate(f"find('message').value = {text!r}; find('send').click()")


def last(browser: Browser, part: str) -> str:
    return browser.evaluate(f"[...document.querySelectorAll('.assistant .{part}')].at(-1).textContent")


def test_the_page_in_a_browser(browser):
    running = Running(HttpSettings(port=0, root_path="/llm"), ScriptedEngine())
    try:
        browser.open(running.server.address + "/llm")
        send(browser, "in the")
        browser.wait_for("document.querySelector('.error') !== null")
        assert "the API key is missing or wrong" in last(browser, "note")
        assert browser.evaluate("document.activeElement.id") == "key"
        refused, browser.complaints[:] = list(browser.complaints), []
        assert all("401" in str(complaint) for complaint in refused)

        browser.evaluate("find('key').value = 'key'; find('key').dispatchEvent(new Event('change'))")
        browser.wait_for("document.title === 'tiny'")
        browser.evaluate("find('system').value = 'be'")
        send(browser, "in the")
        browser.wait_for("!find('send').disabled")
        assert last(browser, "text") == ANSWER
        first = [{"role": "system", "content": "be"}, {"role": "user", "content": "in the"}]
        prompt = chat_prompt(running.engine.model, first)
        assert list(running.engine.submitted[-1].prompt) == prompt
        counts = rf"{CACHED} of {len(prompt)} prompt tokens cached, {LENGTH} tokens"
        assert re.fullmatch(rf"{counts}, [\d.]+ tokens/s, first after [\d.]+ s", last(browser, "note"))

        send(browser, "is it?")
        browser.wait_for("[...document.querySelectorAll('.text')].at(-1).textContent === 'half'")
        assert not running.engine.tickets[-1].cancelled.is_set()
        browser.evaluate("find('stop').click()")
        until(running.engine.tickets[-1].cancelled.is_set)
        browser.wait_for("!find('send').disabled")
        assert last(browser, "note") == "stopped"

        browser.evaluate("find('restart').click()")
        send(browser, MARKUP + "!")
        browser.wait_for("!find('send').disabled")
        assert last(browser, "text") == MARKUP
        assert browser.evaluate("document.querySelector('.user .text').textContent") == MARKUP + "!"
        assert browser.evaluate("document.querySelectorAll('#log img, #log b').length") == 0
        assert browser.evaluate("document.title") == "tiny"
        assert browser.complaints == []
    finally:
        running.end()
