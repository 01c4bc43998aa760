"""The chat as a user works it, and answers made up for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

KEY, ADMIN = "page-key", "page-admin"
COMPLETIONS = "**/v1/chat/completions"
WATCH = """
window.trouble = [];
document.addEventListener("securitypolicyviolation", (event) => trouble.push(`policy: ${event.violatedDirective}`));
"""


class ChatPage:
    def __init__(self, page: Any, trouble: list[str]) -> None:
        self.page, self.trouble = page, trouble
        self.bodies: list[dict[str, Any]] = []  # of requests that were answered by `script`

    def send(self, text: str) -> None:
        self.page.fill(".composer-field", text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Send a message and wait for the whole answer."""
        before = self.page.locator(".message.user").count()
        self.send(text)
        self.wait(f"document.querySelectorAll('.message.user').length > {before}")
        return self.wait_end()

    def wait_end(self) -> str:
        self.page.wait_for_selector(".message:last-child .answer[aria-busy=false]")
        return self.text

    def wait(self, expression: str, timeout_s: float = 20.0) -> None:
        """Until a JavaScript expression is true; the page's policy forbids playwright's own way."""
        end = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"it never came true: {expression}"
            self.page.wait_for_timeout(20)

    def wait_text(self, num_chars: int = 1) -> None:
        """Until the last answer has text."""
        self.wait(
            f"document.querySelector('.message:last-child .answer > .markdown')?.textContent.length >= {num_chars}"
        )

    def press(self, label: str) -> None:
        """Press the last button with that label."""
        self.page.locator(f"button[aria-label={json.dumps(label)}]").last.click()

    def press_retry(self, label: str) -> None:
        """Press a button under a failed answer, and wait for the end of the next."""
        button = self.page.locator(".message:last-child .retry").get_by_role("button", name=label)
        button.evaluate("(element) => { element.dataset.old = 1; element.click(); }")
        self.wait("!document.querySelector('[data-old]')")
        self.wait_end()

    @property
    def text(self) -> str:
        """The last answer's text."""
        return str(self.page.locator(".message:last-child .answer > .markdown").inner_text())

    @property
    def figures(self) -> list[str]:
        return list(self.page.locator(".message:last-child .figures li").all_inner_texts())

    def set_parameter(self, label: str, value: str) -> None:
        """Set a field of the panel, which is opened."""
        if not self.page.locator(".chat-panel").is_visible():
            self.press("Parameters")
        self.page.evaluate("document.querySelectorAll('.group').forEach((group) => { group.open = true; })")
        field = self.page.get_by_label(label, exact=True)
        if field.evaluate("(element) => element.tagName") == "SELECT":
            field.select_option(value)
        elif field.get_attribute("type") == "checkbox":
            field.set_checked(value == "true")
        else:
            field.fill(value)
            field.blur()

    def script(self, *answers: Sequence[dict[str, Any]] | str) -> None:
        """Answer the next requests with these deltas in place of the server; text is one delta of content."""
        left = list(answers)

        def fulfil(route: Any) -> None:
            self.bodies.append(route.request.post_data_json)
            answer = left.pop(0)
            deltas = [{"delta": {"content": answer}}] if isinstance(answer, str) else answer
            route.fulfill(content_type="text/event-stream", body=encode(deltas))

        self.page.unroute(COMPLETIONS)
        self.page.route(COMPLETIONS, fulfil)


def encode(choices: Sequence[dict[str, Any]], finish: str = "stop") -> str:
    """Write a stream: each choice is one chunk, then the end and the usage."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "finish_reason": None, **one}]} for one in choices]
    if not any(one.get("finish_reason") for one in choices):
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 20, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 16}}
    timings = {"predicted_per_second": 50.0, "queue_ms": 1.0, "prompt_ms": 2.0, "draft_n": 6, "draft_n_accepted": 5}
    chunks.append({"choices": [], "usage": usage, "timings": timings})
    return "".join(f"data: {json.dumps({'id': 'chatcmpl-1', **one})}\n\n" for one in chunks) + "data: [DONE]\n\n"


@contextmanager
def open_page(browser: Any, url: str, *, key: str | None = None, **options: Any) -> Iterator[ChatPage]:
    """Open the page in a context of its own; fail at its end if the browser had anything to say against it."""
    trouble: list[str] = []
    options = {"viewport": {"width": 1280, "height": 800}, **options}
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    context.add_init_script(WATCH)
    if key is not None:
        context.add_init_script(f"sessionStorage.setItem('penstock.apiKey', {json.dumps(key)})")
    try:
        page = context.new_page()
        page.on("pageerror", lambda error: trouble.append(f"script: {error}"))

        def refuse(dialog: Any) -> None:
            trouble.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("dialog", refuse)
        page.goto(url)
        page.wait_for_selector(".composer-field, dialog[open]")
        made = ChatPage(page, trouble)
        yield made
        assert trouble + page.evaluate("window.trouble") == []
    finally:
        context.close()
