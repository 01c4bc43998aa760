"""Log probabilities in OpenAI's two shapes, and a prompt's in vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.answers import TokenTexts
from penstock.errors import InvalidRequest
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams, TokenLogprobs

LEAST = -9999.0  # stands for an impossible token
MAX_PROMPT_LOGPROBS = 1 << 17  # of a body
PARTED_LEVELS = 5  # of a response, down to the positions of its choices

_encoder = msgspec.json.Encoder()


def finite(value: float) -> float:
    return max(value, LEAST)


def chat_logprobs(positions: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The chosen token comes first in each position; the likeliest follow."""
    content = []
    for position in positions:
        entries = [
            {
                "token": one.decoded_token or "",
                "logprob": finite(one.logprob),
                "bytes": list((one.decoded_token or "").encode()),
            }
            for one in position.values()
        ]
        ranked = sorted(zip(entries, position.values()), key=lambda pair: -pair[1].logprob)
        content.append({**entries[0], "top_logprobs": [entry for entry, _ in ranked[:num_top]]})
    return content


def completion_logprobs(
    positions: Sequence[TokenLogprobs | None], tokens: Sequence[str], num_top: int, offset: int
) -> dict[str, Any]:
    """`tokens` are the positions' texts; the first of a prompt has no log probability."""
    offsets, values, tops = [], [], []
    for position, text in zip(positions, tokens):
        offsets.append(offset)
        offset += len(text)
        chosen = next(iter(position.values())) if position else None
        values.append(None if chosen is None else finite(chosen.logprob))
        ranked = sorted((position or {}).values(), key=lambda one: -one.logprob)[: max(1, num_top)]
        tops.append({one.decoded_token or "": finite(one.logprob) for one in ranked} if position else None)
    return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(positions: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """As vLLM shows those of a prompt; its first token has none."""
    return [
        None
        if position is None
        else {
            str(id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for id, one in position.items()
        }
        for position in positions
    ]


def named(positions: Iterable[TokenLogprobs | None], tokenizer: Tokenizer | None) -> list[TokenLogprobs | None]:
    """A prompt's positions with the texts of their tokens."""
    texts = TokenTexts(tokenizer)
    return [None if position is None else texts.add_to(position) for position in positions]


def num_prompt_logprobs(sampling: SamplingParams, num_tokens: int) -> int:
    """Log probabilities that a prompt of so many tokens has in all of its answers."""
    return 0 if sampling.prompt_logprobs is None else num_tokens * (sampling.prompt_logprobs + 1) * sampling.n


def check_prompt_logprobs(prompts: Iterable[tuple[SamplingParams, int]]) -> None:
    """Refuse a body that asks for too many; `prompts` are its sampling values and numbers of tokens."""
    count = sum(num_prompt_logprobs(sampling, num_tokens) for sampling, num_tokens in prompts)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the prompts' log probabilities are {count} in all (tokens, times the likeliest and one "
            f"more, times n): the limit is {MAX_PROMPT_LOGPROBS}; send fewer or shorter prompts at "
            "once, or ask for fewer of the likeliest"
        )


def encode_in_parts(value: Any, levels: int = PARTED_LEVELS) -> bytes:
    """JSON of a large value, part by part: other threads run in between."""
    if levels and isinstance(value, dict) and all(type(key) is str for key in value):
        return (
            b"{"
            + b",".join([_encoder.encode(key) + b":" + encode_in_parts(one, levels - 1) for key, one in value.items()])
            + b"}"
        )
    if levels and isinstance(value, list):
        return b"[" + b",".join([encode_in_parts(one, levels - 1) for one in value]) + b"]"
    return _encoder.encode(value)
