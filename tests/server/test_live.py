"""`/admin/live` and `/admin/requests/{id}` on a running server."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.engine.messages import Look, Seen
from penstock.engine.view import BlockView
from penstock.server.engines.engine import EngineView
from penstock.server.metrics import Metrics
from penstock.server.observe.live import MAX_ENDED, MAX_WATCHERS, LiveHub
from penstock.server.observe.rates import RateWindow
from penstock.server.observe.ring import TraceRing
from penstock.server.observe.snapshot import _list_queue
from tests.server.running import RunningServer
from tests.server.test_trace import check_sums

SEEN = Seen({}, [], 0, BlockView(1, 16, 1, 0, 0, 0, 0, b"\0", 1))
ADMIN, ONE, TWO = ({"x-api-key": key} for key in ("root", "one", "two"))


def watch(running: RunningServer, **more: Any) -> Any:
    return httpx.stream("GET", f"{running.url}/admin/live", headers=ADMIN, timeout=20, **more)


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line[6:])


def complete(running: RunningServer, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"prompt": list(range(20, 60)), "max_tokens": 8, "ignore_eos": True, **more}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)


def explain(running: RunningServer, id: str, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return httpx.get(f"{running.url}/admin/requests/{id}", headers=headers)


def test_the_live_view_shows_rows_and_blocks(keeping: RunningServer) -> None:
    thread = threading.Thread(target=complete, args=(keeping, ONE), kwargs={"max_tokens": 3000})
    with watch(keeping) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        looks = events(answer)
        first = next(looks)
        thread.start()
        found = next(
            look
            for look in looks
            if look["models"][0]["rows"]
            and look["models"][0]["rows"][0]["output_tokens"]
            and look["models"][0]["rates"]["ttft_ms"]  # while the answer goes on
        )
    thread.join()
    assert first["time"] == pytest.approx(time.time(), abs=30)
    (model,) = found["models"]
    assert (model["name"], model["state"], model["restarts"]) == ("tiny", "ready", 0)
    (row,) = model["rows"]
    assert row["tenant"].startswith("key-") and row["id"].startswith("cmpl-") and row["state"] == "decode"
    assert row["prompt_tokens"] == 40 and row["max_tokens"] == 3000 and row["computed_tokens"] > 30
    blocks = model["blocks"]
    cells = base64.b64decode(blocks["map"])
    assert set(cells) <= {0, 1, 2, 3, 4} and len(cells) == -(-blocks["num"] // blocks["blocks_per_cell"]) <= 2000
    assert blocks["free"] + blocks["held"] + blocks["cached"] + blocks["shared"] == blocks["num"]
    if blocks["blocks_per_cell"] == 1:
        assert cells.count(1) == blocks["held"] and cells.count(3) == blocks["shared"]
    assert set(model["rates"]) == {
        "prompt_tokens_per_s",
        "generation_tokens_per_s",
        "ttft_ms",
        "tpot_ms",
        "hit_rate",
        "step_ms",
    }


def test_head_ends_at_once(keeping: RunningServer) -> None:
    answer = httpx.head(f"{keeping.url}/admin/live", headers=ADMIN, timeout=20)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert httpx.head(f"{keeping.url}/admin/live", headers=ONE).status_code == 403


def test_only_the_admin_watches_and_only_so_many(keeping: RunningServer) -> None:
    assert httpx.get(f"{keeping.url}/admin/live", headers=ONE).status_code == 403
    assert httpx.get(f"{keeping.url}/admin/live").status_code == 401
    with ExitStack() as stack:
        watching = [events(stack.enter_context(watch(keeping))) for _ in range(MAX_WATCHERS)]
        assert all(next(one)["models"] for one in watching)
        with watch(keeping) as refused:
            assert refused.status_code == 429 and "the limit is 16" in refused.read().decode()
    end = time.monotonic() + 10
    while time.monotonic() < end:  # their seats are free once the server has seen them leave
        with ExitStack() as stack:
            if all(stack.enter_context(watch(keeping)).status_code == 200 for _ in range(MAX_WATCHERS // 3)):
                return
    raise AssertionError("the seats of those who left are not free")


def test_a_slow_client_is_explained_while_it_is_slow(keeping: RunningServer) -> None:
    host, port = keeping.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [20] * 40, "max_tokens": 3500, "ignore_eos": True, "stream": True, "logprobs": 20})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: one\r\nx-request-id: slow-reader\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        end = time.monotonic() + 60
        while (shown := explain(keeping, "slow-reader").json()).get("state") != "slow_client":
            assert time.monotonic() < end and shown.get("state") != "finished", shown
            time.sleep(0.05)
        assert shown["stages"][-1]["why"] == "the client is slow to read" and shown["totals"]["client_wait_s"] > 0
        check_sums(shown)
        slow.settimeout(30)
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += slow.recv(1 << 20)
    while (shown := explain(keeping, "slow-reader").json())["state"] != "finished":
        assert time.monotonic() < end, shown
    assert [stage["name"] for stage in shown["stages"]][-2:] == ["slow_client", "respond"]
    check_sums(shown)


def test_a_viewer_that_does_not_read_holds_up_nobody(keeping: RunningServer) -> None:
    """Its events are dropped, and what waits for it is bounded."""
    host, port = keeping.url.removeprefix("http://").split(":")
    memory = Path(f"/proc/{keeping.process.pid}/statm")
    with ExitStack() as stack:
        for _ in range(3):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(b"GET /admin/live HTTP/1.1\r\nhost: localhost\r\nx-api-key: root\r\n\r\n")
        looks = events(stack.enter_context(watch(keeping)))
        next(looks)
        before = int(memory.read_text().split()[1])
        times = [next(looks)["time"] for _ in range(5)]
        assert max(after - one for one, after in zip(times, times[1:])) < 5
        assert int(memory.read_text().split()[1]) - before < 4_000  # pages
    assert complete(keeping, ONE).status_code == 200


def test_what_ended_is_listed_and_ids_may_have_slashes(keeping: RunningServer) -> None:
    asked = complete(keeping, {**ONE, "x-request-id": "a/b/../c"}, n=2)
    with watch(keeping) as answer:
        look = next(events(answer))
    one = look["ended"][0]
    assert one["id"] == asked.json()["id"] and one["tenant"].startswith("key-") and one["model"] == "tiny"
    assert (one["status"], one["finish_reasons"], one["output_tokens"]) == (200, ["length"], 16)
    assert 0 < one["ttft_s"] < one["e2e_s"] and len(look["ended"]) <= MAX_ENDED
    assert explain(keeping, "a/b/../c".replace("..", "%2E%2E")).json()["id"] == one["id"]


def test_queue_has_who_came_after_the_last_look() -> None:
    """The engine answers between steps; who came since is a row that waits, so the queue has them too."""

    def make(id: str, tenant: str, state: str, *output: int) -> Any:
        trace = SimpleNamespace(find_state=lambda key: state)
        request = SimpleNamespace(id=id, tokens=[1] * 7)
        waiting = {"request": request, "tenant": tenant, "trace": trace, "number": 0, "outputs": {0: list(output)}}
        return type("Flight", (), waiting)()

    class Admission(list[Any]):
        tenants = {"eve": SimpleNamespace(name="eve", num_flights=2, num_tokens=9)}

    flights = [
        make("a", "bob", "queue"),
        make("b", "bob", "wait", 5),
        make("c", "bob", "grammar"),
        make("d", "eve", ""),
    ]
    dispatcher = SimpleNamespace(flights={one.request.id: one for one in flights}, parts={})
    engine: Any = SimpleNamespace(dispatcher=dispatcher, admission=Admission(flights[3:]))
    waiting = [{"tenant": "eve", "requests": 2, "tokens": 9}, {"tenant": "bob", "requests": 1, "tokens": 7}]
    assert _list_queue(engine, []) == waiting


def test_nothing_is_done_while_nobody_looks() -> None:
    """Neither a task nor a message to the engine, before the first and after the last viewer."""

    async def watch_once() -> None:
        sent: list[Look] = []
        view = EngineView(sent.append)
        engine: Any = SimpleNamespace(is_ready=False, view=view, failure=None)
        hub = LiveHub([SimpleNamespace(name="m", engine=engine)], Metrics(), TraceRing())  # type: ignore[arg-type]
        hub._show = lambda model: {"name": model.name}  # type: ignore[method-assign]
        assert hub._looking is None
        watching, second = hub.watch(), hub.watch()
        assert b"m" in await watching.__anext__() and b"m" in await second.__anext__()
        await watching.aclose()
        assert hub._looking is not None and hub.num_watchers == 1
        view.take(SEEN)
        assert view.seen is None  # nobody asked
        await view.look(0.0)
        view.take(SEEN)
        assert view.seen is SEEN and sent == [Look()]
        await second.aclose()
        assert hub._looking is None and not hub._rates and view.seen is None
        assert sent == [Look(), Look(last=True)]
        view.take(SEEN)
        assert view.seen is None  # an answer that was on its way

    asyncio.run(watch_once())


def test_a_request_is_explained_to_its_tenant_and_the_admin(keeping: RunningServer) -> None:
    answer = complete(keeping, {**ONE, "x-request-id": "mine/1"}, prompt=list(range(60, 100)))
    assert answer.headers["x-request-id"] == "mine/1"
    id = answer.json()["id"]
    shown = explain(keeping, id).json()
    assert shown["id"] == id and shown["request_id"] == "mine/1" and shown["state"] == "finished"
    check_sums(shown)
    stages = [stage["name"] for stage in shown["stages"]]
    assert stages[0] == "receive" and stages[-3:] == ["prefill", "decode", "respond"] and "queue" in stages
    assert shown["totals"]["prompt_tokens"] == 40 and shown["totals"]["output_tokens"] == 8
    assert explain(keeping, id, ONE).json() == shown
    assert explain(keeping, id, TWO).status_code == 404
    assert explain(keeping, "nobody").status_code == 404
    again = complete(keeping, {**ONE, "x-request-id": "no way"}, prompt=list(range(60, 100)))
    assert again.headers["x-request-id"].startswith("req_")
    shown = explain(keeping, again.headers["x-request-id"]).json()
    assert shown["totals"]["cached_tokens"] == 32
    assert any("32 tokens were cached" in stage["why"] for stage in shown["stages"])


def test_timings_add_up_to_the_time_of_the_request(keeping: RunningServer) -> None:
    answer = complete(keeping, ONE, max_tokens=40)
    timings, totals = answer.json()["timings"], explain(keeping, answer.json()["id"]).json()["totals"]
    summed = sum(timings[name] for name in ("queue_ms", "prompt_ms", "predicted_ms"))
    staged = sum(totals.get(name, 0.0) for name in ("queue_s", "wait_s", "prefill_s", "decode_s"))
    assert summed == pytest.approx(1e3 * staged, abs=50)
    assert timings["prompt_n"] + timings["cache_n"] == 40 and timings["predicted_n"] == 40


def test_what_had_a_grammar_says_so(keeping: RunningServer) -> None:
    answer = complete(keeping, ONE, structured_outputs={"regex": "[a-z]{20}"}, max_tokens=40, ignore_eos=False)
    assert answer.status_code == 200, answer.text
    stages = explain(keeping, answer.json()["id"]).json()["stages"]
    grammar = [stage["why"] for stage in stages if stage["name"] == "grammar"]
    assert any("to compile" in why for why in grammar)


def test_rates_are_of_the_last_seconds() -> None:
    window = RateWindow()
    zero = dict.fromkeys([*RateWindow.COUNTERS, "num_ttft", "ttft_s", "num_tpot", "tpot_s"], 0.0)
    window.add(100.0, zero)
    assert set(window.rates.values()) == {None}
    window.add(101.0, {**zero, "num_output_tokens": 50.0, "num_steps": 10.0, "step_s": 0.5})
    assert window.rates["generation_tokens_per_s"] == 50 and window.rates["step_ms"] == 50
    for second in range(2, 30):
        window.add(
            100.0 + second, {**zero, "num_output_tokens": 50.0 + 10 * second, "num_ttft": second, "ttft_s": second}
        )
    assert window.rates["generation_tokens_per_s"] == 10 and window.rates["ttft_ms"] == 1000
    assert window.rates["step_ms"] is None and len(window._samples) < 15
