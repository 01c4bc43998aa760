"""Blocks over TCP between two engines: the same bits, and nothing but lost time when they do not come."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidConfig
from penstock.runner.ranks.link import Credentials, LinkClosed, WrongSecret, connect
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.exchange import HEAD, MAX_NAMES, BlockServer, ask_for
from penstock.runner.store.fetch import BlockFetcher, CacheLayout, list_names
from penstock.runner.store.segment import NAME_BYTES, checksum
from penstock.types import Request
from tests.same_tokens.handover import SECRET, compute_prompt, open_pair
from tests.same_tokens.roads import Answer, tiny_llm, tiny_model, together

CREDENTIALS = Credentials(bytes.fromhex(SECRET))
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True, logprobs=1, detokenize=False)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 64) for _ in range(70 + 9 * i)] for i in range(3)]


def make_name(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=NAME_BYTES).digest()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LLM, LLM, str]]:
    model = tiny_model(tmp_path, "Qwen3ForCausalLM")
    with tiny_llm(model, kv_offloading_size=0.1) as prefill, tiny_llm(model, kv_offloading_size=0.1) as decode:
        yield prefill, decode, model


def test_a_fetched_prompt_is_not_computed_again(pair: tuple[LLM, LLM, str]) -> None:
    prefill, decode, model = pair
    with tiny_llm(model, enable_prefix_caching=False) as alone:
        expected: list[Answer] = together(alone, prompts(), [PARAMS] * 3)
    _, fetch = open_pair(prefill, decode)
    for tokens in prompts():
        compute_prompt(prefill, tokens)
        assert fetch(tokens) > 0
    assert together(decode, prompts(), [PARAMS] * 3) == expected
    stats = decode.stats()
    assert stats["num_restored_tokens"] == sum((len(tokens) - 1) // 16 * 16 for tokens in prompts())
    assert stats["num_fetched_blocks"] > 0 and stats["num_fetched_bytes"] > 0
    assert prefill.stats()["num_sent_blocks"] == stats["num_fetched_blocks"]


def test_only_what_the_other_has_of_this_tenant_comes(pair: tuple[LLM, LLM, str]) -> None:
    prefill, decode, _ = pair
    _, fetch = open_pair(prefill, decode)
    first, second, _ = prompts()
    compute_prompt(prefill, first)
    assert fetch(second) == 0
    _, fetch_salted = open_pair(prefill, decode, salt="4:them")
    assert fetch_salted(first) == 0, "another tenant's prompt"
    assert fetch(first) > 0 and fetch(first) == 0, "what is here is not fetched again"


def test_what_follows_a_missing_block_is_not_fetched(pair: tuple[LLM, LLM, str]) -> None:
    prefill, decode, _ = pair
    _, fetch = open_pair(prefill, decode)
    tokens = prompts()[2]
    compute_prompt(prefill, tokens)
    saves = prefill.service.engine.scheduler.cache.saves
    assert saves is not None and isinstance(saves.store, BlockStore)
    second = list_blocks(prefill, tokens)[1]
    saves.store.drop(second)
    assert fetch(tokens) == 1
    assert decode.stats()["num_missing_blocks"] == 1


def list_blocks(llm: LLM, tokens: Sequence[int]) -> list[bytes]:
    cache = llm.service.engine.scheduler.cache
    assert cache.saves is not None
    layout = CacheLayout(cache.groups, cache.block_size, cache.saves.block_bytes)
    return list_names(cache.saves.names, layout, Request(id="r", tokens=tuple(tokens)), 0)


def test_who_does_not_know_the_secret_gets_nothing(
    pair: tuple[LLM, LLM, str], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, _ = pair
    port, fetch = open_pair(prefill, decode, secret="cd" * 32)
    compute_prompt(prefill, prompts()[0])
    assert fetch(prompts()[0]) == 0
    assert "computed here" in caplog.text
    assert prefill.stats()["num_sent_blocks"] == 0
    with pytest.raises(WrongSecret):
        connect(("127.0.0.1", port), Credentials(b"x" * 32), 0.0)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"kv_transfer_port={port} cannot be listened on at 127.0.0.1"):
            BlockServer(BlockStore(1 << 20), "127.0.0.1", port, CREDENTIALS)


@pytest.fixture
def served() -> Iterator[tuple[BlockServer, BlockStore]]:
    store = BlockStore(1 << 24)
    server = BlockServer(store, "127.0.0.1", 0, CREDENTIALS)
    yield server, store
    server.close()


def test_blocks_come_by_name_whole_or_not_at_all(served: tuple[BlockServer, BlockStore]) -> None:
    server, store = served
    blocks = {make_name(i): bytes([i]) * (1000 + i) for i in range(5)}
    for name, data in blocks.items():
        store.save(name, data)
    link = connect(("127.0.0.1", server.port), CREDENTIALS, 0.0)
    names = [*blocks, make_name(99)]
    assert dict(ask_for(link, names, 1100, 5.0)) == {**blocks, make_name(99): None}
    assert dict(ask_for(link, names * 400, 1100, 5.0)) == {**blocks, make_name(99): None}, "in several frames"
    with pytest.raises(LinkClosed, match="sent a frame of"):
        list(ask_for(link, names, 100, 5.0))


def test_a_caller_cannot_ask_for_more_than_a_frame_of_names(served: tuple[BlockServer, BlockStore]) -> None:
    link = connect(("127.0.0.1", served[0].port), CREDENTIALS, 0.0)
    link.send(make_name(1) * (MAX_NAMES + 1))
    with pytest.raises(LinkClosed):
        link.receive(5.0)
    again = connect(("127.0.0.1", served[0].port), CREDENTIALS, 0.0)
    assert dict(ask_for(again, [make_name(1)], 100, 5.0)) == {make_name(1): None}, "others are served"


class OneAnswer:
    """What `connect` gives, but with one answer that is made up."""

    peer = "it"

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer

    def send(self, *parts: bytes) -> None: ...

    def close(self) -> None: ...

    def receive(self, wait_s: float, max_bytes: int) -> bytearray:
        if isinstance(self._answer, Exception):
            raise self._answer
        return bytearray(self._answer)


def frame(name: bytes, data: bytes, length: int | None = None) -> bytes:
    return HEAD.pack(len(data) if length is None else length, checksum(name, data)) + data


@pytest.mark.parametrize(
    "answer",
    [
        frame(make_name(1), b"x" * 8)[:-1],
        frame(make_name(1), b"x" * 8)[:-1] + b"y",
        frame(make_name(2), b"x" * 8),
        frame(make_name(1), b"x" * 8, 1 << 60),
    ],
)
def test_a_damaged_block_is_missing(answer: bytes) -> None:
    link: Any = OneAnswer(answer)
    assert list(ask_for(link, [make_name(1)], 100, 1.0)) == [(make_name(1), None)]


@pytest.mark.parametrize("answer", [b"", b"abc", LinkClosed("it was killed"), RuntimeError("not known")])
def test_a_server_that_breaks_off_costs_time_only(
    pair: tuple[LLM, LLM, str], answer: bytes | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode, _ = pair
    asked = []

    def link(*args: Any) -> Any:
        asked.append(args[0])
        if isinstance(answer, RuntimeError):
            raise LinkClosed("refused")
        return OneAnswer(answer)

    saves = decode.service.engine.scheduler.cache.saves
    assert saves is not None and isinstance(saves.store, BlockStore)
    cache = decode.service.engine.scheduler.cache
    layout = CacheLayout(cache.groups, cache.block_size, saves.block_bytes)
    now = [0.0]
    fetcher = BlockFetcher(saves.store, saves.names, layout, CREDENTIALS, make_link=link, clock=lambda: now[0])
    request = Request(id="r", tokens=tuple(prompts()[0]), blocks_from="[::1]:80")
    assert fetcher.fetch(request, 0) == fetcher.fetch(request, 0) == 0
    assert asked == [("::1", 80)], "it is left alone for a while"
    now[0] = 60.0
    assert fetcher.fetch(request, 0) == 0 and len(asked) == 2
    assert decode.stats()["num_missing_blocks"] > 0
