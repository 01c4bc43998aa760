"""A fleet over the scripted worker, and what its flights say."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.fleet import Fleet
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.process import Launch
from penstock.types import Request, SamplingParams
from tests.hardening.scripted_worker import token_at

ROOT = str(Path(__file__).parents[2])
_numbers = itertools.count()


def make_flight(
    *tokens: int, n: int = 1, max_tokens: int = 8, tenant: str = "", priority: int = 0, num_tokens: int = 0
) -> InFlightRequest:
    number = next(_numbers)
    prompt = (1,) * num_tokens or (1, 2, *tokens)
    request = Request(
        id=f"r{number}",
        tokens=prompt,
        sampling=SamplingParams(n=n, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=number,
        priority=priority,
    )
    return InFlightRequest(request, None, None, tenant=tenant)


async def hear(flight: InFlightRequest) -> dict[int, list[int]]:
    """All its tokens by sibling, each as the script wants it."""
    said: dict[int, list[int]] = {}
    async for batch in flight.items():
        for item in batch:
            said.setdefault(item.index, []).extend(item.token_ids)
    for sibling, tokens in said.items():
        assert tokens == [token_at(flight.request.seed, sibling, at) for at in range(flight.request.max_tokens)]
    assert len(said) == flight.request.num_siblings
    return said


@contextlib.asynccontextmanager
async def running(
    folder: Path, admission: AdmissionQueue | None = None, hang_s: float = 5.0, size: int = 1, **options: Any
) -> AsyncIterator[Fleet]:
    """Started, and not yet ready."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    command = (sys.executable, "-m", "tests.hardening.scripted_worker")
    engine = Fleet(
        "scripted",
        Launch("none", {"folder": str(folder), **options}, folder, size, command),
        AdmissionQueue(512, 1 << 20) if admission is None else admission,
        hang_s=hang_s,
    )
    task = asyncio.ensure_future(engine.run())
    try:
        yield engine
    finally:
        await engine.close()
        await asyncio.gather(task, return_exceptions=True)
        for one in engine.engines:
            assert one.pid is None or not os.path.exists(f"/proc/{one.pid}")


async def until(claim: Any) -> None:
    while not claim():
        await asyncio.sleep(0.01)
