"""A tab of the browser for views that follow the server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.page.chat_page import WATCH


class LiveTab:
    """`run` evaluates JavaScript in a page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []  # exceptions, and errors of the console: failed requests, and the policy's

    def open(self, url: str, **keys: str) -> None:
        """Load a page anew, with these keys: `api` or `admin`."""
        self.page.goto("about:blank")
        items = {f"penstock.{kind}Key": key for kind, key in keys.items()}
        script = "for (const [name, value] of Object.entries({})) sessionStorage.setItem(name, value);"
        self.page.context.add_init_script(
            f"if (location.protocol === 'http:') {{ {script.format(json.dumps(items))} }}"
        )
        self.page.goto(url)

    def run(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not become true; the page says: {self.text()[:3000]}"
            self.page.wait_for_timeout(50)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()

    def resize(self, width: int, height: int) -> None:
        self.page.set_viewport_size({"width": width, "height": height})

    def take_screenshot(self, path: Path) -> None:
        self.page.screenshot(path=str(path))


@contextmanager
def open_tab(browser: Any) -> Iterator[LiveTab]:
    """Open a tab in a context of its own; fail at its end if the browser had anything to say against the page."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.add_init_script(WATCH)
    try:
        tab = LiveTab(context.new_page())
        tab.page.on("pageerror", lambda error: tab.complaints.append(f"script: {error}"))
        tab.page.on("console", lambda said: tab.complaints.extend([said.text] if said.type == "error" else []))
        yield tab
        assert tab.complaints + tab.run("window.trouble") == []
    finally:
        context.close()
