"""The live view, request timelines and models in a browser. PAGE_SCREENSHOTS=FOLDER keeps pictures to look at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm import tiny
from tests.page.live_tab import LiveTab, open_tab
from tests.server.running import RunningServer

HOSTILE = "<img src=x onerror=document.title='bad'>"
ROOT = {"admin": "root"}
KEYS = "one alice\ntwo bob\n"
ROWS = "document.querySelectorAll('.live-pair .rows tbody tr')"


@pytest.fixture(scope="module")
def served(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Three rows for two tenants, and a model on disk whose name is an attack."""
    home = tmp_path_factory.mktemp("home")
    for name in ("tiny", HOSTILE):
        tiny.write_config(home / "models" / name, vocab_size=320, max_position_embeddings=4096)
        tiny.write_tokenizer(home / "models" / name)
    (home / "keys").write_text(KEYS)
    arguments = ["--load-format", "dummy", "--threads", "1", "--max-num-seqs", "3", "--kv-cache-tokens", "8192"]
    keys = ["--api-key-file", str(home / "keys"), "--admin-key", "root"]
    with RunningServer("tiny", *arguments, *keys, env={"PENSTOCK_HOME": str(home)}) as running:
        yield running


@pytest.fixture
def tab(browser: object) -> Iterator[LiveTab]:
    with open_tab(browser) as opened:
        yield opened


def complete(running: RunningServer, key: str, **more: Any) -> httpx.Response:
    body = {"prompt": list(range(20, 140)), "max_tokens": 2200, "ignore_eos": True, "temperature": 1.0, **more}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=120)


@contextlib.contextmanager
def load(running: RunningServer, num_requests: int, **more: Any) -> Iterator[list[httpx.Response]]:
    """Run long requests of both tenants; they have ended when the block has."""
    answers: list[httpx.Response] = []

    def ask(number: int) -> None:
        prompt = [20 + (number * 7 + at) % 200 for at in range(100)]
        answers.append(complete(running, ("one", "two")[number % 2], prompt=prompt, **more))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_requests)]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join()


def picture(tab: LiveTab, name: str) -> None:
    """Take wide and narrow pictures, and require that nothing is wider than the screen."""
    for width, height in ((1400, 900), (390, 844)):
        tab.resize(width, height)
        tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("document.querySelector('.view').scrollWidth") <= width
        if folder := os.environ.get("PAGE_SCREENSHOTS"):
            tab.take_screenshot(Path(folder) / f"{name}-{width}.png")
    tab.resize(1400, 900)


def colours_of(selector: str) -> str:
    """Return the JavaScript that counts the colours of a canvas."""
    return (
        f"(() => {{ const canvas = document.querySelector({json.dumps(selector)}); const seen = new Set();"
        "const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "for (let at = 0; at < data.length; at += 4)"
        " seen.add(data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]);"
        "return seen.size; })()"
    )


@pytest.mark.slow
def test_the_batch_is_shown_under_load_and_through_a_restart(served: RunningServer, tab: LiveTab) -> None:
    tab.open(f"{served.url}/#/live", **ROOT)
    tab.wait("document.querySelector('.badge.is-good')")
    with load(served, 7, max_tokens=3900) as answers:
        tab.wait(f"{ROWS}.length === 7")
        tab.wait("document.querySelectorAll('.state-decode').length === 3")
        tab.wait("document.querySelectorAll('.queue-row').length === 2")
        batch, queue = tab.text(".box-wide"), tab.text(".queue")
        assert "7 answers" in batch and "3 decode" in batch and "4 queued" in batch
        assert "alice" in queue and "bob" in queue and "prompt tokens" in queue
        tab.wait("document.querySelector('.plot-value').innerText !== '–'")
        for canvas in (".blocks-canvas", ".plot-canvas"):
            tab.wait(f"{colours_of(canvas)} >= 3")
        assert "512 blocks of 16 tokens" in tab.text(".blocks")
        tab.run(
            "(() => { const canvas = document.querySelector('.blocks-canvas'), box = canvas.getBoundingClientRect();"
            "canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.x + 3, clientY: box.y + 3 })); })()"
        )
        assert tab.text(".blocks-says").startswith("Block 0: ")
        picture(tab, "live")
        engine = httpx.get(f"{served.url}/info", headers={"x-api-key": "root"}).json()["models"][0]["pid"]
        os.kill(engine, signal.SIGKILL)
        tab.wait("document.querySelectorAll('.state-restart').length > 0")
        tab.wait("document.querySelector('.live-head').innerText.includes('1 engine restart')")
        tab.wait("document.querySelectorAll('.state-decode').length === 3")
    assert [answer.status_code for answer in answers] == [200] * 7
    tab.wait(f"{ROWS}.length === 0 && document.body.innerText.includes('Ended lately')")
    tab.click("section.box:not(.box-wide) .request-link")
    tab.wait("document.querySelector('.stage-restart')")
    assert "the engine died and was restarted" in tab.text(".timeline")


@pytest.mark.slow
def test_a_hidden_tab_does_not_look(served: RunningServer, tab: LiveTab) -> None:
    tab.open(f"{served.url}/#/live", **ROOT)
    with load(served, 12, max_tokens=3900):
        tab.wait(f"{ROWS}.length > 3")
        hide = "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }});"
        tell = "document.dispatchEvent(new Event('visibilitychange'));"
        age = "document.querySelector('td[data-title=Age]').innerText"
        tab.run(hide.format("true") + tell)
        before = tab.run(age)
        assert tab.run(f"new Promise((done) => setTimeout(() => done({age}), 1300))") == before
        tab.run(hide.format("false") + tell)
        tab.wait(f"{age} !== {json.dumps(before)}")


def test_a_timeline_adds_up(served: RunningServer, tab: LiveTab) -> None:
    complete(served, "one", max_tokens=5)
    asked = {"x-api-key": "one", "x-request-id": "mine/1"}
    body = {"prompt": list(range(20, 140)), "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=asked, timeout=60)
    assert answer.headers["x-request-id"] == "mine/1"
    tab.open(f"{served.url}/#/requests", api="one")
    tab.wait("document.querySelector('input[type=search]')")
    tab.run("document.querySelector('input[type=search]').value = 'mine/1'")
    tab.click(".search-line button")
    tab.wait("document.querySelector('.stage-list li')")
    said = tab.text(".timeline")
    assert answer.json()["id"] in said and "tenant alice" in said and "112 tokens were cached" in said
    numbers = [float(word) for word in tab.text(".stage-sum").split() if word[0].isdigit() and "." in word]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.002)
    widths = tab.run("[...document.querySelectorAll('.stage')].reduce((sum, one) => sum + one.offsetWidth, 0)")
    assert widths == pytest.approx(tab.run("document.querySelector('.stages').clientWidth"), abs=12)
    picture(tab, "request")
    tab.run(f"location.hash = '#/live/{answer.json()['id']}'")  # as an answer in the chat links to it
    tab.wait("location.hash.startsWith('#/requests/cmpl-') && document.querySelector('.stage-list li')")


def test_requests_that_ended_are_listed(served: RunningServer, tab: LiveTab) -> None:
    """Also where the live view was never opened."""
    id = complete(served, "one", max_tokens=2).json()["id"]
    tab.open(f"{served.url}/#/requests", api="two", **ROOT)
    tab.wait(f"document.querySelector('.rows tbody')?.innerText.includes('{id[-8:]}')")
    tab.click(f".rows a[href$='{id}']")  # another tenant's, which the admin may see
    tab.wait("document.querySelector('.stage-list li')")


def test_an_unknown_request_is_told(served: RunningServer, tab: LiveTab) -> None:
    tab.open(f"{served.url}/#/requests/{HOSTILE}", **ROOT)
    tab.wait("document.querySelector('[role=alert]:not([hidden])')")
    assert "no recent request" in tab.text("[role=alert]") and tab.run("document.title") != "bad"
    assert tab.complaints.pop().startswith("Failed to load resource") and not tab.run(
        "document.querySelector('main img')"
    )


def test_models_are_loaded_and_unloaded(served: RunningServer, tab: LiveTab) -> None:
    tab.open(f"{served.url}/#/models", **ROOT)
    tab.wait("document.querySelectorAll('.card').length === 2")
    assert "cache" in tab.text(".memory-words") and "its process" in tab.text(".memory-words")
    tab.click(".models section:nth-of-type(2) .card button")
    tab.wait("document.querySelectorAll('section:first-of-type .badge.is-good').length === 2")
    assert HOSTILE in tab.text(".models section") and tab.run("document.title") != "bad"
    assert not tab.run("document.querySelector('main img')")
    picture(tab, "models")
    tab.run("[...document.querySelectorAll('.card button')].at(-1).click()")
    tab.wait("[...document.querySelectorAll('.badge')].some((one) => one.innerText === 'unloaded')")
    tab.run("document.querySelector('.pull input').value = 'no such model'")
    tab.click(".pull button")
    tab.wait("document.querySelector('.toast.error')")
    assert "no such model" in tab.text(".toast.error")
    assert tab.complaints.pop().startswith("Failed to load resource")  # the refused pull


def test_a_pull_goes_on_while_another_view_is_open(served: RunningServer, tab: LiveTab) -> None:
    held: list[Any] = []
    tab.page.route("**/api/pull", lambda route: held.append(route))
    tab.open(f"{served.url}/#/models", **ROOT)
    tab.wait("document.querySelector('.pull input')")
    tab.run("document.querySelector('.pull input').value = 'org/model'")
    tab.click(".pull button")
    tab.wait("document.querySelector('.pull button').disabled && document.querySelector('progress:not([hidden])')")
    tab.run("location.hash = '#/requests'")
    tab.wait("document.querySelector('input[type=search]')")
    tab.run("location.hash = '#/models'")
    tab.wait("document.querySelector('.pull progress:not([hidden])')")
    assert tab.run("document.querySelector('.pull input').value") == "org/model"
    assert tab.run("document.querySelector('.pull button').disabled")
    tab.run("location.hash = '#/requests'")
    tab.wait("document.querySelector('input[type=search]')")
    lines = [{"status": "pulling model", "completed": 5, "total": 10}, {"status": "success"}]
    held[0].fulfill(content_type="application/x-ndjson", body="".join(json.dumps(line) + "\n" for line in lines))
    tab.wait("[...document.querySelectorAll('.toast')].some((one) => one.innerText.includes('org/model is here'))")
    tab.run("location.hash = '#/models'")
    tab.wait("document.querySelector('.pull progress[hidden]') && !document.querySelector('.pull button').disabled")


@pytest.mark.slow
def test_replicas_are_shown_with_their_roles(tab: LiveTab, tmp_path: Path) -> None:
    tiny.write_config(tmp_path / "tiny", vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(tmp_path / "tiny")
    arguments = ["--load-format", "dummy", "--threads", "1", "--kv-cache-tokens", "8192"]
    roles = ["--role", "prefill", "--role", "decode", "--kv-offloading-path", str(tmp_path / "store")]
    with RunningServer(str(tmp_path / "tiny"), *arguments, *roles) as running:
        tab.open(f"{running.url}/#/live")
        tab.wait("document.querySelectorAll('.replica').length === 2")
        with load(running, 2, max_tokens=3000):
            tab.wait("document.querySelector('td:has(.state-decode)')?.innerText.includes('replica 1')")
            tab.wait("document.querySelectorAll('.replica')[1].innerText.includes('2 answers')")
            picture(tab, "replicas")
        first, second = tab.run("[...document.querySelectorAll('.replica')].map((one) => one.innerText)")
        assert first.startswith("Replica 0") and "computes prompts" in first and "of its blocks used" in first
        assert "answers" in second
        tab.page.goto("about:blank")
        tab.complaints.clear()


def test_without_the_admin_key_it_is_asked_for(served: RunningServer, tab: LiveTab) -> None:
    tab.open(f"{served.url}/#/models", api="two")
    tab.wait("document.querySelector('dialog[open] input')")
    tab.click("dialog[open] button")  # cancel
    tab.wait("document.body.innerText.includes('Give the admin key')")
    assert "tiny" in tab.text(".cards") and "ready" in tab.text(".cards")
    tab.run("location.hash = '#/live'")
    tab.wait("document.querySelector('dialog[open] input')")
    tab.run("document.querySelector('dialog[open] input').value = 'root'")
    tab.click("dialog[open] button.primary")
    tab.wait("document.querySelector('.badge.is-good') && document.querySelector('.plots')")
    assert all(one.startswith("Failed to load resource") for one in tab.complaints)
    tab.complaints.clear()


def test_a_server_that_stops_is_told(served: RunningServer, tab: LiveTab) -> None:
    """The last one: it stops the server."""
    tab.open(f"{served.url}/#/live", **ROOT)
    tab.wait("document.querySelector('.plots')")
    assert served.stop() == 0
    tab.wait("document.querySelector('.live-trouble:not([hidden])')")
    assert "Trying again." in tab.text(".live-trouble")
    tab.run("location.hash = '#/requests'")  # a view that was never opened is there all the same
    tab.wait("document.querySelector('input[type=search]')")
    tab.page.goto("about:blank")  # else it goes on asking, and the browser complains of each refusal
    tab.complaints.clear()


@pytest.mark.slow
def test_ranks_have_a_row_each(chromium: str, tab: LiveTab, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    tiny.write_config(folder / "tiny", vocab_size=320, max_position_embeddings=1024)
    tiny.write_tokenizer(folder / "tiny")
    arguments = ["--load-format", "dummy", "--threads", "1", "-pp", "2", "--admin-key", "root"]
    with RunningServer(str(folder / "tiny"), *arguments) as running:
        ranks = httpx.get(f"{running.url}/info", headers={"x-api-key": "root"}).json()["models"][0]["ranks"]
        tab.open(f"{running.url}/#/live", **ROOT)
        rows = "document.querySelectorAll('.ranks tbody tr')"
        tab.wait(f"{rows}.length === 2 && [...{rows}].every((row) => row.innerText.includes('up'))")
        shown = tab.text(".ranks")
        assert all(f"{one['pid']} on {one['node']}" in shown for one in ranks)
        picture(tab, "ranks")
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        tab.wait("document.querySelector('.ranks').innerText.includes('the engine was back at')")
        assert f"rank 1 (process {ranks[1]['pid']}" in tab.text(".ranks")
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60).json()
        tab.open(f"{running.url}/#/requests/{answer['id']}", **ROOT)
        tab.wait("document.body.innerText.includes('rank 1: layers 0 to 0')")
