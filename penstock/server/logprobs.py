"""Log probabilities in OpenAI's two shapes, and a prompt's in vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.types import TokenLogprobs

LEAST = -9999.0             # stands for an impossible token


def finite(value: float) -> float:
    return max(value, LEAST)


def chat_logprobs(positions: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The chosen token comes first in each position; the likeliest follow."""
    content = []
    for position in positions:
        entries = [{"token": one.decoded_token or "", "logprob": finite(one.logprob),
                    "bytes": list((one.decoded_token or "").encode())} for one in position.values()]
        ranked = sorted(zip(entries, position.values()), key=lambda pair: -pair[1].logprob)
        content.append({**entries[0], "top_logprobs": [entry for entry, _ in ranked[:num_top]]})
    return content


def completion_logprobs(positions: Sequence[TokenLogprobs | None], tokens: Sequence[str], num_top: int, offset: int,
                        ) -> dict[str, Any]:
    """`tokens` are the positions' texts; the first of a prompt has no log probability."""
    offsets, values, tops = [], [], []
    for position, text in zip(positions, tokens):
        offsets.append(offset)
        offset += len(text)
        chosen = next(iter(position.values())) if position else None
        values.append(None if chosen is None else finite(chosen.logprob))
        ranked = sorted((position or {}).values(), key=lambda one: -one.logprob)[:num_top]
        tops.append({one.decoded_token or "": finite(one.logprob) for one in ranked} if position else None)
    return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": tops if num_top else None,
            "text_offset": offsets}


def prompt_logprobs(positions: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """As vLLM shows those of a prompt; its first token has none."""
    return [None if position is None else {
        str(id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for id, one in position.items()} for position in positions]
