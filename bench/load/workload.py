"""What is asked: chats with or without a common beginning, of given lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.load.words import TOKENS_PER_WORD, Text

Message = dict[str, str]
Seen = Literal["nothing", "prefix", "everything"]
WARM_OUTPUT = 8  # tokens of an answer that is not counted


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Message]
    num_output: int

    def body(self, model: str, extra: Mapping[str, Any]) -> bytes:
        """As OpenAI's interface has it; `ignore_eos` is known to Penstock, llama.cpp and vLLM."""
        return json.dumps(
            {
                "model": model,
                "messages": self.messages,
                "max_tokens": self.num_output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **extra,
            }
        ).encode()


@dataclass(frozen=True)
class Workload:
    """`num_requests` chats: a system prompt common to all (if any) and a user's message each. Lengths are in tokens."""

    name: str
    num_prefix: int
    num_input: int
    num_output: int
    num_requests: int
    concurrency: int | None  # so many at once; None: at `--rate`, or at a multiple of the capacity
    seen: Seen = "nothing"  # what of the chats the server has met before they are counted

    def chats(self, seed: str, tokens_per_word: float = TOKENS_PER_WORD, count: int | None = None) -> list[Chat]:
        """The same for the same seed. With another seed they begin differently from the first word on."""
        text = Text(seed, tokens_per_word)
        head = []
        if self.num_prefix:
            head = [{"role": "system", "content": f"{_mark(seed)}: {text.passage(self.num_prefix)}"}]
        return [
            Chat([*head, {"role": "user", "content": self._question(text, seed, index)}], self.num_output)
            for index in range(self.num_requests if count is None else count)
        ]

    def _question(self, text: Text, seed: str, index: int) -> str:
        passage = text.passage(self.num_input, "?")
        return passage if self.num_prefix else f"{_mark(f'{seed}/{index}')}: {passage}"

    def seen_chats(
        self, chats: Sequence[Chat], seed: str, num_seen: int, tokens_per_word: float = TOKENS_PER_WORD
    ) -> list[Chat]:
        """What is sent before, uncounted, so that the server has met what this workload says it has."""
        if self.seen == "everything":
            return list(chats)
        if self.seen == "nothing" or not self.num_prefix:
            return []
        text = Text(f"{seed}/seen", tokens_per_word)
        system = chats[0].messages[0]
        return [
            Chat([system, {"role": "user", "content": text.passage(self.num_input, "?")}], WARM_OUTPUT)
            for _ in range(num_seen)
        ]


def _mark(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:8]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("burst-new-prefix", 600, 16, 64, 16, 16),
        Workload("burst-seen-prefix", 600, 16, 64, 16, 16, "prefix"),
        Workload("burst-again", 600, 16, 64, 16, 16, "everything"),
        Workload("independent", 0, 256, 64, 64, 16),
        Workload("overload", 0, 128, 32, 128, 16),
    )
}
