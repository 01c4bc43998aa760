"""Anthropic's routes: translate a body to a chat body, and answer in Anthropic's format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.anthropic.body import (
    AssistantMessage,
    CountTokensBody,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    text_of,
)
from penstock.server.anthropic.errors import REQUEST_ID, format_failure
from penstock.server.common.chat_prompt import ChatHistory, ChatPrompt, make_chat_body, warn_of_unused_budget
from penstock.server.common.fields import MAX_INT32
from penstock.server.common.message_builder import ItemChange, OutputItem, OutputItems
from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    json_response,
    new_id,
    read_body,
    run_on_body,
    server_of,
    start_generation,
)
from penstock.server.openai.chat_body import ChatBody

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know none above high


class MessageAnswer:
    def __init__(
        self, body: MessagesBody, chat_prompt: ChatPrompt, generation: Generation, *, fills_context: bool
    ) -> None:
        self.body = body
        self.generation = generation
        self._fills_context = fills_context  # max_tokens exceeds the context
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self.output_items = OutputItems(chat_prompt)
        self.head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model}

    async def collect(self) -> dict[str, Any]:
        async with contextlib.aclosing(self.output_items.follow(self.generation)) as batches:
            async for _ in batches:
                pass
        output_items = self.output_items.all if self.body.max_tokens else []
        return {
            **self.head,
            "content": [self._format_item(output_item) for output_item in output_items],
            **self._format_end(),
            "usage": self._format_usage(),
            **self.generation.relaxed,
            **self.generation.ledger,
        }

    def _format_item(self, output_item: OutputItem) -> dict[str, Any]:
        if output_item.kind == "text":
            return {"type": "text", "text": output_item.text, "citations": None}
        if output_item.kind == "reasoning":
            return {"type": "thinking", "thinking": output_item.text if self._shows_thinking else "", "signature": ""}
        return {
            "type": "tool_use",
            "id": "toolu_" + output_item.id.removeprefix("call_"),
            "name": output_item.name,
            "input": _parse_arguments(output_item.text),
        }

    def _format_end(self) -> dict[str, Any]:
        builder = self.output_items.builder
        reason, sequence = "end_turn", None
        if builder.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._fills_context else "max_tokens"
        elif isinstance(builder.stop_reason, str):
            reason, sequence = "stop_sequence", builder.stop_reason
        elif self.output_items.calls:
            reason = "tool_use"
        return {"stop_reason": "max_tokens" if not self.body.max_tokens else reason, "stop_sequence": sequence}

    def _format_usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        usage_fields: dict[str, Any] = {
            "input_tokens": usage.num_prompt - usage.num_cached,
            "cache_read_input_tokens": usage.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.num_output if self.body.max_tokens else 0,
            "service_tier": "standard",
            **usage.energy,
        }
        if self.output_items.builder.num_reasoning_tokens:
            usage_fields["output_tokens_details"] = {"thinking_tokens": self.output_items.builder.num_reasoning_tokens}
        return usage_fields

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with contextlib.aclosing(self.output_items.follow(self.generation)) as batches:
            async for changes in batches:
                events = [] if begun else self._start_message()
                begun = True
                if self.body.max_tokens:
                    events += [event for change in changes for event in self._format_change(change)]
                if events:
                    yield _encode(events)
        yield _encode(
            [
                {
                    "type": "message_delta",
                    "delta": self._format_end(),
                    "usage": self._format_usage(),
                    **self.generation.relaxed,
                    **self.generation.ledger,
                },
                {"type": "message_stop"},
            ]
        )

    def _start_message(self) -> list[dict[str, Any]]:
        message: dict[str, Any] = {
            **self.head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._format_usage(), "output_tokens": 0},
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _format_change(self, change: ItemChange) -> list[dict[str, Any]]:
        output_item, index = change.output_item, change.output_item.index
        if change.what == "begin":
            return [{"type": "content_block_start", "index": index, "content_block": self._format_empty(output_item)}]
        if change.what == "end":
            signature = [_make_delta(index, {"type": "signature_delta", "signature": ""})]
            return [
                *(signature if output_item.kind == "reasoning" else ()),
                {"type": "content_block_stop", "index": index},
            ]
        if output_item.kind == "text":
            return [_make_delta(index, {"type": "text_delta", "text": change.text})]
        if output_item.kind == "call":
            return [_make_delta(index, {"type": "input_json_delta", "partial_json": change.text})]
        return [_make_delta(index, {"type": "thinking_delta", "thinking": change.text})] if self._shows_thinking else []

    def _format_empty(self, output_item: OutputItem) -> dict[str, Any]:
        return self._format_item(
            OutputItem(output_item.kind, output_item.index, id=output_item.id, name=output_item.name)
        )


def _make_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _encode(events: list[dict[str, Any]]) -> bytes:
    return b"".join(sse.named_event(event["type"], event) for event in events)


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments; truncated ones as far as they go."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def to_chat(body: PromptBody) -> ChatBody:
    values: dict[str, Any] = {
        "model": body.model,
        "messages": _translate_messages(body),
        "tools": _translate_tools(body),
        "chat_template_kwargs": _make_template_values(body),
    }
    if body.tool_choice is not None:
        values["tool_choice"] = _translate_choice(body.tool_choice)
        values["parallel_tool_calls"] = False if body.tool_choice.disable_parallel_tool_use else None
    if body.format is not None:
        values["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format.schema_}}
    if body.thinking is not None and body.thinking.type != "disabled":
        values["thinking_token_budget"] = body.thinking.budget_tokens
    if body.is_prefill:
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        values |= {
            "max_tokens": max(1, body.max_tokens),
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "speculation": body.speculation,
            "include_applied": body.include_applied,
        }
    return make_chat_body(values)


def _translate_messages(body: PromptBody) -> list[dict[str, Any]]:
    history = ChatHistory()
    if body.system:
        history.add_text("system", text_of(body.system))
    for message in body.messages:
        if isinstance(message, UserMessage):
            _add_user(history, message)
        elif isinstance(message, AssistantMessage):
            _add_assistant(history, message)
        else:
            history.add_text("system", text_of(message.content))
    return history.messages()


def _add_user(history: ChatHistory, message: UserMessage) -> None:
    if isinstance(message.content, str):
        return history.add_text("user", message.content, join=True)
    for part in message.content:
        if isinstance(part, ToolResultBlock):
            text = text_of(part.content)
            history.add_result(part.tool_use_id, f"Error: {text}" if part.is_error else text)
        else:
            history.add_text("user", part.text, join=True)


def _add_assistant(history: ChatHistory, message: AssistantMessage) -> None:
    if isinstance(message.content, str):
        return history.add_text("assistant", message.content)
    for part in message.content:
        if isinstance(part, TextBlock):
            history.add_text("assistant", part.text)
        elif isinstance(part, ThinkingBlock):
            history.add_reasoning(part.thinking)
        elif isinstance(part, ToolUseBlock):
            history.add_call(part.id, part.name, json.dumps(part.input, ensure_ascii=False))


def _translate_tools(body: PromptBody) -> list[dict[str, Any]] | None:
    tools = []
    for tool in body.tools or ():
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        tools.append(
            {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
        )
    return tools or None


def _translate_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def _make_template_values(body: PromptBody) -> dict[str, Any] | None:
    """Set the variables by which templates switch reasoning; others ignore them."""
    values: dict[str, Any] = {}
    if body.thinking is not None:
        is_enabled = body.thinking.type != "disabled"
        values |= {"enable_thinking": is_enabled, "thinking": is_enabled}
    effort = body.output_config.effort if body.output_config else None
    if effort is not None:
        values["reasoning_effort"] = EFFORTS.get(effort, effort)
    return values or None


async def messages(request: Request) -> Response:
    body = await read_body(request, MessagesBody)
    server = server_of(request)
    model = await server.catalog.open(body.model)
    chat = await run_on_body(request, lambda: to_chat(body))
    chat.model = body.model
    chat_prompt = await cancel_on_disconnect(request, ChatPrompt.prepare(chat, model, client_of(request).tenant))
    warn_of_unused_budget(request, chat, chat_prompt)
    fills_context = len(chat_prompt.encoded.tokens) + max(1, body.max_tokens) > model.facts.max_model_len
    if fills_context:  # max_tokens is required, so clients exceed the context
        chat_prompt = replace(chat_prompt, params=chat_prompt.params.clone(max_tokens=None))
    generation = await start_generation(request, model, chat, [(chat_prompt.encoded, chat_prompt.params)])
    answer = MessageAnswer(body, chat_prompt, generation, fills_context=fills_context)
    server.traces.name(generation.trace, answer.head["id"])
    if body.stream:
        return await event_stream(
            request,
            answer.events(),
            lambda error: sse.named_event("error", format_failure(error, request.scope[REQUEST_ID])),
        )
    return json_response(await cancel_on_disconnect(request, answer.collect()))


async def count_tokens(request: Request) -> Response:
    body = await read_body(request, CountTokensBody)
    model = await server_of(request).catalog.open(body.model)
    asked = await run_on_body(request, lambda: to_chat(body))
    chat = asked.model_copy(update={"truncate_prompt_tokens": MAX_INT32})  # any length can be counted
    chat_prompt = await cancel_on_disconnect(request, ChatPrompt.prepare(chat, model, client_of(request).tenant))
    return json_response({"input_tokens": len(chat_prompt.encoded.tokens)})
