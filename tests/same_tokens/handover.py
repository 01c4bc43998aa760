"""Two engines as of a prefill server and a decode server: one computes prompts, the other fetches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock import LLM, SamplingParams
from penstock.api.engine.transfer import open_exchange
from penstock.engine.messages import BlockTransfer
from penstock.types import Request

SECRET = "ab" * 32


def open_pair(
    prefill: LLM, decode: LLM, secret: str = SECRET, salt: str = ""
) -> tuple[int, Callable[[Sequence[int]], int]]:
    """Open both ends; returns the port, and a function that fetches a prompt's blocks and counts them."""
    served = open_exchange(prefill.service.engine, BlockTransfer(SECRET, "127.0.0.1", 0))
    asking = open_exchange(decode.service.engine, BlockTransfer(secret))
    assert served.port and asking.fetch is not None
    fetch, source = asking.fetch, f"127.0.0.1:{served.port}"

    def fetch_prompt(tokens: Sequence[int]) -> int:
        return fetch(Request(id="r", tokens=tuple(tokens), blocks_from=source, salt=salt), 0)

    return served.port, fetch_prompt


def compute_prompt(llm: LLM, tokens: Sequence[int]) -> None:
    """Compute a prompt as a prefill server does: its blocks are in the store with its first token."""
    engine, params = llm.service.engine, SamplingParams(max_tokens=2)
    engine.add(Request(id="prefill", tokens=tuple(tokens), sampling=params, max_tokens=2, hand_over=True))
    while engine.has_work:
        engine.step()
