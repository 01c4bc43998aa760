"""Engines that die, hang and fail to load, in every order: the server comes back, and only culprits get an error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.engine.messages import Beat
from penstock.errors import EngineFailed, InvalidModel
from penstock.server.engines import quarantine as quarantine_module
from penstock.server.engines import watchdog as watchdog_module
from penstock.server.engines.fleet import Fleet
from penstock.server.engines.in_flight import RequestPart
from penstock.server.engines.quarantine import MAX_STRIKES, SOLID_TOKENS, TRIAL_S, Quarantine
from penstock.server.engines.watchdog import (
    MAX_DELAY_S,
    MIN_CONFIRMATIONS,
    MIN_LOAD_SILENCE_S,
    WATCH_S,
    Backoff,
    Watchdog,
)
from tests.hardening.engines import hear, make_flight, running, until
from tests.hardening.scripted_worker import DEATH, HANG, LATE_DEATH, MUTE, STUMBLE
from tests.server.running import RunningServer

pytestmark = pytest.mark.timeout(180)  # against tests that hang


async def _kill(engine: Fleet, number: int = signal.SIGKILL) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, number)
    await until(lambda: not engine.is_ready)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(watchdog_module, "MIN_LOAD_SILENCE_S", 2.0)
    monkeypatch.setattr("penstock.server.engines.quarantine.QUIET_S", 0.2)


def test_engine_killed_while_loading_is_tried_for_ever(tmp_path: Path) -> None:
    async def run() -> None:
        loads = ["ok", *["die"] * 6, "ok"]
        async with running(tmp_path, loads=loads, step_s=0.01) as engine:
            await engine.wait_ready()
            flight = make_flight(max_tokens=100)
            engine.submit(flight)
            heard = asyncio.ensure_future(hear(flight))
            await until(lambda: len(flight.outputs[0]) > 5)
            await _kill(engine)
            await until(lambda: "next start in" in engine.state)
            late = make_flight()
            engine.submit(late)  # it waits like the others
            await heard
            await hear(late)
            assert engine.failure is None and engine.is_ready and engine.num_restarts == 1

    asyncio.run(run())
    assert len(list(tmp_path.glob("start-*"))) == 8


@pytest.mark.slow
def test_engine_stopped_while_loading_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, hang_s=1.0, loads=["stop", "ok", "stop", "slow"]) as engine:
            await engine.wait_ready()  # the first start, too
            flight = make_flight(max_tokens=1000)
            engine.submit(flight)
            heard = asyncio.ensure_future(hear(flight))
            await until(lambda: len(flight.outputs[0]) > 5)
            await _kill(engine)
            await heard  # one that loads for long, and beats, is left alone

    asyncio.run(run())
    assert len(list(tmp_path.glob("start-*"))) == 4


@pytest.mark.slow
def test_hangs_with_answers_between_are_no_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, hang_s=1.0) as engine:
            await engine.wait_ready()
            for _ in range(3):
                await _kill(engine, signal.SIGSTOP)
                flight = make_flight()
                engine.submit(flight)
                await hear(flight)
            assert engine.failure is None and engine.engines[0]._backoff.num_failures == 0

    asyncio.run(run())


def test_model_that_cannot_be_read_is_an_error_at_start_only(tmp_path: Path) -> None:
    async def fail_first() -> None:
        async with running(tmp_path / "first", loads=["failed"]) as engine:
            with pytest.raises(InvalidModel, match="cannot be read"):
                await engine.wait_ready()

    async def fail_later() -> None:
        async with running(tmp_path / "later", loads=["ok", "failed", "failed", "ok"]) as engine:
            await engine.wait_ready()
            await _kill(engine)
            flight = make_flight()
            engine.submit(flight)
            await hear(flight)

    for name, run in (("first", fail_first), ("later", fail_later)):
        (tmp_path / name).mkdir()
        asyncio.run(run())
    assert len(list((tmp_path / "first").glob("start-*"))) == 1


def test_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when descriptors or memory have run out."""
    start, failures = asyncio.create_subprocess_exec, iter([OSError(24, "Too many open files")] * 3)

    async def refuse(*arguments: object, **options: object) -> object:
        for error in failures:
            raise error
        return await start(*arguments, **options)  # type: ignore[arg-type]

    async def run() -> None:
        async with running(tmp_path) as engine:
            await engine.wait_ready()
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
            await _kill(engine)
            flight = make_flight()
            engine.submit(flight)
            await hear(flight)
            assert next(failures, None) is None and engine.failure is None

    asyncio.run(run())


def test_closing_does_not_wait_for_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "FIRST_DELAY_S", 3600.0)
    monkeypatch.setattr(watchdog_module, "MAX_DELAY_S", 3600.0)

    async def run() -> None:
        async with running(tmp_path, loads=["ok", "die", "die"]) as engine:
            await engine.wait_ready()
            await _kill(engine)
            flight = make_flight()
            engine.submit(flight)
            await until(lambda: "next start in 3" in engine.state)
            assert engine.retry_after_s > 3000
        with pytest.raises(EngineFailed, match="stopped"):
            await hear(flight)

    asyncio.run(run())


@pytest.mark.parametrize(
    "culprit",
    [DEATH, LATE_DEATH, pytest.param(STUMBLE, marks=pytest.mark.slow), pytest.param(HANG, marks=pytest.mark.slow)],
)
def test_only_the_culprit_ends_and_nobody_waits_for_it(tmp_path: Path, culprit: int) -> None:
    async def run() -> None:
        async with running(tmp_path, hang_s=1.0, rows=16, step_s=0.005) as engine:
            await engine.wait_ready()
            streams = [make_flight(max_tokens=3000) for _ in range(8)]
            guilty = make_flight(culprit, max_tokens=100)
            for flight in (*streams, guilty):
                engine.submit(flight)
            heard = [asyncio.ensure_future(hear(flight)) for flight in streams]
            blamed = asyncio.ensure_future(hear(guilty))
            while not blamed.done():
                flight = make_flight()
                engine.submit(flight)
                await hear(flight)  # new ones are served all the while
            with pytest.raises(EngineFailed, match="crashed the engine"):
                await blamed
            engine.abort(*streams)
            for one in heard:
                one.cancel()
            await asyncio.gather(*heard, return_exceptions=True)

    asyncio.run(run())


def test_a_request_that_says_nothing_holds_up_no_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path, rows=16, step_s=0.02) as engine:
            await engine.wait_ready()
            mute = make_flight(MUTE)
            streams = [make_flight(max_tokens=60) for _ in range(4)]
            for flight in (mute, *streams):
                engine.submit(flight)
            heard = [asyncio.ensure_future(hear(flight)) for flight in streams]
            for _ in range(3):
                await until(lambda: engine.is_ready and len(engine.dispatcher.parts))
                await _kill(engine)
            await asyncio.gather(*heard)
            assert mute.is_open
            engine.abort(mute)

    monkeypatch.setattr("penstock.server.engines.quarantine.TRIAL_S", 0.5)
    asyncio.run(run())


def test_an_answer_that_cannot_be_told_ends_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as engine:
            await engine.wait_ready()
            broken, whole = make_flight(max_tokens=1000), make_flight(max_tokens=100)

            def refuse(item: object) -> None:
                raise ValueError("no text")

            broken.collector.listener = refuse
            pid = engine.pid
            engine.submit(broken)
            engine.submit(whole)
            with pytest.raises(EngineFailed, match="cannot detokenize"):
                await hear(broken)
            await hear(whole)
            assert engine.pid == pid and not engine.is_busy

    asyncio.run(run())


def test_server_says_that_it_tries_again(tiny_model: Path) -> None:
    """An engine killed again and again while it loads: the server lives, says why it is not ready, and then answers."""
    with RunningServer(str(tiny_model), "--load-format", "dummy", "--threads", "1") as server:
        said: list[tuple[str, int]] = []
        killed = {server.engine_pid()}
        answer = []
        body = {"prompt": [20], "max_tokens": 200, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda: answer.append(httpx.post(f"{server.url}/v1/completions", timeout=120, json=body))
        )
        os.kill(server.engine_pid(), signal.SIGKILL)
        asking.start()
        while len(killed) < 3:
            time.sleep(0.02)
            health = httpx.get(f"{server.url}/health/ready")
            if health.status_code == 503:
                said.append((health.json()["status"], int(health.headers["Retry-After"])))
            assert httpx.get(f"{server.url}/health/live").status_code == 200
            pid = server.engine_pid()
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        server.wait_ready()
        asking.join(120)
        assert answer[0].status_code == 200 and answer[0].json()["usage"]["completion_tokens"] == 200
    assert any("next start in" in status for status, _ in said) and all(retry_s >= 1 for _, retry_s in said)
    assert any("restarting in" in line for line in server.log)


# by themselves


def _parts(count: int) -> list[RequestPart]:
    return [make_flight().parts[0] for _ in range(count)]


def test_kills_from_outside_condemn_nobody() -> None:
    """However many: an engine that dies while nobody is on trial clears the records of all."""
    quarantine, parts, now = Quarantine(), _parts(6), 0.0
    present = list(parts)
    for life in range(400):
        now += 10
        quarantine.open(now)
        if life % 3:
            now += quarantine_module.QUIET_S + 0.1
            present += quarantine.next_group(now)
        present, condemned = quarantine.handle_death(present, True)
        assert not condemned


def test_the_culprit_among_many_is_found_in_few_deaths() -> None:
    quarantine, parts, now, num_deaths = Quarantine(), _parts(64), 0.0, 0
    guilty, present = parts[37], list(parts)
    while True:
        now += 10
        quarantine.open(now)
        now += quarantine_module.QUIET_S + 0.1
        while guilty not in present:
            group = quarantine.next_group(now)
            present += group
            if guilty not in group:
                for part in group:
                    part.num_tokens = SOLID_TOKENS
                    quarantine.clear_after_progress(part)
        for part in present:
            part.num_tokens = 0
        num_deaths += 1
        present, condemned = quarantine.handle_death(present, True)
        if condemned:
            break
    assert condemned == [guilty]
    assert num_deaths <= 2 + 6 + MAX_STRIKES  # two, the halvings of 64, alone


def test_trial_that_shows_nothing_ends_and_the_next_is_longer() -> None:
    quarantine, (part,) = Quarantine(), _parts(1)
    for _ in range(2):
        present, _ = quarantine.handle_death([part], True)
    assert not present and len(quarantine) == 1
    quarantine.open(0.0)
    begin_s = quarantine_module.QUIET_S + 1
    assert quarantine.next_group(quarantine_module.QUIET_S / 2) == []
    assert quarantine.next_group(begin_s) == [part] and part in quarantine
    quarantine.expire(begin_s + TRIAL_S / 2)
    assert part in quarantine
    quarantine.expire(begin_s + TRIAL_S + 0.1)
    assert part not in quarantine and part.trial_s == 2 * TRIAL_S


def test_backoff() -> None:
    backoff = Backoff()
    delays = [backoff.fail() for _ in range(40)]
    assert delays[0] == 0.0 and delays == sorted(delays) and delays[-1] == MAX_DELAY_S
    backoff.reset()
    assert backoff.fail() == 0.0


def test_standing_still_is_not_the_engines_fault() -> None:
    """The API process did not run for long; what the engine sent meanwhile is read before it is judged."""
    now = [0.0]
    watchdog = Watchdog(10.0, clock=lambda: now[0])
    watchdog.mark_ready()

    def look(times: int) -> bool:
        found = False
        for _ in range(times):
            now[0] += WATCH_S
            found |= watchdog.check()
        return found

    now[0] += 300
    watchdog.record(Beat(250.0, {}))  # an old one, the first in the line
    assert not watchdog.check() and not look(2)
    watchdog.record(Beat(0.0, {}))
    assert not look(int(9 / WATCH_S))
    assert look(int(2 / WATCH_S) + MIN_CONFIRMATIONS)  # this time the engine is silent


def test_loading_may_be_silent_for_longer_and_longer() -> None:
    watchdog = Watchdog(1.0)
    first = watchdog.max_silent_s
    assert first == watchdog_module.MIN_LOAD_SILENCE_S <= MIN_LOAD_SILENCE_S
    watchdog._num_load_hangs = 2
    assert watchdog.max_silent_s == 4 * first
    watchdog.mark_ready()
    assert watchdog.max_silent_s == 1.0
