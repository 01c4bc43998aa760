"""Bursts and Poisson arrivals of completions with random prompts, and the figures that come of them."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gpu_sets import VOCABULARY
from bench.live.clients import Clients, Post
from bench.load.figures import Limits, summarize
from bench.load.loop import Pace
from bench.load.stream import Sample
from bench.load.wire import Target

Row = dict[str, Any]
PATH = "/v1/completions"
FIRST_ID = 1000  # below it tokenizers keep their special tokens and bytes
COUNTS = ("num_requests", "num_ok", "num_wrong_length", "num_refused", "num_disconnected", "num_failed")


@dataclass(frozen=True)
class Size:
    """A set of requests: how many, tokens in, tokens out."""

    num_requests: int
    num_input: int
    num_output: int

    def scale(self, factor: float) -> Size:
        """An answer keeps two tokens, so that there is a time per token."""
        if factor == 1:
            return self
        return Size(
            max(1, round(self.num_requests * factor)),
            max(1, round(self.num_input * factor)),
            max(2, round(self.num_output * factor)),
        )


@dataclass
class Traffic:
    """Requests to one server. No two prompts are alike, in this run or another: they are drawn from a new `nonce`."""

    clients: Clients
    target: Target
    model: str
    vocabulary: int = VOCABULARY
    temperature: float = 1.0
    seed: int = 0  # of the arrivals, which are the same in every run
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    _num_prompts: int = 0

    def burst(self, size: Size) -> Row:
        """Send all requests at once."""
        return self._send(size, [0.0] * size.num_requests, Limits())

    def poisson(self, size: Size, rate: float, limits: Limits) -> Row:
        """Send `rate` requests a second, answered or not."""
        pace = Pace(rate=rate, seed=f"{self.seed}/{rate:g}")
        return self._send(size, pace.due_times(size.num_requests), limits)

    def _send(self, size: Size, times: Sequence[float], limits: Limits) -> Row:
        posts = [Post(due_s, self._request(size), size.num_output) for due_s in times]
        report = self.clients.send(self.target, posts, self.timeout_s)
        figures = summarize(report.samples, limits)
        error = next((_describe(sample) for sample in report.samples if sample.outcome != "ok"), None)
        return figures | {"client_busy": report.busy, "first_error": error}

    def _request(self, size: Size) -> bytes:
        """`ignore_eos` is known to Penstock, vLLM and SGLang."""
        body = {
            "model": self.model,
            "prompt": self._prompt(size.num_input),
            "max_tokens": size.num_output,
            "ignore_eos": True,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return self.target.request("POST", PATH, json.dumps(body).encode())

    def _prompt(self, num_tokens: int) -> list[int]:
        self._num_prompts += 1
        chance = random.Random(f"{self.nonce}/{self._num_prompts}")
        return chance.choices(range(min(FIRST_ID, self.vocabulary // 2), self.vocabulary), k=num_tokens)


def _describe(sample: Sample) -> str:
    return f"{sample.outcome}, status {sample.status}: {sample.error}"


def count(rows: Sequence[Row]) -> Row:
    """Return what became of all requests of `rows`: none goes missing."""
    errors: dict[str, int] = {}
    for row in rows:
        for name, number in row["errors"].items():
            errors[name] = errors.get(name, 0) + number
    return {
        **{name: sum(row[name] for row in rows) for name in COUNTS},
        "errors": errors,
        "first_error": next((row["first_error"] for row in rows if row["first_error"]), None),
        "cached_tokens": round(sum(_total(row["cached_tokens"]) for row in rows)),
        "client_busy": round(max(row["client_busy"] for row in rows), 3),
    }


def _total(spread: Row | None) -> float:
    return spread["mean"] * spread["count"] if spread else 0.0
