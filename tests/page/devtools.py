"""Chromium without a window, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-extensions --hide-scrollbars
""".split()
NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 30.0
BAD_LEVELS = ("error",)


def find_chromium() -> str:
    """Return the browser's path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    return found


class BrowserTab:
    """One tab. `run` evaluates JavaScript in it."""

    def __init__(self, folder: Path) -> None:
        self._command = [find_chromium(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self.complaints: list[str] = []  # exceptions, errors of the console and of the policy

    def __enter__(self) -> BrowserTab:
        our_read, their_write = os.pipe()
        their_read, our_write = os.pipe()
        script = f'exec "$@" 3<&{their_read} 4>&{their_write}'  # the descriptors that the protocol names
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *self._command],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._write, self._read = our_write, os.fdopen(our_read, "rb")
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(1400, 900)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        self._reader.join(10)

    def _listen(self) -> None:
        left = b""
        with self._read:
            while some := self._read.read1(1 << 16):
                *messages, left = (left + some).split(b"\0")
                with self._news:
                    for message in messages:
                        self._take(json.loads(message))
                    self._news.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
        elif message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            self._take_entry(message["params"]["entry"])
        elif message["method"] == "Runtime.consoleAPICalled" and message["params"]["type"] in BAD_LEVELS:
            self.complaints.append(json.dumps(message["params"]["args"]))

    def _take_entry(self, entry: dict[str, Any]) -> None:
        is_ours = not entry.get("url", "").endswith("/favicon.ico")  # the browser's own idea
        if entry["level"] in BAD_LEVELS and is_ours:
            self.complaints.append(entry["text"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._write, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, ANSWER_S), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, expression: str) -> Any:
        """Evaluate an expression, or the promise it makes; its value."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str, **session_items: str) -> None:
        """Load a page anew, with these items in its session storage."""
        self._go(f"{url.partition('/#')[0]}/page/icon.svg")  # of the same origin, and without a script
        for name, value in session_items.items():
            self.run(f"sessionStorage.setItem({json.dumps(name)}, {json.dumps(value)})")
        self._go(url)

    def _go(self, url: str) -> None:
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not become true; the page says: {self.text()[:3000]}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def resize(self, width: int, height: int) -> None:
        more = {"deviceScaleFactor": 1, "mobile": width < 640}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, **more)

    def take_screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
