"""Calls and thoughts in Ollama's lines, from pieces of text."""

from __future__ import annotations

import time
from typing import Any, cast

from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.common.message_builder import MessageBuilder
from penstock.server.ollama.answer import LineHead, OllamaAnswer, RequestClock
from penstock.text.prompt_encoder import Encoded
from penstock.types import SamplingParams, StreamDelta

CALLS = (
    'Wait.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
)


def said(text: str, finish_reason: str = "stop", **how: Any) -> list[dict[str, Any]]:
    """The messages that a text comes to when it arrives by four characters."""
    builder = MessageBuilder(ChatPrompt(Encoded([1]), SamplingParams(), **how))
    answer = OllamaAnswer(LineHead("m", chats=True), builder, cast(Any, None), RequestClock(time.monotonic()), None)
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    items = [StreamDelta("r", 0, piece, (1,)) for piece in pieces] + [StreamDelta("r", 0, "", (2,), (), finish_reason)]
    return [found["message"] for item in items if (found := answer._format_batch([item]))]


def test_calls_come_whole() -> None:
    messages = said(CALLS, parser="hermes")
    assert "".join(message["content"] for message in messages) == "Wait."
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"name": "add", "arguments": {"a": 1}}, {"name": "get", "arguments": {}}]
    first = next(index for index, message in enumerate(messages) if "tool_calls" in message)
    assert len(messages) - first == 2  # the first did not wait for the end


def test_a_call_that_was_cut_off_is_none() -> None:
    messages = said('<tool_call>{"name": "add", "arguments": {"a": 1', "length", parser="hermes")
    assert not any("tool_calls" in message for message in messages)


def test_thoughts_have_their_own_field() -> None:
    messages = said("<think>\nHm, Paris?</think>\n\nParis.", reasoning="qwen3")
    assert "".join(message.get("thinking", "") for message in messages) == "Hm, Paris?"
    assert "".join(message["content"] for message in messages) == "Paris."
