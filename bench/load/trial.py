"""One measurement of one server: warm it up, let it see what it may have seen, send the workload, read what came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.load.figures import Limits, summarize
from bench.load.loop import Pace, drive
from bench.load.stream import read_sample
from bench.load.wire import Target, fetch
from bench.load.words import SAMPLE_WORDS, TOKENS_PER_WORD, Text
from bench.load.workload import WARM_OUTPUT, Chat, Workload

Row = dict[str, Any]
CHAT_PATH = "/v1/chat/completions"
CAPACITY_ROUNDS = 4  # the capacity is measured over so many requests per place


class ServerFailed(Exception):
    """The server did not do what has to work before anything can be measured."""


@dataclass
class Trial:
    target: Target
    model: str
    workload: Workload
    pace: Pace
    limits: Limits = Limits()
    overload: float | None = None  # offer so many times the capacity
    capacity: float | None = None  # requests per second; measured when not given
    tokens_per_word: float = TOKENS_PER_WORD
    num_warm: int = 1
    num_seen: int = 1
    timeout_s: float = 600.0
    pause_s: float = 0.5
    extra: Mapping[str, Any] = field(default_factory=dict)
    note: Callable[[str], None] = lambda _: None
    begin: Callable[[int], None] = lambda _: None
    advance: Callable[[], None] = lambda: None

    def run(self, seed: str) -> list[Row]:
        """A row of figures and samples per phase. The seed makes the prompts: a new one is new to the server."""
        warm = replace(self.workload, num_output=WARM_OUTPUT)
        self._before("warming up", warm.chats(f"{seed}-w", self.tokens_per_word, self.num_warm))
        if self.overload is None:
            return [self._phase(self.workload.name, seed, self.pace, self.workload.num_requests)]
        rows = []
        if self.capacity is None:
            places = self.pace.concurrency or 1
            rows = [self._phase("capacity", f"{seed}-c", replace(self.pace, rate=None), CAPACITY_ROUNDS * places)]
        rate = offered_rate(self.capacity or rows[0]["figures"]["requests_per_s"], self.overload)
        offered = replace(self.pace, rate=rate, concurrency=None, seed=seed)
        rows.append(self._phase(f"overload ×{self.overload:g}", seed, offered, self.workload.num_requests))
        return rows

    def _phase(self, name: str, seed: str, pace: Pace, count: int) -> Row:
        chats = self.workload.chats(seed, self.tokens_per_word, count)
        seen = self.workload.seen_chats(chats, seed, self.num_seen, self.tokens_per_word)
        self._before("showing what has been seen", seen)
        requests = self._requests(chats)
        time.sleep(self.pause_s)
        self.note(name)
        self.begin(len(requests))
        driven = asyncio.run(drive(self.target, requests, pace, self.timeout_s, self.advance))
        samples = [
            read_sample(exchange, index, driven.start, chat.num_output)
            for index, (exchange, chat) in enumerate(zip(driven.exchanges, chats))
        ]
        figures = summarize(samples, self.limits)
        num_tokens = figures["num_output_tokens"]
        figures["client_cpu_s"] = driven.client_cpu_s
        figures["client_cpu_per_token_s"] = driven.client_cpu_s / num_tokens if num_tokens else None
        return {
            "phase": name,
            "seed": seed,
            "concurrency": pace.concurrency,
            "rate": pace.rate,
            "arrival": pace.arrival if pace.rate else None,
            "figures": figures,
            "samples": [asdict(sample) | {"tpot_s": sample.tpot_s} for sample in samples],
        }

    def _requests(self, chats: Sequence[Chat]) -> list[bytes]:
        return [self.target.request("POST", CHAT_PATH, chat.body(self.model, self.extra)) for chat in chats]

    def _before(self, what: str, chats: Sequence[Chat]) -> None:
        if not chats:
            return
        self.note(what)
        pace = Pace(concurrency=self.workload.concurrency or len(chats))
        driven = asyncio.run(drive(self.target, self._requests(chats), pace, self.timeout_s, lambda: None))
        for exchange, chat in zip(driven.exchanges, chats):
            sample = read_sample(exchange, 0, driven.start, chat.num_output)
            if sample.outcome not in ("ok", "wrong length"):
                raise ServerFailed(f"{self.target.url}, {what}: {sample.status or sample.outcome}: {sample.error}")


def offered_rate(capacity: float, factor: float) -> float:
    if capacity <= 0:
        raise ServerFailed("the capacity is 0 requests per second: no request of the first phase was answered")
    return capacity * factor


def calibrate(target: Target, model: str) -> float | None:
    """Tokens per word by the server's own tokenizer; None where it has no `/tokenize`."""
    text = Text("calibration").words(SAMPLE_WORDS)
    status, value = fetch(
        target, "/tokenize", {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    )
    if status != 200 or not isinstance(value, dict):
        return None
    count = value.get("count") or len(value.get("tokens") or ())
    return count / SAMPLE_WORDS if count else None


def server_version(target: Target) -> str | None:
    """As vLLM and Penstock tell it, or llama-server; None where neither way works."""
    for path, name in (("/version", "version"), ("/props", "build_info")):
        status, value = fetch(target, path)
        if status == 200 and isinstance(value, dict) and name in value:
            return str(value[name])
    return None
