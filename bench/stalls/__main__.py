"""How long a server under attack keeps others waiting: `python -m bench.stalls`.

Sixteen streams run while clients send what strangers sent. Reported are the longest gap between two tokens of a stream,
the longest wait for /health/live, and the memory that the API process took beyond what it had before. Wall-clock times:
on a busy machine they are those of the machine, so the same without an attack is measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from bench.load.document import header, write
from bench.stalls.attacks import ATTACKS, Attack
from bench.stalls.server import ServerUnderTest

NUM_STREAMS = 16
PING_S = 0.02


async def stream(client: httpx.AsyncClient, index: int, gaps: list[float]) -> None:
    body = {
        "messages": [{"role": "user", "content": f"Tell me a story about the number {index}."}],
        "stream": True,
        "max_tokens": 256,
        "ignore_eos": True,
        "temperature": 0,
    }
    last = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                gaps.append(0.0 if last is None else now - last)
                last = now


async def ping(client: httpx.AsyncClient, waits: list[float]) -> None:
    while True:
        begin = time.perf_counter()
        await client.get("/health/live")
        waits.append(time.perf_counter() - begin)
        await asyncio.sleep(PING_S)


async def measure(server: ServerUnderTest, attack: Attack | None) -> dict[str, Any]:
    gaps: list[float] = []
    waits: list[float] = []
    before = server.rss_bytes()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        pinging = asyncio.ensure_future(ping(client, waits))
        streams = [asyncio.ensure_future(stream(client, index, gaps)) for index in range(NUM_STREAMS)]
        await asyncio.sleep(0.5)
        statuses = await attack(client) if attack else []
        await asyncio.gather(*streams)
        pinging.cancel()
    return {
        "longest_gap_s": max(gaps),
        "longest_ping_s": max(waits),
        "median_ping_s": sorted(waits)[len(waits) // 2],
        "grown_mb": (server.rss_bytes() - before) / 1e6,
        "statuses": sorted(set(statuses)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="default: all of them")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    document = {**header("stalls", None), "model": given.model}
    figures: dict[str, Any] = {}
    print(f"{'attack':<24} {'longest gap':>12} {'longest ping':>13} {'grown':>9}  statuses")
    with ServerUnderTest(given.model) as server:
        for name in ["none", *(given.attack or sorted(ATTACKS)), "none again"]:
            figures[name] = found = asyncio.run(measure(server, ATTACKS.get(name)))
            print(
                f"{name:<24} {found['longest_gap_s']:>10.2f} s {found['longest_ping_s']:>11.3f} s "
                f"{found['grown_mb']:>6.0f} MB  {' '.join(map(str, found['statuses']))}",
                flush=True,
            )
    if given.output:
        write(given.output, {**document, "complete": True, "figures": figures})


if __name__ == "__main__":
    main()
