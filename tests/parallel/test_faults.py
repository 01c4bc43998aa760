"""Ranks that die or hang: a server's streams go on token for token, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock import SamplingParams
from penstock.errors import RankLost
from tests.parallel.processes import ranks_of, wait_gone
from tests.same_tokens.roads import tiny_llm, tiny_model
from tests.server.running import START_S, RunningServer
from tests.server.streams import Said, chats, run_all

NUM, NUM_TOKENS = 6, 150
OPTIONS = ("--load-format", "dummy", "--max-model-len", "512", "--threads", "1")


def results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
    return [(one.text, one.finish_reason, one.token_ids) for one in said]


@pytest.fixture(scope="module")
def staged(talker: str) -> Iterator[RunningServer]:
    with RunningServer(talker, *OPTIONS, "--pipeline-parallel-size", "2") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(staged: RunningServer) -> list[Said]:
    return listen_to_all(staged)


def listen_to_all(server: RunningServer) -> list[Said]:
    said = asyncio.run(run_all(server.url, chats(NUM, NUM_TOKENS)))
    assert all(len(one.token_ids) == NUM_TOKENS and one.error is None for one in said)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_that_shares_layers(talker: str, number: int) -> None:
    """The engine waits for it in a collective."""
    with RunningServer(talker, *OPTIONS, "-tp", "2") as server:
        lose_rank(server, listen_to_all(server), number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_loses_no_token(staged: RunningServer, undisturbed: list[Said], number: int) -> None:
    """A stopped rank sends no heartbeat, and the engine that waits for it ends."""
    lose_rank(staged, undisturbed, number)


@pytest.mark.slow
def test_lost_rank_of_a_replica_is_another_replicas_work(talker: str, undisturbed: list[Said]) -> None:
    """Two replicas of two tensor-parallel ranks: streams go on on the other, and the lost one comes back whole."""
    with RunningServer(talker, *OPTIONS, "-dp", "2", "-tp", "2") as server:
        replicas = httpx.get(f"{server.url}/info").json()["models"][0]["replicas"]
        pids = [one["pid"] for one in replicas]
        ranks = {pid: ranks_of(pid) for pid in pids}
        assert all(len(found) == 1 for found in ranks.values())

        async def end(counts: list[int]) -> None:
            while not sum(counts):
                await asyncio.sleep(0.001)
            os.kill(ranks[pids[1]][0], signal.SIGKILL)

        assert results(asyncio.run(run_all(server.url, chats(NUM, NUM_TOKENS), end))) == results(undisturbed)
        assert wait_gone([*ranks[pids[1]], pids[1]])
        deadline = time.monotonic() + START_S
        while httpx.get(f"{server.url}/health/ready").json().get("replicas_ready") != 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        again = [one["pid"] for one in httpx.get(f"{server.url}/info").json()["models"][0]["replicas"]]
        assert again[0] == pids[0] and again[1] != pids[1]
        assert all(len(ranks_of(pid)) == 1 for pid in again)


def lose_rank(server: RunningServer, undisturbed: list[Said], number: int) -> None:
    engine = server.engine_pid()
    (rank,) = ranks_of(engine)

    async def end(counts: list[int]) -> None:
        while not sum(counts):
            await asyncio.sleep(0.001)
        os.kill(rank, number)

    said = asyncio.run(run_all(server.url, chats(NUM, NUM_TOKENS), end))
    assert results(said) == results(undisturbed)
    server.wait_for(f"rank 1 (process {rank} on ")
    assert any(f"rank 1 (process {rank}" in line and "is lost" in line for line in server.log)
    assert wait_gone([rank])
    wait_back(server, engine)


def wait_back(server: RunningServer, engine: int) -> None:
    """Until another engine is ready, with its rank."""
    end = time.monotonic() + START_S
    while server.engine_pid() == engine and time.monotonic() < end:
        time.sleep(0.05)
    server.wait_ready()
    assert len(ranks_of(server.engine_pid())) == 1


def test_killed_engine_leaves_no_rank(staged: RunningServer) -> None:
    """Even one that is stopped, and so can do nothing about it."""
    engine = staged.engine_pid()
    (rank,) = ranks_of(engine)
    os.kill(rank, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    assert wait_gone([rank])
    wait_back(staged, engine)


def test_lost_rank_ends_a_script_clearly(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_model(tmp_path_factory.mktemp("lost"), "LlamaForCausalLM")
    with tiny_llm(model, pipeline_parallel_size=2) as llm:
        executor: Any = llm.service.engine.executor
        rank = executor.group.hellos[1].pid
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"rank 1 \(process {rank} on .*\) is lost"):
            for _ in range(100):
                llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert wait_gone([rank])


def test_killed_script_leaves_no_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_model(tmp_path_factory.mktemp("killed"), "LlamaForCausalLM")
    code = (
        "import time\nfrom penstock import LLM\n"
        f"llm = LLM({model!r}, load_format='dummy', skip_tokenizer_init=True, progress=False, "
        "kv_cache_tokens=512, pipeline_parallel_size=2)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None and script.stdout.readline() == "ready\n"
        ranks = ranks_of(script.pid)
        script.kill()
    assert len(ranks) == 1
    assert wait_gone(ranks)
