"""Measure what the live view costs the server: `python -m bench.watch`.

Requests run for the whole measurement; spells with viewers alternate with spells without. Reported are the CPU seconds
of the API process and of the engine process (all threads) per second of each, and the share of a core that the viewers
added. The device of the engine waits, so that nothing but scheduler, cache and server works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import httpx

from bench.stalls.server import ServerUnderTest
from bench.streams.__main__ import cpu_s

SERVER = "bench.watch.server"
SETTLE_S = 1.0
MAX_TOKENS = 100_000  # more than are made


@contextmanager
def run_requests(url: str, number: int, num_prompt: int) -> Iterator[None]:
    """Keep so many requests running until the block ends."""
    client = httpx.Client(timeout=None, limits=httpx.Limits(max_connections=None))

    def complete(index: int) -> None:
        prompt = [1000 + (index * 17 + at) % 20000 for at in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        with contextlib.suppress(httpx.HTTPError):  # the end of the measurement
            client.post(f"{url}/v1/completions", json=body)

    for index in range(number):
        threading.Thread(target=complete, args=(index,), daemon=True).start()
    while sum(count_states(url).values()) < number:
        time.sleep(0.1)
    yield


def count_states(url: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in httpx.get(f"{url}/admin/running").json()["requests"]:
        found[request["state"]] = found.get(request["state"], 0) + 1
    return found


class LiveViewer(threading.Thread):
    """Reads the live view until it is closed."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.num_events = self.num_bytes = self.num_rows = 0
        self._answer = urllib.request.urlopen(f"{url}/admin/live", timeout=30)
        self._is_closed = False

    def run(self) -> None:
        while not self._is_closed and (line := self._answer.readline()):
            if line.startswith(b"data: "):
                self.num_events, self.num_bytes = self.num_events + 1, self.num_bytes + len(line)
                self.num_rows = json.loads(line[6:])["models"][0]["num_rows"]
        self._answer.close()

    def close(self) -> None:
        self._is_closed = True


def spend(pids: list[int], seconds: float) -> list[float]:
    """Return the CPU seconds that each process spends in a second."""
    before, begin = [cpu_s(pid) for pid in pids], time.perf_counter()
    time.sleep(seconds)
    lasted = time.perf_counter() - begin
    return [(cpu_s(pid) - spent) / lasted for pid, spent in zip(pids, before)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="its tokenizer is used")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--spell-s", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    more = {"WATCH_STEP_MS": given.step_ms, "WATCH_ROWS": given.requests, "WATCH_BLOCKS": given.blocks}
    os.environ.update({name: str(value) for name, value in more.items()})
    rows, viewers = [], []
    with ServerUnderTest(given.model, module=SERVER) as server:
        pids = [server.pid, httpx.get(f"{server.url}/info").json()["models"][0]["pid"]]
        with run_requests(server.url, given.requests, given.prompt_tokens):
            for _ in range(given.rounds):
                time.sleep(SETTLE_S)
                alone = spend(pids, given.spell_s)
                viewers = [LiveViewer(server.url) for _ in range(given.viewers)]
                for viewer in viewers:
                    viewer.start()
                time.sleep(SETTLE_S)
                watched = spend(pids, given.spell_s)
                for viewer in viewers:
                    viewer.close()
                    viewer.join()
                rows.append([after - before for before, after in zip(alone, watched)] + alone)
    api, engine, api_alone, engine_alone = (median(one) for one in zip(*rows))
    sums = [one[0] + one[1] for one in rows]
    spread = quantiles(sums, n=4) if len(sums) > 1 else sums * 3
    print(
        json.dumps(
            {
                "viewers": given.viewers,
                "rows": viewers[0].num_rows,
                "bytes_per_event": viewers[0].num_bytes // max(1, viewers[0].num_events),
                "api_percent_of_a_core": round(100 * api, 3),
                "engine_percent_of_a_core": round(100 * engine, 3),
                "added_percent_of_a_core": round(100 * median(sums), 3),
                "quartiles": [round(100 * spread[0], 3), round(100 * spread[-1], 3)],
                "alone_percent_of_a_core": [round(100 * api_alone, 2), round(100 * engine_alone, 2)],
            }
        )
    )


if __name__ == "__main__":
    main()
