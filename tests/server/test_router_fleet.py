"""A router that knows its servers: their caches, their rows, and who holds a session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.routing import route, serve
from tests.server.running import RunningServer

KEY = "boss"
ADMIN = {"x-api-key": KEY}
pytestmark = pytest.mark.timeout(240)
TEXT = "a fox who could not stop counting the stars " * 12


def count(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", headers=ADMIN).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def wait_until(claim: Any) -> None:
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.05)


def complete(url: str, key: str = "", **body: Any) -> httpx.Response:
    body = {"prompt": TEXT, "max_tokens": 2, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key} if key else {}, timeout=120)


def upstreams(router: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{router.url}/admin/upstreams", headers=ADMIN).json()["upstreams"]
    return found


def test_a_restarted_engines_prefixes_are_forgotten(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path) as server, route([server], tmp_path, "--admin-key", KEY) as router:
        wait_until(lambda: upstreams(router)[0]["max_rows"])
        known = [0.0]

        def learn() -> float:
            assert complete(router.url).status_code == 200
            known.append(count(router.url, "penstock_router:prompt_parts_known_total"))
            return known[-1] - known[-2]

        assert learn() == 0 and learn() > 0
        before = server.engine_pid()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200 and server.engine_pid() != before)
        time.sleep(0.5)  # a few heartbeats
        wait_until(lambda: upstreams(router)[0]["is_ready"])
        assert learn() == 0 and learn() > 0
        assert httpx.post(f"{router.url}/admin/reset_prefix_cache", headers=ADMIN).status_code == 200
        time.sleep(0.5)
        assert learn() == 0 and learn() > 0
        assert httpx.post(f"{server.url}/admin/reset_prefix_cache").status_code == 200  # behind the router's back
        time.sleep(0.5)
        assert learn() == 0


def test_tenants_share_the_fleet(tiny_model: Path, tmp_path: Path) -> None:
    """A server with nine rows' room, and four that may wait: a second tenant gets in, and before the first one's."""
    ended: list[tuple[str, int]] = []

    async def share(url: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def ask(key: str, max_tokens: int = 2) -> httpx.Response:
                body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers={"x-api-key": key})
                ended.append((key, answer.status_code))
                return answer

            async def wait(name: str, value: float) -> None:
                while await asyncio.to_thread(count, url, f"penstock_router:{name}") != value:
                    await asyncio.sleep(0.05)

            hogs = [asyncio.ensure_future(ask("one", 3000)) for _ in range(9)]
            await wait("upstream_requests_running", 9)
            few = [asyncio.ensure_future(ask("one")) for _ in range(4)]
            await wait("requests_waiting ", 4)
            refused = await ask("one")
            few.append(asyncio.ensure_future(ask("two")))
            await wait("requests_refused_total ", 2)
            for hog in hogs:
                hog.cancel()
            await asyncio.gather(*hogs, *few, return_exceptions=True)
            return refused

    keys = ("--api-key", "one", "--api-key", "two", "--admin-key", KEY, "--max-queued-requests", "4")
    with serve(tiny_model, tmp_path, "--max-num-seqs", "1") as server, route([server], tmp_path, *keys) as router:
        wait_until(lambda: upstreams(router)[0]["max_rows"] == 9)
        refused = asyncio.run(share(router.url))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "4 requests are waiting, which is the limit" in refused.json()["error"]["message"]
        assert ended[:2] == [("one", 429), ("one", 429)], "refused, and displaced by the second tenant's"
        assert sorted(ended[2:]) == [("one", 200)] * 3 + [("two", 200)]
        assert ended.index(("two", 200)) < 5, "it did not wait for all of the first one's"


def test_sessions_stay_with_their_server(tiny_model: Path, tmp_path: Path) -> None:
    servers = [serve(tiny_model, tmp_path, "--kv-offloading-path", str(tmp_path / str(at))) for at in range(2)]
    with servers[0], servers[1]:

        def saved(router: RunningServer, session: str) -> int:
            return httpx.post(f"{router.url}/v1/sessions/save", json={"session": session}).status_code

        with route(servers, tmp_path, "--policy", "round_robin") as router:
            wait_until(lambda: all(one["is_ready"] for one in upstreams(router)))
            for turn in range(3):
                for session in ("fox", "owl"):
                    cached = complete(router.url, session=session, prompt=f"{session} {TEXT}").json()["usage"]
                    assert (cached["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
                assert complete(router.url, prompt="one more, so that turns are odd").status_code == 200
            holders = {
                session: [
                    httpx.post(f"{one.url}/v1/sessions/save", json={"session": session}).status_code for one in servers
                ]
                for session in ("fox", "owl")
            }
            assert all(sorted(codes) == [200, 404] for codes in holders.values()), holders
            assert saved(router, "fox") == saved(router, "owl") == 200 and saved(router, "cat") == 404
        with route(servers, tmp_path, "--policy", "round_robin") as router:  # it remembers nobody
            wait_until(lambda: all(one["is_ready"] for one in upstreams(router)))
            assert saved(router, "owl") == saved(router, "fox") == 200
            assert httpx.post(f"{router.url}/v1/sessions/restore", json={"session": "fox"}).json()["num_tokens"] > 0
            assert httpx.post(f"{router.url}/v1/sessions/erase", json={"session": "fox"}).status_code == 200
            assert saved(router, "fox") == 404
            holder = servers[holders["owl"].index(200)]
            holder.process.kill()
            wait_until(lambda: not all(one["is_ready"] for one in upstreams(router)))
            lost = httpx.post(f"{router.url}/v1/sessions/save", json={"session": "owl"})
            assert lost.status_code == 503 and lost.json()["error"]["code"] == "upstream_lost"
            assert complete(router.url, session="owl").status_code == 200, "requests with it go on elsewhere"
            assert saved(router, "owl") == 200
