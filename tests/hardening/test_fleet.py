"""Replicas that die, hang or are closed: every stream goes on, on another or on the restarted one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.errors import Busy, EngineFailed, InvalidModel
from penstock.server.engines import process as process_module
from penstock.server.engines import quarantine as quarantine_module
from penstock.server.engines import watchdog as watchdog_module
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.engine import RemoteEngine
from tests.hardening.engines import hear, make_flight, running, until
from tests.hardening.scripted_worker import DEATH

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(quarantine_module, "QUIET_S", 0.2)


def _kill(engine: RemoteEngine, number: int = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, number)


def test_streams_of_a_killed_replica_continue_on_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, size=3, rows=4, step_s=0.01) as fleet:
            await fleet.wait_ready()
            flights = [make_flight(max_tokens=60) for _ in range(9)]
            fleet.submit(*flights)
            heard = [asyncio.ensure_future(hear(flight)) for flight in flights]
            await until(lambda: all(len(flight.outputs[0]) > 5 for flight in flights))
            assert [engine.replica.num_rows for engine in fleet.engines] == [3, 3, 3]
            fleet.options["loads"] = ["die"] * 100  # the killed one does not come back
            _kill(fleet.engines[0])
            await until(lambda: not fleet.engines[0].is_ready)
            assert fleet.is_ready and "2 of 3 replicas ready" in fleet.state
            await asyncio.gather(*heard)
            assert not fleet.dispatcher.flights and not any(engine.replica.num_rows for engine in fleet.engines)
            assert not any(engine.replica.num_pending for engine in fleet.engines)
            moved = [flight for flight in flights if flight.trace.num_restarts]
            assert len(moved) == 3 and all(len(flight.trace.replicas) == 2 for flight in moved)

    asyncio.run(run())


def test_all_replicas_killed_at_once_lose_no_token(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, size=2, rows=4, step_s=0.01) as fleet:
            await fleet.wait_ready()
            flights = [make_flight(n=2, max_tokens=40) for _ in range(4)]
            fleet.submit(*flights)
            heard = [asyncio.ensure_future(hear(flight)) for flight in flights]
            await until(lambda: all(len(flight.outputs[0]) > 5 for flight in flights))
            for engine in fleet.engines:
                _kill(engine)
            await asyncio.gather(*heard)
            assert fleet.num_restarts == 2

    asyncio.run(run())


def test_request_that_kills_engines_is_found_and_the_rest_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, size=3, rows=8) as fleet:
            await fleet.wait_ready()
            good = [make_flight(max_tokens=30) for _ in range(6)]
            bad = make_flight(DEATH)
            fleet.submit(*good)
            fleet.submit(bad)
            with pytest.raises(EngineFailed, match="crashed the engine each time"):
                await hear(bad)
            await asyncio.gather(*(hear(flight) for flight in good))

    asyncio.run(run())


def test_queue_bounds_and_shares_are_of_the_whole_fleet(tmp_path: Path) -> None:
    async def run() -> None:
        admission = AdmissionQueue(4, 1 << 20, {"one": 1.0, "two": 1.0})
        async with running(tmp_path, admission, size=2, rows=1, step_s=0.01) as fleet:
            await fleet.wait_ready()
            first = [make_flight(max_tokens=400, tenant="one") for _ in range(18)]  # two rows, and 8 queued in each
            for flight in first:
                fleet.submit(flight)
            assert not len(admission) and len(fleet.dispatcher.parts) == 18
            queued = [make_flight(max_tokens=400, tenant="one") for _ in range(4)]
            for flight in queued:
                fleet.submit(flight)
            with pytest.raises(Busy, match="the limit is 4"):
                fleet.submit(make_flight(tenant="one"))
            other = make_flight(tenant="two", max_tokens=3)
            fleet.submit(other)  # it displaces one that waits, and gets a row of the tenant with all rows
            await hear(other)
            fleet.abort(*(flight for flight in (*first, *queued) if flight.is_open))
            assert not len(fleet.dispatcher.parts) and not any(engine.replica.num_rows for engine in fleet.engines)

    asyncio.run(run())


def test_same_prefix_goes_to_the_same_replica_until_it_is_overloaded(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, size=2, rows=64, step_s=0.01) as fleet:
            await fleet.wait_ready()
            first = make_flight(num_tokens=64, max_tokens=2)
            fleet.submit(first)
            await hear(first)
            flights = []
            for _ in range(40):
                flights.append(make_flight(num_tokens=64, max_tokens=200))
                fleet.submit(flights[-1])
            places = [flight.trace.replicas[0] for flight in flights]
            assert places[:4] == first.trace.replicas * 4
            assert min(places.count(0), places.count(1)) > 10
            fleet.abort(*flights)

    asyncio.run(run())


def test_replica_that_cannot_load_ends_the_fleet(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, size=2, loads=["ok", "failed"]) as fleet:
            with pytest.raises(InvalidModel, match="cannot be read"):
                await fleet.wait_ready()
            await until(lambda: all(engine.pid is None or not _lives(engine) for engine in fleet.engines))
            with pytest.raises(EngineFailed):
                fleet.submit(make_flight())

    asyncio.run(run())


def test_engine_that_still_loads_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no messages, so it is not asked to stop."""
    monkeypatch.setattr(process_module, "STOP_S", 3600.0)

    async def run() -> None:
        async with running(tmp_path, size=2, loads=["stop", "stop"]) as fleet:
            await until(lambda: len(list(tmp_path.glob("start-*"))) == 2)
            await asyncio.wait_for(fleet.close(), 30)
            assert not any(_lives(engine) for engine in fleet.engines)

    asyncio.run(run())


def _lives(engine: RemoteEngine) -> bool:
    return os.path.exists(f"/proc/{engine.pid}")
