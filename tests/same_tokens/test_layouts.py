"""Every cell of the second table of docs/combinations.md: a server's layout with one thing that a request may have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm import tiny
from tests.lora import adapters
from tests.same_tokens.combinations import LAYOUT_ROWS, LAYOUTS
from tests.server.routing import KEY, route
from tests.server.running import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = "the fox that counted stars by night and slept by day " * 3
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PLAIN: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
ASKED: dict[str, dict[str, Any]] = {
    "sampling with a seed": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "DRY, mirostat, XTC": {"temperature": 0.8, "seed": 6, "dry_multiplier": 0.3, "mirostat": 2, "xtc_probability": 0.3},
    "log probabilities": {"logprobs": 5},
    "prompt log probabilities": {"prompt_logprobs": 2, "echo": True},
    "n > 1": {"n": 3, "temperature": 1.0, "seed": 7},
    "best_of": {"best_of": 3, "temperature": 1.0, "seed": 8},
    "structured output": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 80, "ignore_eos": False},
    "stop tokens, min_tokens, bad words": {"stop_token_ids": [73, 80, 91], "min_tokens": 9, "bad_words": ["zz"]},
    "stop strings": {"include_stop_str_in_output": True},
    "streams": {"stream": True},
    "chunked prompts": {"prompt": TEXT * 3},
    "LoRA adapters": {"model": "tuned"},
    "beams": {"use_beam_search": True, "n": 2, "max_tokens": 10, "logprobs": None},
    "sessions": {"session": "a", "session_ttl": 60},
}
FLAGS = {
    "2 tensor ranks": ("-tp", "2"),
    "2 stages": ("-pp", "2"),
    "2 stages of 2 tensor ranks": ("-tp", "2", "-pp", "2"),
    "2 replicas": ("-dp", "2"),
    "2 replicas of 2 tensor ranks": ("-dp", "2", "-tp", "2"),
    "prefill and decode apart": ("--role", "prefill", "--role", "decode"),
}
Start = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A server of one tiny model with an adapter, whose steps take a part of a prompt."""
    folder = tmp_path_factory.mktemp("layouts")
    model = tiny.write_config(folder / "tiny", vocab_size=320, max_position_embeddings=1024)
    tiny.write_tokenizer(folder / "tiny")
    adapters.write_for_llama(folder / "tuned", json.loads((folder / "tiny" / "config.json").read_text()))
    (folder / "router.key").write_text(KEY)
    common = ("--load-format", "dummy", "--threads", "1", "--max-num-batched-tokens", "48", "--max-num-seqs", "4")
    more = ("--enable-lora", "--lora-modules", f"tuned={folder / 'tuned'}", "--kv-cache-tokens", "1536")
    key = ("--router-key-file", str(folder / "router.key"), "--served-model-name", "tiny")
    return lambda *flags: RunningServer(model, *common, *more, *key, *flags)


@pytest.fixture(scope="module")
def one(start: Start) -> Iterator[RunningServer]:
    with start() as running:
        yield running


@pytest.fixture(scope="module", params=LAYOUTS)
def laid_out(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of each layout in turn."""
    with contextlib.ExitStack() as stack:
        if request.param == "router":
            servers = [stack.enter_context(start()) for _ in range(2)]
            yield stack.enter_context(route(servers, tmp_path_factory.mktemp("router"))).url
            return
        flags = FLAGS[request.param]
        if "--role" in flags:
            flags = (*flags, "--kv-offloading-path", str(tmp_path_factory.mktemp("store")))
        yield stack.enter_context(start(*flags)).url


def ask(url: str, **body: Any) -> tuple[Any, int]:
    """Return an answer to the last bit, without what names it; and how many tokens were cached."""
    body = {"model": "tiny", **PLAIN, **body}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        logprobs = [one for choice in choices for one in (choice["logprobs"] or {}).get("token_logprobs", ())]
        return (text, logprobs, choices[-1]["finish_reason"]), 0
    found = answer.json()
    details = found["usage"].get("prompt_tokens_details") or {}
    return found["choices"], details.get("cached_tokens", 0)


@pytest.mark.parametrize("row", LAYOUT_ROWS)
def test_cell(one: RunningServer, laid_out: str, row: str) -> None:
    body = ASKED.get(row, {})
    if row == "stop strings":
        text = ask(one.url)[0][0]["text"]
        body = {**body, "stop": [text[8:10]]}
    if row == "many at once":
        return check_many(one.url, laid_out)
    expected, _ = ask(one.url, **body)
    assert ask(laid_out, **body)[0] == expected
    again, num_cached = ask(laid_out, **body)
    assert again == expected
    if row == "prefix cache":
        assert num_cached > 0
    if row == "LoRA adapters":
        assert expected != ask(one.url)[0]
    if row == "sessions":
        erased = httpx.post(f"{laid_out}/v1/sessions/erase", json={"session": "a", "model": "tiny"})
        assert erased.status_code == 200 and erased.json()["num_tokens"] > 0, erased.text


def check_many(plain: str, url: str) -> None:
    """Ten requests of a cache with room for half of them, in four rows."""
    prompts = [TEXT[: 60 + 9 * number] + chr(65 + number) for number in range(10)]
    expected = [ask(plain, prompt=prompt, max_tokens=60)[0] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(url, prompt=prompt, max_tokens=60)[0], prompts))
    assert found == expected


def test_each_layout_has_its_flags(tmp_path: Path) -> None:
    assert {*FLAGS, "router"} == set(LAYOUTS) and set(ASKED) < set(LAYOUT_ROWS)
