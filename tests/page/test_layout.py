"""How the page stands on a phone and on a wide screen, in both themes, below a proxy's path, and without a mouse."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.page.chat_page import KEY, open_page
from tests.page.test_answers import RICH
from tests.server.running import RunningServer

LONG = (
    RICH
    + "\n\n"
    + "unbroken" * 60
    + "\n\n```\n"
    + "code " * 80
    + "\n```\n\n|"
    + " wide cell |" * 20
    + "\n|"
    + "-|" * 20
    + "\n"
)
CONTRAST = """() => {
    const style = getComputedStyle(document.documentElement);
    const canvas = document.createElement("canvas").getContext("2d");
    const light = (name) => {
        canvas.fillStyle = style.getPropertyValue(name);
        const part = (at) => parseInt(canvas.fillStyle.slice(at, at + 2), 16) / 255;
        const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        return 0.2126 * linear(part(1)) + 0.7152 * linear(part(3)) + 0.0722 * linear(part(5));
    };
    const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const pairs = [["--ink", "--ground"], ["--muted", "--ground"], ["--muted", "--sunken"], ["--faint", "--ground"],
        ["--accent", "--ground"], ["--accent-ink", "--accent"], ["--ink", "--accent-soft"], ["--bad", "--bad-soft"],
        ["--good", "--good-soft"], ["--warn", "--warn-soft"]];
    return pairs.filter(([text, ground]) => ratio(light(text), light(ground)) < 4.5).map((pair) => pair.join(" on "));
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, summary")].filter((one) =>
    !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length)).map((one) => one.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(
    browser: Any, keyed: RunningServer, tmp_path: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 844}
    with open_page(browser, keyed.url, key=KEY, viewport=size, color_scheme=scheme) as chat:
        chat.script(LONG)
        chat.ask("What " + "long" * 100)
        for label in ("Conversations", "Parameters"):
            chat.press(label)
            overflow = chat.page.evaluate(
                "[document.documentElement.scrollWidth, document.querySelector('.scroller').scrollWidth - "
                "document.querySelector('.scroller').clientWidth]"
            )
            assert overflow == [width, 0]
            chat.page.screenshot(path=tmp_path / f"{label}.png")
            if width < 700:  # a drawer, which Esc closes
                chat.page.keyboard.press("Escape")
                assert not chat.page.locator(".chat-sidebar").is_visible()
        assert chat.page.evaluate(CONTRAST) == [] and chat.page.evaluate(NAMELESS) == []


def test_theme_is_chosen_and_kept(browser: Any, keyed: RunningServer) -> None:
    with open_page(browser, keyed.url, key=KEY, color_scheme="light") as chat:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = chat.page.evaluate(ground)
        chat.press("Theme: auto. Change to light")
        chat.press("Theme: light. Change to dark")
        dark = chat.page.evaluate(ground)
        chat.page.reload()
        chat.page.wait_for_selector(".composer-field")
        assert chat.page.evaluate(ground) == dark != light


def test_page_works_below_a_path(browser: Any, keyed: RunningServer) -> None:
    """As a proxy that strips `/llm` serves it."""
    context = browser.new_context()
    try:
        asked: list[str] = []

        def strip(route: Any) -> None:
            asked.append(re.sub(r"^https?://[^/]+", "", route.request.url))
            with suppress(Exception):  # the page may be closed meanwhile
                route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/")))

        context.route("**/*", strip)
        context.add_init_script(f"sessionStorage.setItem('penstock.apiKey', '{KEY}')")
        page = context.new_page()
        page.goto(f"{keyed.url}/llm/")
        page.wait_for_selector(".welcome h1")
        assert "smollm2" in page.locator(".welcome").inner_text()
        assert {"/llm/v1/models", "/llm/page/app.js"} <= set(asked) and all(url.startswith("/llm/") for url in asked)
    finally:
        context.close()


def test_chat_is_worked_with_the_keyboard_alone(browser: Any, keyed: RunningServer) -> None:
    with open_page(browser, keyed.url, key=KEY) as chat:
        chat.script("One.", "Two.")
        press = chat.page.keyboard.press
        chat.page.keyboard.type("first line")
        press("Shift+Enter")
        chat.page.keyboard.type("second")
        press("Enter")
        chat.wait_end()
        assert chat.bodies[0]["messages"][-1]["content"] == "first line\nsecond"
        chat.page.locator("button[aria-label='Answer again, as a new branch']").focus()
        press("Enter")
        chat.wait("document.querySelector('.turn span')?.textContent === '2 / 2'")
        chat.wait_end()
        chat.page.locator(".brand").focus()
        press("?")
        assert "Stop the answer" in chat.page.locator("dialog[open]").inner_text()
        press("Escape")
        chat.wait("!document.querySelector('dialog')")
        press("/")
        assert chat.page.evaluate("document.activeElement.className") == "composer-field"
