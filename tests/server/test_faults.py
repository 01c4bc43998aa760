"""Engines that die or hang: every stream goes on, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.streams import Said, chats, run_all

NUM = 32


def results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
    return [(one.text, one.finish_reason, one.token_ids) for one in said]


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[Said]:
    said = asyncio.run(run_all(server.url, chats(NUM)))
    assert all(len(one.token_ids) == 48 and one.error is None for one in said)
    return said


def test_killed_engine_loses_no_token(server: RunningServer, undisturbed: list[Said]) -> None:
    async def kill(counts: list[int]) -> None:
        while sum(count > 5 for count in counts) < NUM // 2:
            await asyncio.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)

    said = asyncio.run(run_all(server.url, chats(NUM), kill))
    assert results(said) == results(undisturbed)
    assert any("restarting" in line for line in server.log)


def test_stopped_engine_is_not_ready_then_replaced(undisturbed: list[Said]) -> None:
    with RunningServer("smollm2", "--max-model-len", "2048", "--hang-timeout", "3") as server:

        async def stop(counts: list[int]) -> None:
            while sum(count > 5 for count in counts) < 4:
                await asyncio.sleep(0.01)
            os.kill(server.engine_pid(), signal.SIGSTOP)
            begin = time.monotonic()
            async with httpx.AsyncClient() as client:
                while (await client.get(f"{server.url}/health/ready")).status_code == 200:
                    await asyncio.sleep(0.05)
                assert time.monotonic() - begin < 2.5  # two heartbeats of a second, and the asking
                assert (await client.get(f"{server.url}/health/live")).status_code == 200
                while (await client.get(f"{server.url}/health/ready")).status_code == 503:
                    await asyncio.sleep(0.05)

        said = asyncio.run(run_all(server.url, chats(NUM)[:8], stop))
        assert results(said) == results(undisturbed)[:8]


def test_no_process_outlives_the_server() -> None:
    with RunningServer("smollm2") as server:
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        end = time.monotonic() + 5
        while os.path.exists(f"/proc/{engine}") and time.monotonic() < end:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{engine}")
