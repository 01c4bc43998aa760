"""Format logprobs: OpenAI's two formats, and vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.common.fields import SamplingBody
from penstock.text.answers import TokenTexts
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no -inf
MAX_PROMPT_LOGPROBS = 1 << 17  # per body
PIECEWISE_LEVELS = 5  # levels of a response that are encoded piecewise, down to positions

_encoder = msgspec.json.Encoder()


def clamp(value: float) -> float:
    return max(value, MIN_LOGPROB)


def count_top(body: SamplingBody, num_top: int | None) -> int:
    """Count the alternatives to show per position: the tokens that the body names, or its number of likeliest."""
    return len(body.logprob_token_ids) + 1 if body.logprob_token_ids else num_top or 0


def name_token(id: int) -> str:
    return f"token_id:{id}"


def format_chat_logprobs(
    positions: Iterable[TokenLogprobs], num_top: int, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Format for chat completions: the chosen token first, then the most likely ones. `as_ids`: tokens by their ids."""
    content = []
    for position in positions:
        entries = [
            {
                "token": name_token(id) if as_ids else one.decoded_token or "",
                "logprob": clamp(one.logprob),
                "bytes": list((one.decoded_token or "").encode()),
            }
            for id, one in position.items()
        ]
        ranked = sorted(zip(entries, position.values()), key=lambda pair: -pair[1].logprob)
        content.append({**entries[0], "top_logprobs": [entry for entry, _ in ranked[:num_top]]})
    return content


def format_completion_logprobs(
    positions: Sequence[TokenLogprobs | None], tokens: Sequence[str], num_top: int, offset: int, as_ids: bool = False
) -> dict[str, Any]:
    """Format for completions; `tokens` are the names. A prompt's first token has no logprob."""
    offsets, values, tops = [], [], []
    for position, text in zip(positions, tokens):
        offsets.append(offset)
        offset += len(text)
        chosen = next(iter(position.values())) if position else None
        values.append(None if chosen is None else clamp(chosen.logprob))
        tops.append(_format_top(position, num_top, as_ids) if position else None)
    return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _format_top(position: TokenLogprobs, num_top: int, as_ids: bool) -> dict[str, float]:
    """List the chosen token, and the most likely ones."""
    chosen, *others = position.items()
    ranked = sorted(position.items(), key=lambda pair: -pair[1].logprob)[:num_top]
    listed = [chosen, *(pair for pair in others if pair in ranked)]
    return {name_token(id) if as_ids else one.decoded_token or "": clamp(one.logprob) for id, one in listed}


def format_prompt_logprobs(positions: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """As vLLM shows those of a prompt; its first token has none."""
    return [
        None
        if position is None
        else {
            str(id): {"logprob": clamp(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for id, one in position.items()
        }
        for position in positions
    ]


def add_token_texts(
    positions: Iterable[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[TokenLogprobs | None]:
    texts = TokenTexts(tokenizer)
    return [None if position is None else texts.add_to(position) for position in positions]


def count_prompt_logprobs(sampling: SamplingParams, num_tokens: int) -> int:
    """Count the logprobs of a prompt over all its choices."""
    return 0 if sampling.prompt_logprobs is None else num_tokens * (sampling.prompt_logprobs + 1) * sampling.n


def check_prompt_logprobs(prompts: Iterable[tuple[SamplingParams, int]]) -> None:
    """Refuse too many prompt logprobs; `prompts` are pairs of sampling parameters and prompt length."""
    count = sum(count_prompt_logprobs(sampling, num_tokens) for sampling, num_tokens in prompts)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the request asks for {count} prompt logprobs (tokens x (prompt_logprobs + 1) x n): the limit is "
            f"{MAX_PROMPT_LOGPROBS}; send fewer or shorter prompts, or lower prompt_logprobs"
        )


def encode_piecewise(value: Any, levels: int = PIECEWISE_LEVELS) -> bytes:
    """Encode a large value as JSON piece by piece, so that other threads can run."""
    if levels and isinstance(value, dict) and all(type(key) is str for key in value):
        return (
            b"{"
            + b",".join([_encoder.encode(key) + b":" + encode_piecewise(one, levels - 1) for key, one in value.items()])
            + b"}"
        )
    if levels and isinstance(value, list):
        return b"[" + b",".join([encode_piecewise(one, levels - 1) for one in value]) + b"]"
    return _encoder.encode(value)
