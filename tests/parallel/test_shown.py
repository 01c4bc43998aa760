"""Ranks in `/info`, `/metrics`, the live view, `penstock top` and explain, before and after one is lost."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from penstock.commands.top.screen import Screen
from penstock.engine.messages import LostRank
from penstock.engine.ranks import LastBeat, RankRecord
from penstock.server.observe.ranks import MAX_SILENCE_S, RankWatch
from penstock.server.observe.trace import Trace, format_trace
from tests.server.running import RunningServer

OPTIONS = ("--load-format", "dummy", "--max-model-len", "4096", "--threads", "1", "-tp", "2", "-pp", "2")
ADMIN, TENANT = {"x-api-key": "root"}, {"x-api-key": "one"}


@pytest.fixture(scope="module")
def served(talker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("one alice\n")
    with RunningServer(talker, *OPTIONS, "--api-key-file", str(keys), "--admin-key", "root") as running:
        yield running


def get(running: RunningServer, path: str, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return httpx.get(f"{running.url}{path}", headers=headers, timeout=20)


def describe(running: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = get(running, "/info").json()["models"][0]
    return found


def wait_up(running: RunningServer) -> dict[str, Any]:
    """Wait until every rank has sent a heartbeat since the engine was ready."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        running.wait_ready()
        model = describe(running)
        if all(one["is_up"] for one in model["ranks"]):
            return model
        time.sleep(0.1)
    raise AssertionError(f"ranks are down: {model['ranks']}")


def read_metrics(running: RunningServer, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", get(running, "/metrics").text, re.M)]


def test_info_and_metrics_show_each_rank(served: RunningServer) -> None:
    model = wait_up(served)
    ranks = model["ranks"]
    assert [(one["rank"], one["stage"], one["shard"]) for one in ranks] == [(0, 1, 0), (1, 1, 1), (2, 0, 0), (3, 0, 1)]
    assert [(one["first_layer"], one["last_layer"]) for one in ranks] == [(1, 1), (1, 1), (0, 0), (0, 0)]
    assert ranks[0]["pid"] == model["pid"] and len({one["pid"] for one in ranks}) == 4
    assert {one["node"] for one in ranks} == {os.uname().nodename}
    for one in ranks:
        assert one["weight_bytes"] > 0 and one["cache_bytes"] > 0 and one["free_bytes"] > 0
        assert one["resident_bytes"] > 1 << 20 and 0 <= one["silence_s"] < MAX_SILENCE_S
    assert model["lost_rank"] is None
    assert read_metrics(served, "penstock:rank_up") == [1.0] * 4
    assert all(0 <= silence < MAX_SILENCE_S for silence in read_metrics(served, "penstock:rank_silence_seconds"))
    assert read_metrics(served, "penstock:rank_losses_total") == [0.0]
    assert "ranks" not in get(served, "/info", TENANT).json()["models"][0]


def test_a_lost_rank_is_named_with_its_reason(served: RunningServer) -> None:
    before = wait_up(served)["ranks"]
    lost = before[3]["pid"]
    answers: list[httpx.Response] = []

    def complete() -> None:
        body = {"prompt": list(range(20, 60)), "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        answers.append(httpx.post(f"{served.url}/v1/completions", json=body, headers=TENANT, timeout=120))

    asking = threading.Thread(target=complete)
    begun = time.time()
    asking.start()
    with httpx.stream("GET", f"{served.url}/admin/live", headers=ADMIN, timeout=60) as stream:
        looks = (json.loads(line[6:]) for line in stream.iter_lines() if line)
        next(look for look in looks if any(row["output_tokens"] for row in look["models"][0]["rows"]))
        os.kill(lost, signal.SIGKILL)
        look = next(look for look in looks if look["models"][0]["lost_rank"])
    asking.join()
    model = wait_up(served)
    assert [one["pid"] for one in model["ranks"]] != [one["pid"] for one in before]
    loss = model["lost_rank"]
    assert loss["rank"] == 3 and f"process {lost} on {os.uname().nodename}" in loss["why"]
    assert begun < loss["at"] < loss["back_at"] < time.time()
    assert read_metrics(served, "penstock:rank_losses_total") == [1.0]
    shown = look["models"][0]
    assert shown["lost_rank"]["rank"] == 3 and [one["rank"] for one in shown["ranks"]] == [0, 1, 2, 3]
    check_screen(look, f"process {before[2]['pid']}", f"rank 3 (process {lost}")

    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 1500
    id = answers[0].json()["id"]
    timeline = get(served, f"/admin/requests/{id}").json()
    (restart,) = [one for one in timeline["stages"] if one["name"] == "restart"]
    assert restart["why"] == "rank 3 was lost and the engine was restarted"
    assert [one["pid"] for one in timeline["ranks"]] == [one["pid"] for one in (*before, *model["ranks"])]
    assert timeline["lost_ranks"] == [loss]
    seen = get(served, f"/admin/requests/{id}", TENANT).json()
    assert seen["stages"] == timeline["stages"] and "ranks" not in seen and "lost_ranks" not in seen


def check_screen(look: dict[str, Any], *texts: str) -> None:
    screen = Screen("http://127.0.0.1")
    screen.take(look)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen.render(160))
    drawn = console.export_text()
    assert all(text in drawn for text in texts), drawn
    assert len(re.findall(r"^rank \d  ", drawn, re.M)) == 4


def make_facts(rank: int) -> RankRecord:
    return RankRecord(rank, 1 - rank, 0, "host", 100 + rank, 0, 1, 10, 20)


def test_silence_grows_until_a_rank_counts_as_down() -> None:
    now = 100.0
    watch = RankWatch(lambda: now)
    assert watch.describe() == {}
    watch.open([make_facts(0), make_facts(1)])
    assert not watch.is_up(1), "it has sent no heartbeat"
    watch.take([LastBeat(0, 0.0, 5, 6), LastBeat(1, 2.5, 7, 8)])
    assert watch.is_up(0) and watch.is_up(1) and watch.measure_silence(1) == 2.5
    now += 1.0
    assert watch.is_up(0) and not watch.is_up(1) and watch.measure_silence(1) == 3.5
    assert watch.close() is None, "the engine died of something else"
    assert not watch.is_up(0) and watch.measure_silence(0) == 1.0
    watch.open([make_facts(0), make_facts(1)])
    watch.lose(LostRank(1, "rank 1 is lost"))
    assert watch.loss is not None and watch.close() is watch.loss and watch.loss.back_s is None
    watch.open([make_facts(0), make_facts(1)])
    assert watch.loss.back_s is not None and watch.num_losses == 1
    assert watch.close() is None, "this process has lost none"


def test_a_timeline_names_the_ranks_of_every_engine_once() -> None:
    trace, first, second = Trace("a"), [make_facts(0)], [make_facts(0)]
    for ranks in (first, first, second):
        trace.place_on_ranks(1, ranks)
    assert len(format_trace(trace, sees_all=True)["ranks"]) == 2
    assert "ranks" not in format_trace(Trace("b"), sees_all=True)
