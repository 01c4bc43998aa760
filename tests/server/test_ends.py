"""How a server stops, and what becomes of clients that leave."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.streams import Said, chats, run_all


def settled(server: RunningServer, num_aborted: float | None = None) -> dict[str, float]:
    """The engine's account once nothing runs, and so many were aborted; it is told once a second."""
    end = time.monotonic() + 15
    while time.monotonic() < end:
        stats = server.stats()
        idle = stats["num_running"] == 0 and stats["num_waiting"] == 0 and stats["num_used_blocks"] == 0
        if idle and num_aborted in (None, stats["num_aborted"]):
            break
        time.sleep(0.2)
    return stats


def test_clients_that_leave_give_their_blocks_back(server: RunningServer) -> None:
    async def storm() -> list[Said | None]:
        bodies = chats(60, max_tokens=64)

        async def one(client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> Said | None:
            from tests.server.streams import listen

            if index % 5:
                return await listen(client, body)
            with pytest.raises(ConnectionAbortedError):

                def leave(said: Said) -> None:
                    if said.num_chunks >= 3:
                        raise ConnectionAbortedError

                await listen(client, body, leave)
            return None

        async with httpx.AsyncClient(
            base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client:
            return list(await asyncio.gather(*(one(client, i, body) for i, body in enumerate(bodies))))

    before = settled(server)
    said = asyncio.run(storm())
    assert all(one is None or len(one.token_ids) == 64 for one in said)
    after = settled(server, before["num_aborted"] + 12)
    assert after["num_used_blocks"] == 0
    assert after["num_aborted"] - before["num_aborted"] == 12


def test_left_while_waiting_for_a_whole_answer(server: RunningServer) -> None:
    before = settled(server)["num_aborted"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions", timeout=0.5, json={"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
        )
    assert settled(server, before + 1)["num_aborted"] == before + 1


def test_sigterm_lets_answers_finish() -> None:
    with RunningServer("smollm2", "--max-model-len", "2048") as server:

        async def stop(counts: list[int]) -> None:
            while sum(count > 3 for count in counts) < 4:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{server.url}/health/ready")).status_code == 503
                refused = await client.post(f"{server.url}/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503 and "Retry-After" in refused.headers

        said = asyncio.run(run_all(server.url, chats(4, max_tokens=150), stop))
        assert [len(one.token_ids) for one in said] == [150] * 4
        assert server.stop() == 0


def test_answers_that_take_too_long_end_with_an_error() -> None:
    with RunningServer("smollm2", "--shutdown-timeout", "0.5") as server:

        async def stop(counts: list[int]) -> None:
            while min(counts) < 3:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)

        said = asyncio.run(run_all(server.url, chats(2, max_tokens=4000), stop))
        assert all(one.error is not None and "stopped" in one.error["message"] for one in said)
        assert server.stop() == 0


@pytest.mark.slow
def test_second_signal_stops_now() -> None:
    with RunningServer("smollm2") as server:
        thread = threading.Thread(target=lambda: asyncio.run(run_all(server.url, chats(1, max_tokens=4000))))
        thread.start()
        time.sleep(1)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - begin < 15
        thread.join()


def test_taken_port_is_a_clear_error(tiny_model: object) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        import subprocess
        import sys

        ran = subprocess.run(
            [sys.executable, "-m", "penstock", "serve", str(tiny_model), "--port", str(port)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 1 and f"port {port}" in ran.stderr and "--port" in ran.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "/no/such/model", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 1 and "/no/such/model" in ran.stderr and "Traceback" not in ran.stderr
