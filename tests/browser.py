"""Headless Chromium, driven through the pipe of its DevTools protocol."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
START = """
import fcntl, os, sys
inputs, outputs, *command = sys.argv[1:]
# Both are copied away first, as one of them may be 3 or 4 already.
copies = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in (inputs, outputs)]
for number, copy in zip((3, 4), copies):
    os.dup2(copy, number)
os.execv(command[0], command)
"""
"""Program that starts Chromium, which reads commands from file 3 and writes answers to file 4."""
SECONDS = 20
"""Longest wait for anything."""


def find_chromium() -> str | None:
    """Return the program in `ZDC_CHROMIUM` or on the path, or None."""
    return os.environ.get("ZDC_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page."""

    def __init__(self, program: str, folder: Path):
        """Start the browser.

        program: path of Chromium.
        folder: folder for its profile.
        """
        inputs, commands = os.pipe()
        answers, outputs = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                START,
                str(inputs),
                str(outputs),
                program,
                *flags,
                f"--user-data-dir={folder}",
            ],
            pass_fds=(inputs, outputs),
            stderr=subprocess.DEVNULL,
        )
        os.close(inputs)
        os.close(outputs)
        self._commands, self._answers = open(commands, "wb"), open(answers, "rb")  # noqa: SIM115
        self._ids, self._rest = itertools.count(1), b""
        self._session: dict[str, str] = {}
        self.complaints: list[Any] = []

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        command = {"id": number, "method": method, "params": params} | self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while (message := self._read()).get("id") != number:
            if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(message["params"])
        assert "error" not in message, message["error"]
        return message["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < until, (
                f"{expression}: never true; {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._answers.fileno(), 2**16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
