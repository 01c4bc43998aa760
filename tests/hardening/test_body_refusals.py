"""Bodies that are refused: in words that say what is wrong with them, and what to send instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.errors import InvalidRequest
from penstock.server.common.prompts import list_prompts
from penstock.server.http.decode import SLICE_BYTES, decode
from penstock.server.http.errors import ApiError
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.completions import CompletionBody

MAX_TEXT_BYTES = 32 << 20
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'


def told(kind: type[BaseModel], raw: bytes) -> str:
    with pytest.raises(ApiError) as found:
        decode(bytearray(raw), kind, MAX_TEXT_BYTES)
    return found.value.message


def test_too_many_texts_are_counted() -> None:
    for item in ("x", [1]):
        raw = json.dumps({"prompt": [item] * 2049}).encode()
        assert "it has 2049 items: the limit is 2048" in told(CompletionBody, raw)
        with pytest.raises(InvalidRequest, match="it has 2049 prompts: the limit is 2048"):
            list_prompts([item] * 2049)  # of embeddings
    assert "prompt.2=5" in told(CompletionBody, json.dumps({"prompt": ["a", "b", 5]}).encode())


@pytest.mark.parametrize(
    "part, remedy",
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "describe the image"),
        ({"type": "input_audio", "input_audio": {}}, "send a transcript as text"),
        ({"type": "file", "file": {}}, "send the file's text as text"),
        ({"type": "video_url"}, "describe the video"),
    ],
)
def test_models_take_text_only(part: dict[str, Any], remedy: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    message = told(ChatBody, json.dumps(body).encode())
    assert f"models read text only: {remedy}" in message and message.startswith("messages.0.content.1=")


USER = BODY[:-1] + b', "user": "%s"}'


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "the body is empty: send a JSON object"),
        (b" \r\n", "the body is empty"),
        (b"\xef\xbb\xbf", "the body is empty"),
        *[(BODY.decode().encode(coding), "send UTF-8") for coding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")],
        (b"\x1f\x8b\x08" + BODY, "it is compressed"),
        (USER % b"\\ud800", r"\ud800 (byte 59) is half of a surrogate pair"),
        (USER % b"a\\uD83D\\ud83d\\ude00", r"\uD83D (byte"),
        (USER % b"\\ud83d\\ude00\\ude00", r"\ude00 (byte"),
        (USER % (b"\\ud83d\\ude00" * SLICE_BYTES + b"\\udfff"), r"\udfff (byte"),
        (USER % b"\\ud83d\\ude00" + b"}", "trailing characters"),
        (BODY[:-1] + b', "seed": ' + b"9" * 5000 + b"}", str(2**63 - 1)),
        (BODY[:-1] + b', "seed": 1e30}', str(2**63 - 1)),
        (BODY[:-1] + b', "seed": ' + b"9" * 30 + b"}", str(2**63)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_json_is_named(raw: bytes, words: str) -> None:
    assert words in told(ChatBody, raw)


def test_a_byte_order_mark_is_skipped() -> None:
    assert decode(bytearray(b"\xef\xbb\xbf" + BODY), ChatBody, MAX_TEXT_BYTES).messages[0].content == "hi"


def test_repeated_ids_are_taken_once() -> None:
    raw = BODY[:-1] + b', "allowed_token_ids": [' + b"7," * 240_000 + b"3]}"
    body = decode(bytearray(raw), ChatBody, MAX_TEXT_BYTES)
    assert body.allowed_token_ids == [7, 3]
