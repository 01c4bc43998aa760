"""A server with keys and a browser for the tests of a module. Without Chromium they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.page.chat_page import ADMIN, KEY, ChatPage, open_page
from tests.server.running import RunningServer

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
MISSING = "no browser: install Debian's chromium (apt-get install chromium) to test the page"


@pytest.fixture(scope="session")
def chromium() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip(MISSING)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[object]:
    """One browser per module: while it is open, this thread has an event loop that runs."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make install")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS.split())
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def keyed(chromium: str) -> Iterator[RunningServer]:
    """The default model behind a key."""
    with RunningServer("smollm2", "--max-model-len", "2048", "--api-key", KEY, "--admin-key", ADMIN) as running:
        yield running


@pytest.fixture
def chat(browser, keyed: RunningServer) -> Iterator[ChatPage]:
    """An empty chat, with the key entered. Nothing may break the policy, fail in a script or open a dialog."""
    with open_page(browser, keyed.url, key=KEY) as page:
        yield page
