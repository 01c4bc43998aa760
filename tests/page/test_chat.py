"""The chat on a real model in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx

from tests.page.chat_page import ADMIN, KEY, ChatPage, open_page
from tests.server.running import RunningServer

STORY = "Write a long story about a river."


def test_answer_streams_with_its_figures(chat: ChatPage, keyed: RunningServer) -> None:
    chat.set_parameter("Most tokens", "40")
    chat.set_parameter("Temperature", "0")
    chat.set_parameter("System prompt", "You are a geographer.")
    question = "What is the capital of France?"
    text = chat.ask(question)
    messages = [{"role": "system", "content": "You are a geographer."}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0}
    answer = httpx.post(f"{keyed.url}/v1/chat/completions", json=body, headers={"x-api-key": KEY}).json()
    assert text.split() == answer["choices"][0]["message"]["content"].split()
    shown = " | ".join(chat.figures)
    assert re.search(r"\d+ tokens \| [\d.]+ tokens/s \| first after [\d.]+ m?s \| \d+ of \d+ cached", shown)
    chat.ask("And of Italy?")
    cached = re.search(r"(\d+) of (\d+) cached", " ".join(chat.figures))
    assert cached is not None and int(cached[1]) > 0.4 * int(cached[2]), "the branch so far is a cached prefix"


def test_stop_keeps_what_there_is_and_continue_goes_on(chat: ChatPage) -> None:
    chat.set_parameter("Temperature", "0")
    chat.send(STORY)
    chat.wait_text(10)
    chat.page.keyboard.press("Escape")
    begun = chat.wait_end()
    assert "stopped" in chat.figures and len(begun) >= 10
    chat.set_parameter("Most tokens", "12")
    chat.page.get_by_role("button", name="Continue").click()
    chat.page.wait_for_selector(".message:last-child .figures li")
    assert chat.wait_end().startswith(begun.rstrip()[:-2])


def test_regenerated_and_edited_messages_are_branches(chat: ChatPage) -> None:
    chat.set_parameter("Most tokens", "6")
    chat.set_parameter("Temperature", "1.5")
    first = chat.ask("Say a word about rivers.")
    chat.press("Answer again, as a new branch")
    chat.wait_end()
    turn = chat.page.locator(".message.assistant .turn span")
    assert turn.inner_text() == "2 / 2"
    chat.press("Branch before")
    assert turn.inner_text() == "1 / 2" and chat.text == first
    chat.page.locator(".message.user").hover()
    chat.press("Edit, as a new branch")
    chat.page.fill(".edit-field", "Say a word about lakes.")
    chat.page.keyboard.press("Control+Enter")
    chat.wait_end()
    assert chat.page.locator(".message.user .turn span").inner_text() == "2 / 2"
    assert chat.page.locator(".said").inner_text() == "Say a word about lakes."
    chat.press("Branch before")
    assert chat.page.locator(".said").inner_text() == "Say a word about rivers." and chat.text == first


def test_conversations_are_kept_found_renamed_and_deleted(chat: ChatPage) -> None:
    chat.set_parameter("Most tokens", "4")
    chat.ask("Tell me of the Danube.")
    chat.page.keyboard.press("Alt+n")
    chat.ask("Tell me of the Nile.")
    names = chat.page.locator(".conversation-name")
    chat.page.reload()
    chat.wait("document.querySelectorAll('.conversation-name').length === 2")
    assert names.all_inner_texts() == ["Tell me of the Nile.", "Tell me of the Danube."]
    chat.page.keyboard.press("Control+k")
    chat.page.keyboard.type("danube")
    chat.wait("document.querySelectorAll('.conversation-name').length === 1")
    names.click()
    assert chat.page.locator(".said").inner_text() == "Tell me of the Danube."
    chat.page.locator(".conversation").hover()
    chat.press("Rename Tell me of the Danube.")
    chat.page.get_by_role("textbox", name="Name").fill("A river <b>")
    chat.page.keyboard.press("Enter")
    chat.wait("document.querySelector('.chat-title').textContent === 'A river <b>'")
    chat.press("Delete A river <b>")
    chat.page.get_by_role("button", name="Delete", exact=True).click()
    chat.page.get_by_label("Search conversations").fill("")
    shown = "[...document.querySelectorAll('.conversation-name')].map(one => one.textContent).join()"
    chat.wait(f"{shown} === 'Tell me of the Nile.'")


def test_export_is_imported_as_it_was(chat: ChatPage, tmp_path: Path) -> None:
    chat.set_parameter("Most tokens", "4")
    text = chat.ask("Name a lake.")
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export all").click()
    path = tmp_path / "export.json"
    download.value.save_as(path)
    exported = json.loads(path.read_text())
    assert [node["role"] for node in exported["conversations"][0]["nodes"]] == ["user", "assistant"]
    chat.page.keyboard.press("Alt+n")
    import_file(chat, path)
    chat.wait("document.querySelectorAll('.conversation-name').length === 2")
    assert chat.page.locator(".said").inner_text() == "Name a lake." and chat.text == text


BAD_NODES = {
    "before": {"id": "a", "parent": "b", "role": "user"},
    "role": {"id": "a", "parent": None, "role": "evil"},
    "not text": {"id": "a", "parent": None, "role": "user", "content": {}},
}
BAD_EXPORTS: dict[str, dict[str, object]] = {
    '"format"': {"format": "other"},
    "version is 99": {"version": 99},
    **{told: {"conversations": [{"nodes": [node]}]} for told, node in BAD_NODES.items()},
}


def test_bad_imports_are_refused_in_words(chat: ChatPage, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for told, change in BAD_EXPORTS.items():
        path.write_text(json.dumps({"format": "penstock-conversations", "version": 1, "conversations": [], **change}))
        import_file(chat, path)
        message = chat.page.locator(".toast.error").inner_text()
        assert "cannot be imported" in message and told in message
        chat.press("Dismiss")
    assert chat.page.locator(".conversation").count() == 0


def import_file(chat: ChatPage, path: Path) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Import").click()
    chooser.value.set_files(path)
    chat.page.wait_for_selector(".toast")


def test_full_storage_is_told(chat: ChatPage) -> None:
    chat.page.evaluate("""() => { IDBObjectStore.prototype.put = function () {
        const request = this.get("none");
        request.onsuccess = () => this.transaction.abort();
        Object.defineProperty(this.transaction, "error", { value: new DOMException("full", "QuotaExceededError") });
        return request;
    }; }""")
    chat.script("Kept in the page alone.")
    assert chat.ask("Hello") == "Kept in the page alone."
    assert "storage for this page is full" in chat.page.locator(".toast.error").first.inner_text()


def test_two_tabs_lose_nothing_of_each_other(chat: ChatPage) -> None:
    """Both add to one conversation: the second becomes a branch."""
    chat.script("One.", "Three.")
    chat.ask("First")
    page = chat.page.context.new_page()
    page.goto(chat.page.url)
    other = ChatPage(page, chat.trouble)
    page.locator(".conversation-name").click()
    page.wait_for_selector(".message.assistant")
    other.script("Two.")
    assert other.ask("Second") == "Two."
    assert chat.ask("Third") == "Three."
    chat.wait("document.querySelector('.turn span')?.textContent === '1 / 2'")
    chat.page.reload()
    chat.page.locator(".conversation-name").click()
    chat.page.wait_for_selector(".message.assistant")
    assert chat.page.locator(".said").all_inner_texts() == ["First", "Third"]
    chat.press("Branch after")
    assert chat.page.locator(".said").all_inner_texts() == ["First", "Second"] and chat.text == "Two."


PASTE = """(num) => {
    const data = new DataTransfer();
    data.setData("text/plain", "lorem ipsum ".repeat(num));
    const pasted = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    return document.querySelector(".composer-field").dispatchEvent(pasted);
}"""


def test_long_messages_do_not_freeze_the_tab(chat: ChatPage) -> None:
    """12 MB are kept out with a word; of half a megabyte the beginning is shown."""
    assert chat.page.evaluate(PASTE, 1_000_000) is False
    assert "12,000,000 characters, and 1,048,576 is the limit" in chat.page.locator(".toast.error").inner_text()
    assert chat.page.evaluate(PASTE, 10) is True
    chat.script("Read.")
    chat.ask("river " * 80_000)
    said = chat.page.locator(".said")
    assert len(said.inner_text()) < 21_000 and len(chat.bodies[0]["messages"][0]["content"]) == 480_000
    chat.page.get_by_role("button", name="show all 480,000 characters").click()
    chat.wait("document.querySelector('.said').textContent.length === 480_000")


def test_one_answer_is_written_at_a_time(chat: ChatPage) -> None:
    chat.set_parameter("Most tokens", "30")
    chat.ask("Name a river.")
    chat.send(STORY)
    chat.wait_text(1)
    chat.page.locator(".message.assistant").first.hover()
    chat.page.locator("button[aria-label='Answer again, as a new branch']").first.click()
    assert "stop it first" in chat.page.locator(".toast").inner_text()
    chat.wait_end()
    assert chat.page.locator(".message").count() == 4 and chat.page.locator(".turn").count() == 0


def test_answer_goes_on_when_the_engine_is_killed(chat: ChatPage, keyed: RunningServer) -> None:
    chat.set_parameter("Temperature", "0")
    chat.set_parameter("Most tokens", "60")
    chat.send(STORY)
    chat.wait_text(20)
    info = httpx.get(f"{keyed.url}/info", headers={"x-api-key": ADMIN}).json()
    os.kill(info["models"][0]["pid"], signal.SIGKILL)
    text = chat.wait_end()
    assert chat.page.locator(".answer-notice.error").count() == 0
    assert "60 tokens" in chat.figures
    after = httpx.get(f"{keyed.url}/info", headers={"x-api-key": ADMIN}).json()["models"][0]
    assert after["num_restarts"] == info["models"][0]["num_restarts"] + 1
    chat.press("Answer again, as a new branch")
    assert chat.wait_end() == text, "the answer is the one that a whole engine gives"


def test_key_is_asked_for_and_kept_in_the_tab_alone(browser, keyed: RunningServer) -> None:
    with open_page(browser, keyed.url) as chat:
        dialog = chat.page.locator("dialog[open]")
        dialog.get_by_label("API key").fill("wrong")
        chat.page.keyboard.press("Enter")
        chat.wait("document.querySelector('dialog[open]')?.innerText.includes('does not know')")
        dialog.get_by_label("API key").fill(KEY)
        chat.page.keyboard.press("Enter")
        chat.page.wait_for_selector(".welcome")
        chat.set_parameter("Most tokens", "4")
        assert chat.ask("Hello")
        kept = chat.page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert KEY in kept[0] and KEY not in kept[1] + kept[2]
        other = chat.page.context.new_page()
        other.goto(keyed.url)
        assert other.wait_for_selector("dialog[open] input").get_attribute("type") == "password"
